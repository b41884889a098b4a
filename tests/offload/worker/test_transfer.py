"""Known bytes through the transfer engine: random layouts, faults, cancellations and order of completion."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.config import Verify
from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.testing.copiers.inline import InlineExecutor, RefusingExecutor
from offload.worker import allowance, checker
from offload.worker.allowance import HOLD_SECONDS
from offload.worker.copiers import CopyEnd
from offload.worker.jobs import TransferEnd
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout, CopyBatch, Region
from offload.worker.seals import SAMPLE_EVERY, Seals
from offload.worker.transfer import DEADLINE_SECONDS, TransferEngine
from tests.offload.places import (
    ALL_PLACES,
    Bytes,
    HostPlaces,
    Places,
    PlacesFactory,
    first_gpu_bytes,
    first_pool_bytes,
)
from tests.strategies import thorough

pytestmark = pytest.mark.timeout(120)

NUM_BLOCKS = 16
"""Blocks on the GPU, and slots in the pool."""

LAYOUTS: dict[str, list[Region]] = {
    "one piece": [Region(0, 12, 12)],
    "one piece and a gap": [Region(4, 12, 9)],
    "three layers": [Region(0, 5, 5), Region(100, 3, 3), Region(200, 7, 4)],
}
"""Regions by name, at addresses relative to the GPU's first byte."""

NUM_BYTES = 512

FILL = 77
"""The store job that filled every slot before a test begins."""

ENDING = [Fault.NONE, Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]
"""Faults with which a copy ends by itself and does not lie about its bytes."""


@dataclass(frozen=True)
class Job:
    """What a test does with one job. Blocks and slots belong to no other job."""

    route: Route
    block_ids: list[int]
    slots: list[int]
    fault: Fault
    cancelled: bool


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    orders = st.one_of(st.just(list(range(NUM_BLOCKS))), st.permutations(range(NUM_BLOCKS)))
    block_ids, slots = draw(orders), draw(orders)
    jobs = []
    while block_ids and len(jobs) < 6:
        size = min(draw(st.integers(0, 6)), len(block_ids))
        jobs.append(
            Job(
                draw(st.sampled_from(GPU_ROUTES)),
                list(block_ids[:size]),
                list(slots[:size]),
                draw(st.sampled_from(ENDING)),
                draw(st.sampled_from([False, False, False, True])),
            )
        )
        block_ids, slots = block_ids[size:], slots[size:]
    return jobs


class Bench:
    """A transfer engine over two memories, and what each of them held before."""

    def __init__(
        self,
        places: Places,
        regions: list[Region],
        fence: int | None = None,
        *,
        of_blocks: bool = False,
        verify: Verify = Verify.ALWAYS,
    ) -> None:
        self.now = 0.0
        self.places = places
        self.regions = regions
        self.faults: dict[int, Fault] = {}
        self.copier = Breakable(places, lambda job_id, _: self.faults.get(job_id, Fault.NONE))
        at = [region._replace(address=places.gpu_address + region.address) for region in regions]
        layout = BlockLayout(at, places.pool_address, slots_per_registration=fence)
        self.seals = Seals(layout, NUM_BLOCKS, verify)
        every = np.arange(NUM_BLOCKS)
        self.seals.seal(FILL, every, every)
        self.seals.of_blocks = of_blocks and places.is_host
        self.engine = TransferEngine(
            gpu_lanes(layout, self.copier), self.seals, clock=lambda: self.now, make_executor=InlineExecutor
        )

    def submit(self, job_id: int, job: Job) -> None:
        self.faults[job_id] = job.fault
        block_ids, slots = np.array(job.block_ids, dtype=np.int64), np.array(job.slots, dtype=np.int64)
        if job.route == STORE:
            self.engine.submit(job_id, STORE, block_ids, slots)
        else:
            self.engine.submit(job_id, LOAD, slots, block_ids, np.full_like(slots, FILL))

    def settle(self) -> list[TransferEnd]:
        """Wait for all copies and return what has ended."""
        self.copier.drain()
        return self.engine.poll()

    def bytes_of(self, job: Job) -> tuple[list[list[int]], list[list[int]]]:
        """Offsets of each block's bytes on the GPU and in the pool."""
        slot_bytes = sum(region.piece_bytes for region in self.regions)
        gpu = [
            [
                region.address + block_id * region.block_stride + offset
                for region in self.regions
                for offset in range(region.piece_bytes)
            ]
            for block_id in job.block_ids
        ]
        pool = [list(range(slot * slot_bytes, (slot + 1) * slot_bytes)) for slot in job.slots]
        return gpu, pool

    def arrived(self, job: Job) -> int:
        """Leading blocks of a job whose bytes are all where they should be, by looking at the memory."""
        gpu, pool = self.bytes_of(job)
        if job.route == STORE:
            source, target, sources, targets = first_gpu_bytes(NUM_BYTES), self.places.pool, gpu, pool
        else:
            source, target, sources, targets = first_pool_bytes(NUM_BYTES), self.places.gpu(), pool, gpu
        same = [
            bool((source[there] == target[here]).all()) for there, here in zip(sources, targets, strict=True)
        ]
        return (*same, False).index(False)

    def num_sealed(self, job_id: int, job: Job) -> int:
        """How many leading slots of a store are sealed as filled by it."""
        slots = np.array(job.slots, dtype=np.int64)
        return self.seals.num_current(slots, np.full_like(slots, job_id))

    def check_untouched(self, jobs: list[Job]) -> None:
        """Nothing but the targets of these jobs has changed, and those only to what their sources held."""
        gpu, pool = first_gpu_bytes(NUM_BYTES), first_pool_bytes(NUM_BYTES)
        gpu_may, pool_may = gpu.copy(), pool.copy()
        for job in jobs:
            blocks, slots = (np.array(side, dtype=np.intp).ravel() for side in self.bytes_of(job))
            if job.route == STORE:
                pool_may[slots] = gpu[blocks]
            else:
                gpu_may[blocks] = pool[slots]
        _check_one_of(self.places.gpu(), gpu, gpu_may)
        _check_one_of(self.places.pool, pool, pool_may)


