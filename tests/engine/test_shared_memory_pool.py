"""A pool in shared memory survives the engine: the next one serves its first ask from it."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offload.testing.engines.hybrids import HYBRIDS, tiny_hybrid
from offload.testing.engines.process import EngineError
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine, model_directory
from tests.engine.process import EngineProcess
from tests.engine.test_hybrid import QUESTIONS as HYBRID_QUESTIONS
from tests.engine.test_hybrid import settings_of

pytestmark = pytest.mark.engine

PROMPT = prompt_of(40 * BLOCK_SIZE + 20, seed=1)
OTHER = prompt_of(40 * BLOCK_SIZE + 20, seed=2)
QUESTION = HYBRID_QUESTIONS[0]
WHOLE = 40 * BLOCK_SIZE
"""Tokens of the whole blocks of a prompt."""


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def start(
    memory: Path, logs: Path, number: int, *, cpu_gib: float = 0.0625, **arguments: Any
) -> EngineProcess:
    pool = {"kind": "shared-memory", "path": str(memory), "wait_seconds": 10}
    settings = {"cpu_gib": cpu_gib, "pool": pool}
    return EngineProcess(logs / f"engine{number}.log", settings, **{"fork": True} | arguments)


def ask(engine: EngineProcess, prompt: list[int] = PROMPT) -> Answer:
    [answer] = engine.run(Engine.ask, [prompt])
    return answer


def region_bytes(memory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in memory.rglob("*") if path.is_file())


def test_a_stopped_and_a_killed_engine_are_followed_by_ones_that_serve_from_the_pool(
    memory: Path, tmp_path: Path
) -> None:
    """What was stored after a reset, with other weights, is of no use to an engine with the first ones."""
    with start(memory, tmp_path, 1) as engine:
        cold = ask(engine)
        engine.run(Engine.settle)
    taken = region_bytes(memory)
    with suppress(EngineError), start(memory, tmp_path, 2) as engine:
        first = ask(engine)
        assert first.num_cached == WHOLE, "a regular end"
        assert difference(first, cold) < TOLERANCE
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine)
        assert restored.num_cached == WHOLE
        assert difference(first, restored) == 0
        assert engine.run(Engine.forget_all)
        assert ask(engine, OTHER).num_cached == 0
        assert ask(engine).num_cached == 0, "a reset hides it from this engine"
        engine.run(Engine.settle)
        for seed in range(10, 14):
            engine.run(Engine.add, prompt_of(1400, seed), 2)
        engine.run(Engine.step)
        os.killpg(engine.pid, signal.SIGKILL)  # while these are computed and stored
    with start(memory, tmp_path, 3) as engine:
        assert ask(engine, OTHER).num_cached == 0, "of other weights"
        third = ask(engine)
        assert third.num_cached == WHOLE, "of before the reset"
        assert difference(third, cold) < TOLERANCE
    assert region_bytes(memory) <= taken + 4096


def test_ranks_with_the_same_kv_adopt_one_pool(memory: Path, tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 2, "model": model_directory(kv_heads=1)}
    with suppress(EngineError), start(memory, tmp_path, 1, **arguments) as engine:
        cold = ask(engine)
        engine.run(Engine.settle)
        os.killpg(engine.pid, signal.SIGKILL)
    assert len(list(memory.rglob("pool"))) == 1
    with start(memory, tmp_path, 2, **arguments) as engine:
        first = ask(engine)
    assert first.num_cached == WHOLE
    assert difference(first, cold) < TOLERANCE


def test_a_hybrid_model_goes_on_at_a_checkpoint(memory: Path, tmp_path: Path) -> None:
    kind = "gemma3"
    arguments = settings_of(HYBRIDS[kind]) | {"model": tiny_hybrid(kind)}
    with start(memory, tmp_path, 1, cpu_gib=0.25, **arguments) as engine:
        cold = ask(engine, QUESTION)
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine, QUESTION)
        engine.run(Engine.settle)
    with start(memory, tmp_path, 2, cpu_gib=0.25, **arguments) as engine:
        first = ask(engine, QUESTION)
    assert cold.num_cached == 0 < restored.num_cached
    assert first.num_cached == restored.num_cached
    assert difference(first, restored) == 0


def fetched_bytes(engine: EngineProcess) -> float:
    """That came from siblings so far."""
    return float(engine.run(Engine.settle).get("route_bytes:siblings_to_pool", 0))


def test_engines_beside_each_other_read_from_each_other(memory: Path, tmp_path: Path) -> None:
    """One is killed: what it had is still read, and so is what its successor has."""
    with suppress(EngineError), start(memory, tmp_path, 1) as first:
        cold = ask(first)
        first.run(Engine.settle)
        with start(memory, tmp_path, 2) as second:
            found = ask(second)
            assert found.num_cached == WHOLE
            assert difference(found, cold) < TOLERANCE
            num_bytes = fetched_bytes(second)
            assert num_bytes > 0
            other = ask(second, OTHER)
            second.run(Engine.settle)
            again = ask(first, OTHER)
            assert again.num_cached == WHOLE, "and the other way round"
            assert difference(again, other) < TOLERANCE
            for seed in range(10, 14):
                first.run(Engine.add, prompt_of(1400, seed), 2)
            first.run(Engine.step)
            os.killpg(first.pid, signal.SIGKILL)
            for seed in range(10, 14):
                assert ask(second, prompt_of(1400, seed)).tokens
            assert len(list(memory.rglob("pool"))) == 2
