"""Two ranks with the one KV head between them: they keep one copy, in memory that nothing outlives."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from offload.testing.engines.process import EngineError
from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, SEEN, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine, model_directory
from tests.engine.process import EngineProcess
from tests.shared_memory import files_of_ours

pytestmark = pytest.mark.engine

BLOCKS = 12
PROMPT = prompt_of(BLOCKS * BLOCK_SIZE + 5, seed=90)

RANK_BYTES = BLOCK_BYTES // 2
"""Of a block with one head, which each rank has."""

_WAIT_SECONDS = 60


def shared_by(process: int) -> set[str]:
    """Memory that this process shares with others: files in /dev/shm, and segments of ours."""
    with suppress(OSError):
        text = Path(f"/proc/{process}/maps").read_text()
        return set(re.findall(r"/dev/shm/\S+|/memfd:kv-offload-\S+", text))
    return set()


@pytest.fixture(scope="module")
def before() -> set[Path]:
    """Files of ours in shared memory before the engine started."""
    return files_of_ours()


@pytest.fixture(scope="module")
def one_head(before: set[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """It may be killed by a test, and leave vLLM's queues behind."""
    settings = {"fork": True, "tensor_parallel_size": 2, "model": model_directory(kv_heads=1)}
    files: set[str] = set()
    with suppress(EngineError), running(tmp_path_factory, {"cpu_gib": CPU_GIB}, **settings) as engine:
        files = set().union(*map(shared_by, engine.processes()))
        yield engine
    for file in files:
        Path(file).unlink(missing_ok=True)


def test_both_ranks_have_the_same_slots(one_head: EngineProcess) -> None:
    """In the memory that was asked for are twice the blocks that a copy on each rank would leave."""
    one, other = one_head.run(Engine.probe_all, "process_id")
    segments = [{name for name in shared_by(worker) if "memfd" in name} for worker in (one, other)]
    assert segments[0] == segments[1] and len(segments[0]) == 1
    counters = one_head.run(Engine.settle)
    assert counters["pool_blocks"] == CPU_GIB * 2**30 // RANK_BYTES
    assert counters["pool_bytes"] == CPU_GIB * 2**30


def test_trap_73_and_74_each_stores_a_part_and_both_restore_it_bit_for_bit(one_head: EngineProcess) -> None:
    before = one_head.run(Engine.settle)
    [cold] = one_head.run(Engine.ask, [PROMPT])
    stored = one_head.run(Engine.settle)
    assert stored["route_bytes"] - before["route_bytes"] == BLOCKS * RANK_BYTES, "on both ranks together"
    [gpu] = one_head.run(Engine.ask, [PROMPT], hints={"cpu_offload_load": False})
    assert one_head.run(Engine.forget_gpu)
    [restored] = one_head.run(Engine.ask, [PROMPT])
    loaded = one_head.run(Engine.settle)
    assert loaded["restored_tokens"] - stored["restored_tokens"] == BLOCKS * BLOCK_SIZE
    assert loaded["route_bytes"] - stored["route_bytes"] == 2 * BLOCKS * RANK_BYTES
    assert restored.num_cached == gpu.num_cached
    assert restored.tokens == gpu.tokens and difference(restored, gpu) == 0
    assert difference(restored, cold) <= TOLERANCE
    assert one_head.run(Engine.forget_gpu)
    one_head.run(Engine.probe_all, "corrupt_next_load", 7)
    [corrupted] = one_head.run(Engine.ask, [PROMPT])
    assert difference(corrupted, cold) > SEEN, "the test is blind"
    assert one_head.run(Engine.forget_all)


def test_a_part_that_one_rank_did_not_store_is_a_miss(one_head: EngineProcess) -> None:
    prompt = prompt_of(BLOCKS * BLOCK_SIZE + 5, seed=91)
    one_head.run(Engine.probe_all, "fail_next_on_rank", 1, "STORE", *["STOP_HALFWAY"] * 9)
    [cold] = one_head.run(Engine.ask, [prompt])
    assert one_head.run(Engine.forget_gpu)
    before = one_head.run(Engine.settle)
    [answer] = one_head.run(Engine.ask, [prompt])
    after = one_head.run(Engine.settle)
    assert after["restored_tokens"] == before["restored_tokens"]
    assert before["failed_jobs"]
    assert difference(answer, cold) <= TOLERANCE


def test_trap_75_a_killed_engine_leaves_nothing(before: set[Path], one_head: EngineProcess) -> None:
    """No process, no file, and no process that still has the segment."""
    processes = one_head.processes()
    shared = set().union(*map(shared_by, processes))
    assert any("memfd" in name for name in shared)
    os.killpg(one_head.pid, signal.SIGKILL)
    killed = time.monotonic()
    while left := one_head.processes():
        assert time.monotonic() - killed < _WAIT_SECONDS, f"still running: {left}"
        time.sleep(0.05)
    everybody = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    mapped = set().union(*map(shared_by, everybody))
    assert not [name for name in mapped & shared if "memfd" in name]
    assert files_of_ours() <= before