GOOD_ENDS = (Fault.NONE, Fault.END_SHORT)
"""Without an error from below, though an end that comes short gets one."""


class Breakable(FaultyCopier):
    """Also breaks where no single batch is to blame."""

    def __init__(self, places: Places, choose: Callable[[int, Route], Fault]) -> None:
        super().__init__(places.copier, choose)
        self.broken_fence: Route | None = None
        self.broken_poll = False
        self.submitted: list[int] = []
        """Jobs."""

    def submit(self, job_id: int, direction: Route, batch: CopyBatch) -> None:
        self.submitted.append(job_id)
        super().submit(job_id, direction, batch)

    def fence(self, direction: Route) -> None:
        if direction is self.broken_fence:
            raise RuntimeError("no such event")
        super().fence(direction)

    def poll(self) -> list[CopyEnd]:
        if self.broken_poll:
            raise RuntimeError("the device is lost")
        return super().poll()


@pytest.mark.parametrize("make", ALL_PLACES)
@pytest.mark.parametrize("regions", LAYOUTS.values(), ids=LAYOUTS.keys())
@given(
    jobs=job_lists(),
    fence=st.sampled_from([None, 1, 3]),
    of_blocks=st.booleans(),
    verify=st.sampled_from(Verify),
    data=st.data(),
)
@settings(thorough(80), suppress_health_check=list(HealthCheck))
def test_jobs_end_once_with_what_has_arrived(
    make: PlacesFactory,
    regions: list[Region],
    jobs: list[Job],
    fence: int | None,
    of_blocks: bool,
    verify: Verify,
    data: st.DataObject,
) -> None:
    with make(NUM_BYTES) as places:
        bench = Bench(places, regions, fence, of_blocks=of_blocks, verify=verify)
        bench.copier.holding = True
        for job_id, job in enumerate(jobs):
            bench.submit(job_id, job)
        refused = [job_id for job_id, job in enumerate(jobs) if job.fault is Fault.REFUSE]
        for job_id, job in enumerate(jobs):
            if job.cancelled:
                bench.engine.cancel(job_id)
                bench.engine.cancel(job_id)
        assert len(bench.engine) == len(jobs)
        ends = bench.settle()
        assert [end.job_id for end in ends] == refused
        for job_id in data.draw(st.permutations(sorted(set(range(len(jobs))) - set(refused)))):
            bench.copier.release(job_id)
            (end,) = bench.engine.poll()
            assert end.job_id == job_id
            ends.append(end)
            bench.engine.cancel(job_id)
        assert bench.settle() == []
        assert len(bench.engine) == 0

        for end in ends:
            job = jobs[end.job_id]
            assert end.route == job.route
            assert end.targets.tolist() == (job.slots if job.route == STORE else job.block_ids)
            if job.cancelled and job.fault is not Fault.REFUSE:
                assert (end.num_good, end.error) == (0, "cancelled")
                continue
            assert end.num_good == bench.arrived(job)
            assert (end.error is None) == (end.num_good == len(job.block_ids) and job.fault in GOOD_ENDS)
            if job.fault is Fault.NONE:
                assert end.num_good == len(job.block_ids)
        for end in ends:
            is_sealed = end.route == STORE and end.error is None
            assert bench.num_sealed(end.job_id, jobs[end.job_id]) == is_sealed * len(end.targets)
        bench.check_untouched([job for job in jobs if job.fault not in (Fault.REFUSE, Fault.FAIL)])


