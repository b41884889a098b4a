"""Benchmarks run in this process: what they write and print, and what they refuse.

They silence logging, vLLM's too, for their process and its children; here that is everybody's.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest


class Ran(NamedTuple):
    """What a benchmark wrote, and what it printed."""

    rows: list[dict[str, Any]]
    meta: dict[str, Any]
    out: str
    err: str


Run = Callable[..., Ran]
"""The fixture ``run``: of a benchmark's ``__main__`` and its arguments."""
Refusal = Callable[..., str]
"""The fixture ``refusal``: of the same, what it says against them as it ends."""


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    disabled, environment = logging.root.manager.disable, dict(os.environ)
    yield
    logging.disable(disabled)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Each run writes to ``out/rows.json``."""

    def run(benchmark: ModuleType, *arguments: str) -> Ran:
        file = tmp_path / "out" / "rows.json"
        file.unlink(missing_ok=True)
        assert benchmark.main([*arguments, "--json", str(file)]) == 0
        written = json.loads(file.read_text())
        return Ran(written["rows"], written["meta"], *capsys.readouterr())

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def refusal(benchmark: ModuleType, *arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            benchmark.main(arguments)
        assert end.value.code == 2
        return capsys.readouterr().err

    return refusal
