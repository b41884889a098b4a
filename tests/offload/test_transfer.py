"""Known bytes through the transfer engine: random layouts, faults, cancellations and order of completion."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.copiers import CopyEnd, Direction, Fault, FaultyCopier
from offload.layout import BlockLayout, Region
from offload.transfer import TransferEnd, TransferEngine
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


@dataclass(frozen=True)
class Job:
    """What a test does with one job. Blocks and slots belong to no other job."""

    direction: Direction
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
                draw(st.sampled_from(Direction)),
                list(block_ids[:size]),
                list(slots[:size]),
                draw(st.sampled_from(Fault)),
                draw(st.sampled_from([False, False, False, True])),
            )
        )
        block_ids, slots = block_ids[size:], slots[size:]
    return jobs


class Bench:
    """A transfer engine over two memories, and what each of them held before."""

    def __init__(self, places: Places, regions: list[Region], fence: int | None = None) -> None:
        self.places = places
        self.regions = regions
        self.faults: dict[int, Fault] = {}
        self.copier = Breakable(places, lambda job_id, _: self.faults.get(job_id, Fault.NONE))
        at = [region._replace(address=places.gpu_address + region.address) for region in regions]
        self.engine = TransferEngine(
            BlockLayout(at, places.pool_address, slots_per_registration=fence), self.copier
        )

    def submit(self, job_id: int, job: Job) -> None:
        self.faults[job_id] = job.fault
        block_ids, slots = np.array(job.block_ids, dtype=np.int64), np.array(job.slots, dtype=np.int64)
        if job.direction is Direction.STORE:
            self.engine.store(job_id, block_ids, slots)
        else:
            self.engine.load(job_id, slots, block_ids)

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
        if job.direction is Direction.STORE:
            source, target, sources, targets = first_gpu_bytes(NUM_BYTES), self.places.pool, gpu, pool
        else:
            source, target, sources, targets = first_pool_bytes(NUM_BYTES), self.places.gpu(), pool, gpu
        same = [
            bool((source[there] == target[here]).all()) for there, here in zip(sources, targets, strict=True)
        ]
        return (*same, False).index(False)

    def check_untouched(self, jobs: list[Job]) -> None:
        """Nothing but the targets of these jobs has changed, and those only to what their sources held."""
        gpu, pool = first_gpu_bytes(NUM_BYTES), first_pool_bytes(NUM_BYTES)
        gpu_may, pool_may = gpu.copy(), pool.copy()
        for job in jobs:
            blocks, slots = (np.array(side, dtype=np.intp).ravel() for side in self.bytes_of(job))
            if job.direction is Direction.STORE:
                pool_may[slots] = gpu[blocks]
            else:
                gpu_may[blocks] = pool[slots]
        _check_one_of(self.places.gpu(), gpu, gpu_may)
        _check_one_of(self.places.pool, pool, pool_may)


class Breakable(FaultyCopier):
    """Also breaks where no single batch is to blame."""

    def __init__(self, places: Places, choose: Callable[[int, Direction], Fault]) -> None:
        super().__init__(places.copier, choose)
        self.broken_fence: Direction | None = None
        self.broken_poll = False

    def fence(self, direction: Direction) -> None:
        if direction is self.broken_fence:
            raise RuntimeError("no such event")
        super().fence(direction)

    def poll(self) -> list[CopyEnd]:
        if self.broken_poll:
            raise RuntimeError("the device is lost")
        return super().poll()


@pytest.mark.parametrize("make", ALL_PLACES)
@pytest.mark.parametrize("regions", LAYOUTS.values(), ids=LAYOUTS.keys())
@given(jobs=job_lists(), fence=st.sampled_from([None, 1, 3]), data=st.data())
@settings(thorough(80), suppress_health_check=list(HealthCheck))
def test_jobs_end_once_with_what_has_arrived(
    make: PlacesFactory, regions: list[Region], jobs: list[Job], fence: int | None, data: st.DataObject
) -> None:
    with make(NUM_BYTES) as places:
        bench = Bench(places, regions, fence)
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
            assert end.direction is job.direction
            assert end.block_ids.tolist() == job.block_ids
            if job.cancelled and job.fault is not Fault.REFUSE:
                assert (end.num_blocks, end.error) == (0, "cancelled")
                continue
            assert end.num_blocks == bench.arrived(job)
            assert (end.error is None) == (job.fault is Fault.NONE)
            if job.fault is Fault.NONE:
                assert end.num_blocks == len(job.block_ids)
        bench.check_untouched([job for job in jobs if job.fault in (Fault.NONE, Fault.STOP_HALFWAY)])


@pytest.fixture(params=ALL_PLACES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    make: PlacesFactory = request.param
    with make(NUM_BYTES) as places:
        yield Bench(places, LAYOUTS["one piece and a gap"])  # there a single copy brings a whole block


STORE = Job(Direction.STORE, [3, 1], [0, 5], Fault.NONE, cancelled=False)
LOAD = Job(Direction.LOAD, [7, 8, 9], [9, 8, 7], Fault.NONE, cancelled=False)


@pytest.mark.parametrize("broken", Direction)
def test_a_broken_fence_fails_its_direction_until_one_holds(bench: Bench, broken: Direction) -> None:
    bench.copier.broken_fence = broken
    for direction in Direction:
        bench.engine.fence(direction)
    jobs = {1: STORE, 2: LOAD}
    for job_id, job in jobs.items():
        bench.submit(job_id, job)
    for end in sorted(bench.settle(), key=lambda end: end.job_id):
        job = jobs.pop(end.job_id)
        failed = job.direction is broken
        assert end.num_blocks == bench.arrived(job) == (0 if failed else len(job.block_ids))
        assert end.error == ("RuntimeError: no such event" if failed else None)
    assert jobs == {}

    bench.copier.broken_fence = None
    bench.engine.fence(broken)
    bench.submit(3, STORE)
    bench.submit(4, LOAD)
    assert sorted((end.job_id, end.num_blocks, end.error) for end in bench.settle()) == [
        (3, 2, None),
        (4, 3, None),
    ]


def test_a_lost_device_fails_everything_in_flight_once(bench: Bench) -> None:
    bench.copier.holding = True
    bench.submit(1, STORE)
    bench.submit(2, LOAD)
    bench.engine.cancel(2)
    bench.copier.drain()
    bench.copier.broken_poll = True
    ends = bench.engine.poll()
    assert sorted((end.job_id, end.num_blocks, end.error) for end in ends) == [
        (1, 0, "RuntimeError: the device is lost"),
        (2, 0, "cancelled"),
    ]
    assert len(bench.engine) == 0
    assert bench.engine.poll() == []

    bench.copier.broken_poll = bench.copier.holding = False
    assert bench.engine.poll() == [], "a job ended twice"
    bench.submit(3, STORE)
    (end,) = bench.settle()
    assert (end.job_id, end.num_blocks, end.error) == (3, 2, None)
    bench.check_untouched([STORE, LOAD])


def test_an_end_before_the_device_was_lost_stands(bench: Bench) -> None:
    bench.faults[1] = Fault.REFUSE
    bench.submit(1, Job(Direction.STORE, [0], [0], Fault.REFUSE, cancelled=False))
    bench.submit(2, LOAD)
    bench.copier.broken_poll = True
    ends = {end.job_id: end.error for end in bench.engine.poll()}
    assert ends == {1: "RuntimeError: job 1 refused on purpose", 2: "RuntimeError: the device is lost"}


def test_a_cancelled_job_ends_only_when_its_copies_have(bench: Bench) -> None:
    with bench.places.stores_held():
        bench.submit(1, STORE)
        bench.engine.cancel(1)
        assert bench.engine.poll() == []
        assert len(bench.engine) == 1
    (end,) = bench.settle()
    assert (end.job_id, end.num_blocks, end.error) == (1, 0, "cancelled")


def test_cancelling_what_is_not_in_flight_does_nothing(bench: Bench) -> None:
    bench.engine.cancel(1)
    bench.submit(1, STORE)
    (end,) = bench.settle()
    assert (end.num_blocks, end.error) == (2, None)
    bench.engine.cancel(1)
    assert bench.settle() == []


def test_closing_waits_for_what_is_in_flight(bench: Bench) -> None:
    bench.submit(1, STORE)
    bench.submit(2, LOAD)
    bench.engine.close()
    assert bench.arrived(STORE) == 2
    assert bench.arrived(LOAD) == 3
    bench.engine.close()


def test_closing_a_broken_copier_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FaultyCopier):
        def close(self) -> None:
            raise RuntimeError("the device is lost")

    with HostPlaces(NUM_BYTES) as places:
        engine = TransferEngine(BlockLayout(LAYOUTS["one piece"], 0), Broken(places.copier))
        engine.close()
    assert "the device is lost" in caplog.text


def _check_one_of(now: Bytes, before: Bytes, after: Bytes) -> None:
    wrong = np.flatnonzero((now != before) & (now != after))
    assert len(wrong) == 0, f"bytes {wrong} are {now[wrong]}: neither {before[wrong]} nor {after[wrong]}"
