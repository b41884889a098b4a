"""Engines shared by tests. Starting one takes ten seconds and more, so they live as long as they serve."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

CPU_GIB = 0.0625

StartEngine = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def session_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine as users have it: vLLM's defaults, processes of its own, a GPU cache of 48 blocks."""
    with EngineProcess(tmp_path_factory.mktemp("session") / "engine.log", {"cpu_gib": CPU_GIB}) as engine:
        yield engine


@pytest.fixture
def engine(session_engine: EngineProcess) -> EngineProcess:
    """The session's engine, with nothing cached anywhere."""
    assert session_engine.run(Engine.forget_all), "GPU blocks are still held from an earlier test"
    return session_engine


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines, with the arguments of ``Engine``, and stops them when the module is done."""
    with ExitStack() as engines:

        def start(extra_config: dict[str, Any] | None, **settings: Any) -> EngineProcess:
            log = tmp_path_factory.mktemp("engine") / "engine.log"
            return engines.enter_context(EngineProcess(log, extra_config, **settings))

        yield start
