"""The pool of a real engine grows and shrinks between requests, and gives its memory back."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

GIB = 0.0625
PROMPTS = [prompt_of(40 * BLOCK_SIZE + 5, seed) for seed in range(8)]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        yield Path(path) / "run"


def memory_of(engine: EngineProcess) -> int:
    """Bytes that the engine's processes have in memory, without those of files."""
    return sum(_anonymous(pid) for pid in engine.processes())


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) << 10


def settled_memory(engine: EngineProcess, is_reached: Callable[[int], bool]) -> int:
    """Bytes, once that is so, or after many steps: a thread gives pages back beside these."""
    for _ in range(100):
        if is_reached(used := memory_of(engine)):
            break
        engine.run(Engine.settle)
    return used


def resize(
    directory: Path, gib: float, capsys: pytest.CaptureFixture[str], status: int = 0
) -> dict[str, Any]:
    command = ["resize", str(gib), "--operator-socket", str(directory), "--json"]
    assert main(command) == status
    [told] = json.loads(capsys.readouterr().out)["engines"]
    return dict(told)


def settle_at(engine: EngineProcess, gib: float) -> None:
    """Let the engine make steps until the pool has that size."""
    for _ in range(200):
        counters = engine.run(Engine.settle)
        if counters["pool_bytes"] == gib * 2**30:
            return
    raise AssertionError(engine.log())


def test_it_shrinks_and_grows_and_answers_stay_right(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"cpu_gib": GIB, "cpu_gib_max": 4 * GIB, "operator_socket": str(directory)}
    with EngineProcess(tmp_path / "engine.log", settings, fork=True) as engine:

        def ask() -> list[Answer]:
            """All prompts again, each from the pool as far as that has it."""
            answers = []
            for prompt in PROMPTS:
                answers += engine.run(Engine.ask, [prompt])
                assert engine.run(Engine.forget_gpu)
            return answers

        cold = ask()
        assert not any(answer.num_cached for answer in cold)
        assert all(answer.num_cached == 40 * BLOCK_SIZE for answer in ask()), "all of them fit"
        full = memory_of(engine)
        resize(directory, GIB / 4, capsys)
        settle_at(engine, GIB / 4)
        used = settled_memory(engine, lambda used: full - used > GIB * 2**29)
        assert full - used > GIB * 2**29, "most of three quarters are given back"
        small = ask()
        assert max(difference(*pair) for pair in zip(cold, small, strict=True)) < TOLERANCE
        before = memory_of(engine)
        resize(directory, 4 * GIB, capsys)
        settle_at(engine, 4 * GIB)
        assert memory_of(engine) - before > 3 * GIB * 2**30
        ask()
        large = ask()
        assert all(answer.num_cached == 40 * BLOCK_SIZE for answer in large)
        assert max(difference(*pair) for pair in zip(cold, large, strict=True)) < TOLERANCE
        status = ["status", "--operator-socket", str(directory), "--json"]
        assert main(status) == 0
        [told] = json.loads(capsys.readouterr().out)["engines"]
        assert told["pool"]["num_bytes"] == 4 * GIB * 2**30
        for gib, words in ((5 * GIB, "more than cpu_gib_max"), (1e-9, "less than the pool can have")):
            assert words in resize(directory, gib, capsys, status=1)["error"]