@pytest.fixture(params=ALL_PLACES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    make: PlacesFactory = request.param
    with make(NUM_BYTES) as places:
        yield Bench(places, LAYOUTS["one piece and a gap"])  # there a single copy brings a whole block


A_STORE = Job(STORE, [3, 1], [0, 5], Fault.NONE, cancelled=False)
A_LOAD = Job(LOAD, [7, 8, 9], [9, 8, 7], Fault.NONE, cancelled=False)


@pytest.mark.parametrize("broken", GPU_ROUTES)
def test_a_broken_fence_fails_its_direction_until_one_holds(bench: Bench, broken: Route) -> None:
    bench.copier.broken_fence = broken
    for direction in GPU_ROUTES:
        bench.engine.fence(direction)
    jobs = {1: A_STORE, 2: A_LOAD}
    for job_id, job in jobs.items():
        bench.submit(job_id, job)
    for end in sorted(bench.settle(), key=lambda end: end.job_id):
        job = jobs.pop(end.job_id)
        failed = job.route == broken
        assert end.num_good == bench.arrived(job) == (0 if failed else len(job.block_ids))
        assert end.error == ("RuntimeError: no such event" if failed else None)
    assert jobs == {}

    bench.copier.broken_fence = None
    bench.engine.fence(broken)
    bench.submit(3, A_STORE)
    bench.submit(4, A_LOAD)
    assert sorted((end.job_id, end.num_good, end.error) for end in bench.settle()) == [
        (3, 2, None),
        (4, 3, None),
    ]


def test_with_a_lost_device_all_in_flight_is_given_up_until_it_is_heard_of_again(bench: Bench) -> None:
    """Nobody knows what its copies still do."""
    bench.copier.holding = True
    bench.submit(1, A_STORE)
    bench.submit(2, A_LOAD)
    bench.engine.cancel(2)
    bench.copier.drain()
    bench.copier.broken_poll = True
    ends = bench.engine.poll()
    assert sorted((end.job_id, end.num_good, end.error, end.is_over) for end in ends) == [
        (1, 0, "RuntimeError: the device is lost", False),
        (2, 0, "RuntimeError: the device is lost", False),
    ]
    assert bench.engine.poll() == [] and len(bench.engine) == 2

    bench.copier.broken_poll = bench.copier.holding = False
    ends = bench.engine.poll()
    assert sorted((end.job_id, end.num_good, end.is_over) for end in ends) == [(1, 0, True), (2, 0, True)]
    assert len(bench.engine) == 0
    bench.submit(3, A_STORE)
    (end,) = bench.settle()
    assert (end.job_id, end.num_good, end.error) == (3, 2, None)
    bench.check_untouched([A_STORE, A_LOAD])


def test_an_end_before_the_device_was_lost_stands(bench: Bench) -> None:
    bench.faults[1] = Fault.REFUSE
    bench.submit(1, Job(STORE, [0], [0], Fault.REFUSE, cancelled=False))
    bench.submit(2, A_LOAD)
    bench.copier.broken_poll = True
    ends = {end.job_id: end.error for end in bench.engine.poll()}
    assert ends == {1: "RuntimeError: job 1 refused on purpose", 2: "RuntimeError: the device is lost"}


def test_a_cancelled_job_ends_only_when_its_copies_have(bench: Bench) -> None:
    with bench.places.stores_held():
        bench.submit(1, A_STORE)
        bench.engine.cancel(1)
        assert bench.engine.poll() == []
        assert len(bench.engine) == 1
    (end,) = bench.settle()
    assert (end.job_id, end.num_good, end.error) == (1, 0, "cancelled")
    assert bench.num_sealed(1, A_STORE) == 0


# Many loads land at once

LOADS = [Job(LOAD, [index], [index], Fault.NONE, cancelled=False) for index in range(8)]


@pytest.fixture
def landed(bench: Bench) -> Bench:
    """Eight loads have been copied, the youngest first, and two are told at a time."""
    bench.engine.landed_at_once = 2
    for job_id in reversed(range(len(LOADS))):
        bench.submit(job_id, LOADS[job_id])
    bench.copier.drain()
    return bench


def test_loads_that_land_together_are_told_a_few_at_a_time_the_oldest_first(landed: Bench) -> None:
    told = []
    while len(landed.engine):
        told.append([(end.job_id, end.num_good, end.error) for end in landed.engine.poll()])
    assert told == [[(at, 1, None), (at + 1, 1, None)] for at in (0, 2, 4, 6)]
    landed.check_untouched(LOADS)


def test_bad_news_does_not_wait_for_loads_that_landed(landed: Bench) -> None:
    landed.engine.poll()
    failing = replace(LOADS[0], block_ids=[8, 9], slots=[8, 9], fault=Fault.FAIL)
    landed.submit(8, failing)
    landed.submit(9, Job(STORE, [10], [10], Fault.NONE, cancelled=False))
    ends = {end.job_id: end.error is None for end in landed.settle()}
    assert ends == {8: False, 9: True, 2: True, 3: True}


def test_a_load_that_landed_and_is_not_told_can_be_cancelled(landed: Bench) -> None:
    landed.engine.poll()
    landed.engine.cancel(7)
    landed.engine.cancel(0)  # it was told
    ends = {end.job_id: (end.num_good, end.error) for end in landed.engine.poll()}
    assert ends == {7: (0, "cancelled"), 2: (1, None), 3: (1, None)}
    assert len(landed.engine) == 3


def test_an_engine_that_sleeps_tells_what_landed_when_it_wakes_up(landed: Bench) -> None:
    assert landed.engine.rest(seconds=0) == 0
    told = []
    while len(landed.engine):
        told += [end.job_id for end in landed.engine.poll()]
    assert sorted(told) == list(range(8))


def test_what_landed_while_an_engine_fell_asleep_can_be_cancelled(landed: Bench) -> None:
    assert landed.engine.rest(seconds=0) == 0
    for job_id in range(8):
        landed.engine.cancel(job_id)
    ends = landed.settle()
    assert sorted(end.job_id for end in ends) == list(range(8))
    assert {(end.num_good, end.error) for end in ends} == {(0, "cancelled")}


# Stores are held back

SHORT_STORE = Job(STORE, [5, 6], [5, 6], Fault.NONE, cancelled=False)
LONG_STORE = Job(STORE, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], Fault.NONE, cancelled=False)


