"""Each check of the worker's side can fail: state that contradicts itself is found, and shown."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offload.config import Verify
from offload.messages import LOAD, STORE, Fingerprint, JobReport, Order, Part, Resize, Route, StepPlan
from offload.testing.copiers.inline import InlineExecutor
from offload.worker import side as worker_side
from offload.worker.allowance import STORE_BYTES_PER_SECOND
from offload.worker.copiers import CopyEnd
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout, CopyBatch, Region
from offload.worker.pool.memory import HostMemory
from offload.worker.resizing import PageThread, WorkerResizing
from offload.worker.seals import Seals
from offload.worker.side import Seams, WorkerSide
from offload.worker.transfer import TransferEngine

NUM_SLOTS = 8
MEMORY = np.zeros(1024, dtype=np.uint8)
LAYOUT = BlockLayout([Region(MEMORY.ctypes.data, 8, 8)], MEMORY.ctypes.data + 512)
IDS = np.arange(2)


class EndlessCopier:
    """Accepts everything and ends nothing."""

    def fence(self, route: Route) -> None:
        pass

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        pass

    def poll(self) -> list[CopyEnd]:
        return []

    def drain(self) -> None:
        pass

    def close(self, seconds: float) -> bool:
        return True


def busy() -> TransferEngine:
    """A load and a store are under way, and another store waits for its turn."""
    seals = Seals(LAYOUT, NUM_SLOTS, Verify.NEVER)
    seals.seal(77, np.arange(NUM_SLOTS), np.arange(NUM_SLOTS))
    lanes = gpu_lanes(LAYOUT, EndlessCopier())
    engine = TransferEngine(lanes, seals, clock=lambda: 0.0, make_executor=InlineExecutor)
    engine.submit(1, STORE, IDS + 2, IDS + 2)
    engine.submit(2, LOAD, IDS, IDS, np.full(2, 77))
    engine._allowance._left = 0.0
    engine.submit(3, STORE, IDS + 4, IDS + 4)
    engine.check_invariants()
    assert list(engine._held) == [3]
    return engine


def sums_of_others(engine: TransferEngine) -> None:
    engine._seals._sums = engine._seals._sums[1:]


def ended_and_under_way(engine: TransferEngine) -> None:
    engine.refuse(2, LOAD, IDS, "")


def load_that_waits(engine: TransferEngine) -> None:
    engine._held[2] = None


def load_forgotten(engine: TransferEngine) -> None:
    engine._awaited.clear()


def copied_and_not_checked(engine: TransferEngine) -> None:
    engine._jobs[1].copied = CopyEnd(1, 1, None)


def given_up_for_ever(engine: TransferEngine) -> None:
    engine._give_up(1, engine._jobs[1], "")
    engine._jobs[1].is_given_up = False


def too_much_at_once(engine: TransferEngine) -> None:
    engine._allowance._left = float(STORE_BYTES_PER_SECOND)


@pytest.mark.parametrize(
    ("contradict", "shown"),
    [
        (sums_of_others, "7 sums of 8"),
        (ended_and_under_way, "under way and over"),
        (load_that_waits, "2 waits, and is awaited"),
        (load_forgotten, "are awaited, known are set"),
        (copied_and_not_checked, "are copied"),
        (given_up_for_ever, "1 was given up"),
        (too_much_at_once, "bytes now"),
    ],
)
def test_a_contradiction_is_found_and_shown(contradict: Callable[[TransferEngine], None], shown: str) -> None:
    engine = busy()
    contradict(engine)
    with pytest.raises(AssertionError, match=shown):
        engine.check_invariants()


class OneBlock:
    """A cache of which nobody asks more than a block's size."""

    num_blocks, block_bytes, least_slots, is_divisible = 8, 8, 1, True

    def regions(self, kv_caches: Any) -> list[Region]:
        return []


def side() -> WorkerSide:
    """It has a load of two parts, and a store that is yet to begin."""
    fingerprint = Fingerprint("", "", 1, 1, "", "")
    made = WorkerSide(OneBlock(), 64, fingerprint, Seams(lambda *_: EndlessCopier()))
    made._engine, made._memory = busy(), MEMORY  # type: ignore[assignment]
    parts = [Part(10, 0, 1), Part(11, 1, 2)]
    made.bind(StepPlan(fingerprint, [Order(LOAD, parts, IDS, IDS, np.full(2, 77), "r")]))
    made.begin_step()
    made.bind(StepPlan(fingerprint, [Order(STORE, [Part(12, 0, 2)], IDS + 6, IDS + 6)]))
    made.check_invariants()
    assert not made.is_idle
    return made


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_stays_mapped_where_a_resize_hangs(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_side, "_CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(worker_side, "_still_in_use", kept := [])
    has_begun, may_end = threading.Event(), threading.Event()
    made, memory = side(), HostMemory(2, 4096, unit_slots=1)
    made._memory = memory
    made._resizing = WorkerResizing(memory, PageThread, torch.device("cpu"))
    if hangs:
        monkeypatch.setattr(memory, "give_back", lambda runs: (has_begun.set(), may_end.wait(60)))
        made._resizing.begin([Resize(0, np.array([0]), np.array([1]), takes=False)])
        assert has_begun.wait(60)
    made.close()
    made.close()
    assert kept == ([memory] if hangs else [])
    assert memory._map.closed is not hangs
    assert ("the CPU pool stays mapped" in caplog.text) is hangs
    may_end.set()
    memory.close()


def part_forgotten(side: WorkerSide) -> None:
    del side._awaited._restores[10]


def ended_before_it_began(side: WorkerSide) -> None:
    side._report.add(12, JobReport(1, 2))


def pool_without_copies(side: WorkerSide) -> None:
    side._engine = None


@pytest.mark.parametrize(
    ("contradict", "shown"),
    [
        (part_forgotten, "1 jobs of"),
        (ended_before_it_began, "never begun"),
        (pool_without_copies, "a pool without copies"),
    ],
)
def test_a_contradiction_of_the_side_is_found(contradict: Callable[[WorkerSide], None], shown: str) -> None:
    made = side()
    contradict(made)
    with pytest.raises(AssertionError, match=shown):
        made.check_invariants()
