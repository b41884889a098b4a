"""Engines that must end: a worker that dies, a copy that never returns, a worker that does not fit."""

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from offload.testing.engines.process import EngineError
from offload.worker.transfer import DEADLINE_SECONDS
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import SHORT, Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(12 * BLOCK_SIZE + 5, seed=70)

_WAIT_SECONDS = 120
_QUEUES = ("psm_", "vllm_dist_")
"""What files in /dev/shm through which vLLM's processes talk are called."""


def shared_memory(processes: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    maps = [Path(f"/proc/{process}/maps").read_text() for process in processes]
    return {Path(path) for text in maps for path in re.findall(r"/dev/shm/\S+", text)}


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with two ranks, whose queues vLLM may leave behind."""
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}, fork=True, tensor_parallel_size=2) as engine:
        files = shared_memory(engine.processes())
        yield engine
    for file in files:
        file.unlink(missing_ok=True)


def test_load_fails_on_one_rank(two_workers: EngineProcess) -> None:
    [cold] = two_workers.run(Engine.ask, [PROMPT])
    assert two_workers.run(Engine.forget_gpu)
    before = two_workers.run(Engine.settle)
    two_workers.run(Engine.probe_all, "fail_next_on_rank", 1, "LOAD", "STOP_HALFWAY")
    [answer] = two_workers.run(Engine.ask, [PROMPT])
    after = two_workers.run(Engine.settle)
    assert difference(answer, cold) <= TOLERANCE
    assert after["failed_jobs"] - before["failed_jobs"] == 1
    assert after["restored_tokens"] - before["restored_tokens"] == 6 * BLOCK_SIZE
    assert two_workers.run(Engine.forget_gpu)
    [answer] = two_workers.run(Engine.ask, [PROMPT])
    assert answer.num_cached == 12 * BLOCK_SIZE
    assert difference(answer, cold) <= TOLERANCE


def begin_load(engine: Engine) -> None:
    """Hand a request over whose load does not end; one behind it has a token, so the load has begun."""
    assert engine.forget_gpu()
    engine.probe_all("stop_time")
    engine.probe_all("hold_ends", True)
    loading, short = engine.add(PROMPT, 4), engine.add(SHORT, 1)
    while short not in (answered := engine.step()):
        assert loading not in answered


def test_worker_dies_while_loading(two_workers: EngineProcess) -> None:
    """The client is told, nothing hangs, and nothing of ours stays behind."""
    _, worker = two_workers.run(Engine.probe_all, "process_id")
    files = shared_memory(two_workers.processes())
    two_workers.run(begin_load)
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError, match="EngineDeadError"):
        two_workers.run(Engine.finish, [])
    while len(two_workers.processes()) > 1:
        assert time.monotonic() - killed < _WAIT_SECONDS, f"still running: {two_workers.processes()}"
        time.sleep(0.1)
    left = [file.name for file in files if file.exists()]
    assert not [name for name in left if not name.startswith(_QUEUES)]


def test_engine_closes_with_a_stuck_copy(tmp_path: Path) -> None:
    """Started after another one has died. The copier's thread never comes back."""
    with EngineProcess(tmp_path / "engine.log", {"cpu_gib": CPU_GIB}, fork=True) as engine:
        [cold] = engine.run(Engine.ask, [PROMPT])
        assert engine.run(Engine.forget_gpu)
        [answer] = engine.run(Engine.ask, [PROMPT])
        assert answer.num_cached == 12 * BLOCK_SIZE
        assert difference(answer, cold) <= TOLERANCE
        engine.run(Engine.probe, "block_copies")
        engine.run(Engine.ask, [prompt_of(3 * BLOCK_SIZE + 5, seed=71)])
        engine.run(Engine.probe, "pass_time", DEADLINE_SECONDS + 1)
        for _ in range(2):
            engine.run(Engine.ask, [SHORT], 1)
        assert engine.run(Engine.counters)["stuck_jobs"] == 1
    assert not engine.processes()
    assert "copies or resizes have not ended after" in engine.log()


def test_worker_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    foreign = "tests.engine.foreign_worker.ForeignWorker"
    log = tmp_path / "engine.log"
    engine = EngineProcess(log, {"cpu_gib": CPU_GIB}, fork=True, worker_extension_cls=foreign)
    with pytest.raises(EngineError, match="initialization failed"), engine:
        pass
    assert (
        "the worker of pipeline rank 0, tensor rank 0 does not fit the scheduler: layout is 'inside out' "
        "there and 'LBHNC' in the scheduler. Start all processes of an engine from the same installation "
        "with the same settings"
    ) in engine.log()
    assert not engine.processes() and not engine.num_killed
