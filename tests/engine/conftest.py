"""Engines shared by tests. Starting one takes seconds to tens of seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.engine import Engine
from tests.engine.inspection import end_pauses
from tests.engine.process import EngineProcess

CPU_GIB = 0.0625
"""Pool of the shared engines: 512 blocks."""


@contextmanager
def running(
    factory: pytest.TempPathFactory, extra_config: dict[str, Any] | None, **settings: Any
) -> Iterator[EngineProcess]:
    """An engine with these arguments of ``Engine``, its output in a file of its own."""
    with EngineProcess(factory.mktemp("engine") / "engine.log", extra_config, **settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def session_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine as users have it: vLLM's defaults, processes of its own, a GPU cache of 48 blocks."""
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}) as engine:
        yield engine


@pytest.fixture(scope="session")
def session_inner_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The same in one process, where a test sees scheduler and cache between steps."""
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}, in_process=True) as engine:
        yield engine


@pytest.fixture
def engine(session_engine: EngineProcess) -> EngineProcess:
    """The session's engine, with nothing cached anywhere."""
    assert session_engine.run(Engine.forget_all), "GPU blocks are still held from an earlier test"
    return session_engine


@pytest.fixture
def inner_engine(session_inner_engine: EngineProcess) -> EngineProcess:
    """The session's engine in one process, with nothing cached anywhere. It checks all that it loads."""
    session_inner_engine.run(Engine.probe, "heal")
    session_inner_engine.run(end_pauses)
    assert session_inner_engine.run(Engine.forget_all), "GPU blocks are still held from an earlier test"
    return session_inner_engine