@pytest.fixture
def loading(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Load 1 is under way, stores may take 20 bytes per second beside it and have taken what they may."""
    monkeypatch.setattr(allowance, "STORE_BYTES_PER_SECOND", 20)
    bench.copier.holding = True
    bench.submit(1, A_LOAD)
    bench.engine._allowance._left = 0.0
    return bench


def test_stores_are_held_back_while_loads_are_under_way(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.submit(3, SHORT_STORE)
    assert loading.settle() == []
    assert loading.copier.submitted == [1]
    loading.now = 0.1
    assert loading.settle() == []
    assert loading.copier.submitted == [1, 2], "two bytes may be taken: it takes 45"
    loading.now = HOLD_SECONDS - 0.01
    assert loading.settle() == []
    assert loading.copier.submitted == [1, 2], "after 45 bytes, these take two seconds"
    loading.now = HOLD_SECONDS
    assert loading.settle() == []
    assert loading.copier.submitted == [1, 2, 3], "but no longer than that"
    loading.copier.holding = False
    ends = loading.settle()
    assert sorted((end.job_id, end.num_good, end.error) for end in ends) == [
        (1, 3, None),
        (2, 5, None),
        (3, 2, None),
    ]
    assert loading.arrived(LONG_STORE) == 5


def test_what_is_urgent_is_not_held_back(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    urgent = np.array([5, 6])
    loading.engine.fence(STORE)
    loading.engine.submit(3, STORE, urgent, urgent, is_urgent=True)
    assert loading.settle() == []
    assert loading.copier.submitted == [1, 3]
    loading.engine.check_invariants()
    loading.copier.release(1)
    loading.settle()
    assert loading.copier.submitted == [1, 3, 2]


def test_with_the_last_load_all_stores_begin(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.submit(3, SHORT_STORE)
    loading.copier.release(1)
    assert [end.job_id for end in loading.settle()] == [1]
    assert loading.copier.submitted == [1, 2, 3]


def test_a_load_that_was_given_up_holds_nobody_back(loading: Bench) -> None:
    loading.now = DEADLINE_SECONDS
    assert [(end.job_id, end.is_over) for end in loading.engine.poll()] == [(1, False)]
    loading.engine._allowance._left, loading.engine._allowance._at = 0.0, loading.now
    loading.submit(2, LONG_STORE)
    loading.submit(3, SHORT_STORE)
    assert loading.copier.submitted == [1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_stores_take_beside_loads_what_they_may_and_wait_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A model of 15 stores of one to six blocks of nine bytes each; load 0 stays under way."""
    rate, burst, rng = 100.0, 50.0, np.random.default_rng(seed)
    monkeypatch.setattr(allowance, "STORE_BYTES_PER_SECOND", rate)
    monkeypatch.setattr(allowance, "_BURST_BYTES", burst)
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece and a gap"])
        bench.copier.holding = True
        bench.submit(0, A_LOAD)
        left, before = burst, 0.0
        waiting: dict[int, tuple[float, int]] = {}  # since when, and how many bytes
        begun, num_waited, num_too_long = [0], 0, 0
        for job_id in range(1, 60):
            bench.now += rng.choice([0.0, 0.01, 0.1, 0.3])
            if is_store := job_id <= 15 and job_id % 3 != 2:
                size = int(rng.integers(1, 7))
                waiting[job_id] = bench.now, 9 * size
            left = min(burst, left + rate * (bench.now - before))
            before = bench.now
            for waiter, (since, num_bytes) in list(waiting.items()):
                is_too_long = bench.now >= since + HOLD_SECONDS
                if left <= 0 and not is_too_long:
                    num_waited += 1
                    break
                num_too_long += left <= 0
                left -= num_bytes
                begun.append(waiter)
                del waiting[waiter]
            if is_store:
                bench.submit(job_id, Job(STORE, [*range(size)], [*range(size)], Fault.NONE, False))
            assert bench.settle() == []
            assert bench.copier.submitted == begun
        assert num_waited, "the test is blind: no store had to wait"
        assert not waiting


def test_a_store_that_was_held_back_has_all_of_its_time_to_copy(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.now = HOLD_SECONDS
    assert loading.engine.poll() == []
    assert loading.copier.submitted == [1, 2]
    loading.now = DEADLINE_SECONDS
    assert [end.job_id for end in loading.engine.poll()] == [1]
    loading.now += HOLD_SECONDS
    assert [(end.job_id, end.is_over) for end in loading.engine.poll()] == [(2, False)]


def test_a_load_that_is_only_to_be_checked_holds_nobody_back(loading: Bench) -> None:
    """Its copy has ended."""
    checksum = Future[int]()
    loading.engine._checker._executors[LOAD] = Late(checksum)
    loading.submit(2, Job(LOAD, [10], [10], Fault.NONE, cancelled=False))
    for job_id in (1, 2):
        loading.copier.release(job_id)
    assert [end.job_id for end in loading.settle()] == [1]
    loading.engine._allowance._left = 0.0
    loading.submit(3, LONG_STORE)
    loading.submit(4, SHORT_STORE)
    assert loading.copier.submitted == [1, 2, 3, 4]
    checksum.set_result(1)
    assert [end.job_id for end in loading.settle()] == [2]


def test_a_pause_between_two_looks_at_the_clock_gives_no_held_store_up(loading: Bench) -> None:
    """As when the process stands still: poll found that its turn had not come, and then 40 s were over."""
    loading.submit(2, LONG_STORE)
    loading.engine._allowance._left = -9.0
    times = iter([0.1, DEADLINE_SECONDS + 10])
    loading.engine._clock = lambda: next(times, loading.now)
    assert [(end.job_id, end.is_over) for end in loading.engine.poll()] == [(1, False)]
    loading.now = DEADLINE_SECONDS + 10
    assert loading.engine.poll() == []
    assert loading.copier.submitted == [1, 2]


def test_nothing_is_copied_for_a_store_that_was_cancelled_in_time(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.submit(3, SHORT_STORE)
    loading.engine.cancel(2)
    loading.copier.release(1)
    loading.copier.holding = False
    ends = [*loading.settle(), *loading.settle()]
    assert {end.job_id: end.error for end in ends} == {1: None, 2: "cancelled", 3: None}
    assert loading.copier.submitted == [1, 3]
    loading.check_untouched([A_LOAD, SHORT_STORE])


def test_a_store_that_is_held_back_ends_at_once_when_it_is_cancelled(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.engine.cancel(2)
    assert [(end.job_id, end.error, end.is_over) for end in loading.engine.poll()] == [(2, "cancelled", True)]
    assert loading.copier.submitted == [1]


def test_nothing_of_a_store_that_is_held_back_is_lost_with_the_device(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.copier.broken_poll = True
    ends = {end.job_id: (end.error, end.is_over) for end in loading.engine.poll()}
    lost = "RuntimeError: the device is lost"
    assert ends == {1: (lost, False), 2: (lost, True)}
    loading.copier.broken_poll = False
    loading.engine._allowance._left = -1.0
    loading.submit(3, SHORT_STORE)
    assert loading.copier.submitted == [1, 3], "no load is waited for any more"


def test_an_engine_that_sleeps_fails_no_store_that_is_held_back(loading: Bench) -> None:
    loading.submit(2, LONG_STORE)
    loading.submit(3, SHORT_STORE)
    loading.copier.release(1)
    loading.copier.drain()
    loading.now = 2 * DEADLINE_SECONDS
    loading.submit(4, Job(LOAD, [10], [10], Fault.NONE, cancelled=False))
    loading.copier.holding = False
    assert {end.job_id: end.error for end in [*loading.settle(), *loading.settle()]} == {
        1: None,
        2: None,
        3: None,
        4: None,
    }


def test_cancelling_what_is_not_in_flight_does_nothing(bench: Bench) -> None:
    bench.engine.cancel(1)
    bench.submit(1, A_STORE)
    (end,) = bench.settle()
    assert (end.num_good, end.error) == (2, None)
    bench.engine.cancel(1)
    assert bench.settle() == []


def test_closing_waits_for_what_is_in_flight(bench: Bench) -> None:
    bench.submit(1, A_STORE)
    bench.submit(2, A_LOAD)
    assert bench.engine.close(seconds=30)
    assert bench.arrived(A_STORE) == 2
    assert bench.arrived(A_LOAD) == 3
    assert bench.engine.close(seconds=30)


def test_closing_a_broken_copier_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FaultyCopier):
        def close(self, seconds: float) -> bool:
            raise RuntimeError("the device is lost")

    with HostPlaces(NUM_BYTES) as places:
        layout = BlockLayout(LAYOUTS["one piece"], 0)
        engine = TransferEngine(gpu_lanes(layout, Broken(places.copier)), Seals(layout, 1))
        assert engine.close(seconds=1), "nothing moves there any more"
    assert "the device is lost" in caplog.text


def test_a_slot_that_another_store_has_filled_is_not_loaded(bench: Bench) -> None:
    slots, block_ids = np.array([9, 8, 7]), np.array([7, 8, 9])
    bench.engine.submit(1, LOAD, slots, block_ids, np.array([FILL, FILL + 1, FILL]))
    bench.engine.submit(2, LOAD, slots, block_ids, np.array([FILL + 1, FILL, FILL]))
    ends = {end.job_id: end for end in bench.settle()}
    assert (ends[1].num_good, ends[2].num_good) == (1, 0)
    assert "block 1 was filled by another store" in str(ends[1].error)
    assert "filled by other stores" in str(ends[2].error)
    bench.check_untouched([Job(LOAD, [7], [9], Fault.NONE, cancelled=False)])


@pytest.mark.parametrize("position", range(3))
def test_nothing_is_copied_from_the_first_slot_on_that_another_store_has_filled(
    bench: Bench, position: int
) -> None:
    fills = np.full(3, FILL)
    fills[position] = FILL + 1
    bench.engine.submit(1, LOAD, np.array(A_LOAD.slots), np.array(A_LOAD.block_ids), fills)
    (end,) = bench.settle()
    assert (end.num_good, bench.arrived(A_LOAD)) == (position, position)
    assert bench.copier.submitted == ([1] if position else [])
    good = replace(A_LOAD, block_ids=A_LOAD.block_ids[:position], slots=A_LOAD.slots[:position])
    bench.check_untouched([good])


def test_a_slot_is_loaded_only_after_its_store_has_ended_well(bench: Bench) -> None:
    slots, block_ids = np.array([0, 5]), np.array([3, 1])
    bench.submit(1, replace(A_STORE, fault=Fault.STOP_HALFWAY))
    bench.settle()
    for fill in (FILL, 1):
        bench.engine.submit(2, LOAD, slots, block_ids, np.full(2, fill))
        (end,) = bench.settle()
        assert end.num_good == 0
    bench.submit(3, A_STORE)
    bench.settle()
    bench.engine.submit(4, LOAD, slots, block_ids, np.full(2, 3))
    (end,) = bench.settle()
    assert (end.num_good, end.error) == (2, None)


@pytest.mark.parametrize("of_blocks", [False, True], ids=["of slots", "of blocks"])
@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("position", range(3))
def test_a_load_whose_slot_is_filled_again_before_its_copy_fails(
    bench: Bench, position: int, verify: Verify, of_blocks: bool
) -> None:
    """The slots of a load are pinned. If they are not, that is a failed load, whatever is verified."""
    bench.seals.verify, bench.seals.of_blocks = verify, of_blocks and bench.places.is_host
    bench.submit(1, replace(A_LOAD, fault=Fault.STUCK))
    usurper = Job(STORE, [0], [A_LOAD.slots[position]], Fault.NONE, cancelled=False)
    bench.submit(2, usurper)
    assert [(end.job_id, end.num_good) for end in bench.settle()] == [(2, 1)]
    bench.copier.let_go()
    (end,) = bench.settle()
    assert (end.job_id, end.num_good) == (1, position)
    assert bench.arrived(A_LOAD) == position, "the test is blind: the load brought the right bytes"
    if verify is Verify.NEVER:
        assert end.error == f"the slot of block {position} was filled by another store"


@pytest.mark.parametrize("verify", Verify)
def test_a_load_fails_for_a_store_that_is_held_back_too(loading: Bench, verify: Verify) -> None:
    """The store has not begun, but nobody knows whether it will before the load's copy has ended."""
    loading.seals.verify = verify
    loading.submit(2, Job(STORE, [0], [A_LOAD.slots[1]], Fault.NONE, cancelled=False))
    assert loading.copier.submitted == [1]
    loading.copier.release(1)
    (end,) = loading.settle()
    assert (end.job_id, end.num_good) == (1, 1)
    assert end.error == "the slot of block 1 was filled by another store"


@pytest.mark.parametrize("is_done_in_time", [True, False])
def test_a_check_that_takes_no_time_costs_no_step(
    monkeypatch: pytest.MonkeyPatch, is_done_in_time: bool
) -> None:
    """It begins when the copy has ended, and requests wait for it."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"], of_blocks=True)
        checksum = Future[int]()
        bench.engine._checker._executors[LOAD] = Late(checksum)

        def wait(checks: list[Future[int]], seconds: float) -> None:
            assert checks == [checksum] and 0 < seconds <= 0.001
            if is_done_in_time:
                checksum.set_result(3)

        monkeypatch.setattr(checker, "wait", wait)
        bench.submit(1, A_LOAD)
        bench.copier.drain()
        assert [end.job_id for end in bench.engine.poll()] == [1] * is_done_in_time
        if not is_done_in_time:
            checksum.set_result(3)
            assert [end.job_id for end in bench.engine.poll()] == [1]


def test_a_slot_filled_again_after_the_copy_has_ended_is_no_fault(bench: Bench) -> None:
    """Its checksum may be late; the bytes that were copied are the right ones."""
    checksum = Future[int]()
    bench.engine._checker._executors[LOAD] = Late(checksum)
    bench.submit(1, A_LOAD)
    assert bench.settle() == [], "it has not been checked"
    bench.submit(2, Job(STORE, [0], [A_LOAD.slots[1]], Fault.NONE, cancelled=False))
    checksum.set_result(3)
    assert {end.job_id: (end.num_good, end.error) for end in bench.settle()} == {1: (3, None), 2: (1, None)}
    assert bench.arrived(A_LOAD) == 3


@pytest.mark.parametrize("of_blocks", [False, True])
@pytest.mark.parametrize("regions", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("position", range(3))
def test_a_slot_that_changed_at_rest_is_found(regions: list[Region], position: int, of_blocks: bool) -> None:
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, regions, of_blocks=of_blocks)
        slot_bytes = sum(region.piece_bytes for region in regions)
        places.pool[A_LOAD.slots[position] * slot_bytes + slot_bytes - 1] ^= 1
        bench.submit(1, A_LOAD)
        (end,) = bench.settle()
        assert end.num_good == position
        assert f"block {position} is not what was stored" in str(end.error)


@pytest.mark.parametrize("fault_in", GPU_ROUTES)
def test_wrong_bytes_of_a_copy_are_found_where_blocks_can_be_read(fault_in: Route) -> None:
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["three layers"], of_blocks=True)
        load = Job(LOAD, [7, 8], A_STORE.slots, Fault.NONE, cancelled=False)
        for job_id, job in enumerate([A_STORE, load]):
            fault = Fault.WRONG_BYTES if job.route == fault_in else Fault.NONE
            bench.faults[job_id] = fault
            slots, block_ids = np.array(job.slots), np.array(job.block_ids)
            if job.route == STORE:
                bench.engine.submit(job_id, STORE, block_ids, slots)
            else:
                bench.engine.submit(job_id, LOAD, slots, block_ids, np.zeros(2, dtype=np.int64))
            (end,) = bench.settle()
        assert end.num_good == 1, "the middle copy of six is of the second block"


@pytest.mark.parametrize("of_blocks", [False, True], ids=["of slots", "of blocks"])
@pytest.mark.parametrize("verify", Verify)
def test_how_many_loads_that_lie_are_found(verify: Verify, of_blocks: bool) -> None:
    """One byte of one in 16 blocks is wrong each time. Checksums of slots say nothing about copies."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"], of_blocks=of_blocks, verify=verify)
        every = list(range(NUM_BLOCKS))
        found = 0
        for job_id in range(SAMPLE_EVERY):
            bench.submit(job_id, Job(LOAD, every, every, Fault.WRONG_BYTES, cancelled=False))
            (end,) = bench.settle()
            assert bench.arrived(Job(LOAD, every, every, Fault.NONE, cancelled=False)) == 8
            assert end.num_good in (8, NUM_BLOCKS)
            found += end.num_good == 8
        assert found == (
            {Verify.ALWAYS: SAMPLE_EVERY, Verify.SAMPLED: 1, Verify.NEVER: 0}[verify] if of_blocks else 0
        )


@pytest.mark.parametrize("verify", Verify)
def test_what_is_not_verified_is_believed(verify: Verify) -> None:
    """Sampling looks at one of these three blocks in each load, and not always at the same one."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"], verify=verify)
        places.pool[A_LOAD.slots[1] * 12] ^= 1
        found = 0
        for job_id in range(48):
            bench.submit(job_id, A_LOAD)
            (end,) = bench.settle()
            assert end.num_good in (1, 3)
            found += end.num_good == 1
        assert found == {Verify.ALWAYS: 48, Verify.SAMPLED: 15, Verify.NEVER: 0}[verify]


@pytest.mark.parametrize("job", [A_STORE, A_LOAD], ids=["store", "load"])
def test_a_stuck_job_is_given_up_and_over_when_it_ends(bench: Bench, job: Job) -> None:
    bench.submit(1, replace(job, fault=Fault.STUCK))
    bench.now = DEADLINE_SECONDS - 1
    bench.submit(2, Job(STORE, [5, 6], [14, 15], Fault.NONE, cancelled=False))
    assert [end.job_id for end in bench.settle()] == [2]
    bench.now = DEADLINE_SECONDS
    (given_up,) = bench.settle()
    assert (given_up.job_id, given_up.num_good, given_up.is_over) == (1, 0, False)
    assert "has not ended after 30 s" in str(given_up.error)
    assert bench.settle() == [] and len(bench.engine) == 1
    bench.copier.let_go()
    (over,) = bench.settle()
    assert (over.job_id, over.num_good, over.is_over) == (1, 0, True)
    assert len(bench.engine) == 0
    assert bench.num_sealed(1, job) == 0


@pytest.mark.parametrize(
    "fault", [Fault.STOP_HALFWAY, Fault.END_SHORT, Fault.STUCK, Fault.FAIL, Fault.REFUSE]
)
def test_slots_of_a_failed_store_are_nobodys(bench: Bench, fault: Fault) -> None:
    """Those it had filled too: the scheduler side gives all of them back."""
    bench.submit(1, replace(A_STORE, fault=fault))
    bench.copier.drain()
    bench.now = DEADLINE_SECONDS
    ends = bench.settle()
    bench.copier.let_go()
    ends += bench.settle()
    assert {end.error for end in ends}.isdisjoint({None})
    slots, block_ids = np.array(A_STORE.slots), np.array(A_STORE.block_ids)
    for fill in (FILL, 1):
        assert bench.seals.num_current(slots, np.full(2, fill)) == 0
        bench.engine.submit(2, LOAD, slots, block_ids, np.full(2, fill))
        (end,) = bench.settle()
        assert (end.num_good, end.error) == (0, "its slots were filled by other stores")


def test_a_load_that_ended_in_time_is_not_given_up_for_a_late_checksum(bench: Bench) -> None:
    checksum = Future[int]()
    bench.engine._checker._executors[LOAD] = Late(checksum)
    bench.submit(1, A_LOAD)
    bench.copier.drain()
    assert bench.engine.poll() == []
    bench.now = 3 * DEADLINE_SECONDS
    assert bench.engine.poll() == []
    checksum.set_result(2)
    (end,) = bench.engine.poll()
    assert (end.num_good, end.is_over) == (2, True)
    assert "block 2 is not what was stored" in str(end.error)


def test_a_copy_that_ended_in_time_is_not_given_up_for_a_late_checksum() -> None:
    """As when the engine makes no steps for a while."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"])
        bench.engine._checker._executors = {way: ThreadPoolExecutor(1) for way in GPU_ROUTES}
        go = threading.Event()
        bench.engine._checker._executors[STORE].submit(go.wait)
        bench.submit(1, A_STORE)
        bench.copier.drain()
        bench.now = 2 * DEADLINE_SECONDS
        assert bench.engine.poll() == []
        go.set()
        bench.engine._checker._executors[STORE].shutdown()
        (end,) = bench.engine.poll()
        assert (end.num_good, end.error, end.is_over) == (2, None, True)


class Late(Executor):
    """Does not do what it is given; somebody else says when, and with what result."""

    def __init__(self, result: Future[int]) -> None:
        self._result = result

    def submit(self, *_: object, **__: object) -> Any:
        return self._result


def test_without_threads_for_checksums_those_jobs_fail_and_no_others(bench: Bench) -> None:
    bench.engine._checker._executors[STORE] = RefusingExecutor()
    bench.submit(1, A_STORE)
    bench.submit(2, A_LOAD)
    assert sorted((end.job_id, end.num_good, end.error) for end in bench.settle()) == [
        (1, 0, "RuntimeError: can't start new thread"),
        (2, 3, None),
    ]


def test_closing_gives_up_what_is_stuck() -> None:
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"])
        bench.submit(1, replace(A_STORE, fault=Fault.STUCK))
        assert not bench.engine.close(seconds=30)


def test_jobs_end_once_their_checksums_are_made() -> None:
    """With real threads, held back by a job before them."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece"])
        bench.engine._checker._executors = {way: ThreadPoolExecutor(1) for way in GPU_ROUTES}
        go = threading.Event()
        for executor in bench.engine._checker._executors.values():
            executor.submit(go.wait)
        bench.submit(1, A_STORE)
        bench.submit(2, A_LOAD)
        assert bench.settle() == [] and len(bench.engine) == 2
        go.set()
        for executor in bench.engine._checker._executors.values():
            executor.shutdown()
        assert sorted((end.job_id, end.num_good) for end in bench.engine.poll()) == [(1, 2), (2, 3)]


def test_a_checksum_that_cannot_be_made_fails_its_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(Seals, "_checksums", fail)
    bench.submit(1, A_STORE)
    bench.submit(2, A_LOAD)
    assert sorted((end.job_id, end.num_good, end.error) for end in bench.settle()) == [
        (1, 0, "OSError: no such memory"),
        (2, 0, "OSError: no such memory"),
    ]


def _check_one_of(now: Bytes, before: Bytes, after: Bytes) -> None:
    wrong = np.flatnonzero((now != before) & (now != after))
    assert len(wrong) == 0, f"bytes {wrong} are {now[wrong]}: neither {before[wrong]} nor {after[wrong]}"
