"""Orders of a tier as jobs of a medium, and what media say as ends of copies, on ranks that share bytes."""

import numpy as np
import pytest

from offload.messages import POOL, PRIVATE, SUFFIX_BYTES, Extents, Ids, Route
from offload.testing.media.memory import MemoryMedium
from offload.worker.copiers.base import CopyEnd
from offload.worker.lanes import Lane
from offload.worker.layout import BlockLayout, Region
from offload.worker.media.base import MediumEnd, MediumJob, Verb
from offload.worker.media.lane import MediumLane, PoolParts, medium_lanes, tier_facts
from offload.worker.media.seal_log import Kept
from offload.worker.replicas import Share
from offload.worker.seals import Seals
from tests.offload.worker.media.bench import EXTENT, PLACES, SLOTS, Pool, ids

SPILL, FETCH = Route("spill", POOL, "disk"), Route("fetch", "disk", POOL)
FIRST, SECOND = Share(0, 2), Share(1, 2)


class NotedMedium:
    """Keeps jobs, and ends them as it is told to."""

    def __init__(self) -> None:
        self.jobs: list[MediumJob] = []
        self.ends: list[MediumEnd] = []
        self.is_off = False
        self.closed_after: float | None = None

    def submit(self, job: MediumJob) -> None:
        self.jobs.append(job)

    def poll(self) -> list[MediumEnd]:
        ends, self.ends = self.ends, []
        return ends

    def close(self, seconds: float) -> bool:
        self.closed_after = seconds
        return False


class Rank:
    """A rank's lanes over a medium, and its part of the pool."""

    def __init__(self, share: Share = Share(), *, is_noted: bool = True) -> None:  # noqa: B008 (immutable)
        self.pool = Pool()
        memory = self.pool.slots
        layout = BlockLayout([Region(memory.address, memory.slot_bytes, memory.slot_bytes)], memory.address)
        self.seals = Seals(layout, SLOTS, for_others=True)
        self.seals.seal(1, None, np.arange(SLOTS))
        kept = MemoryMedium(memory, extent_slots=EXTENT, num_places=PLACES)
        self.medium = NotedMedium() if is_noted else kept
        parts = PoolParts(memory, self.seals, share)
        self.spill, self.fetch = medium_lanes(SPILL, FETCH, self.medium, parts)

    @property
    def job(self) -> MediumJob:
        """The only one that was submitted."""
        assert isinstance(self.medium, NotedMedium)
        [job] = self.medium.jobs
        return job

    def submit(self, lane: Lane, extents: Extents, slots: Ids, job_id: int = 5) -> None:
        """As a worker does: its own blocks of an order, then a batch of them."""
        assert isinstance(lane, MediumLane)
        own = lane.own(lane.pool.share, job_id, len(slots), extents)
        places = np.repeat(extents.places, np.diff(extents.starts))
        if lane.fills_pool:
            batch = lane.batch(places[own], slots[own], extents)
        else:
            batch = lane.batch(slots[own], places[own], extents)
        lane.copier.submit(job_id, lane.route, batch)


def names_of(*letters: str) -> np.ndarray:
    return np.frombuffer(b"".join(each.encode() * 32 for each in letters), dtype=np.uint8).reshape(-1, 32)


def written(suffix: bytes = b"") -> Extents:
    """Three extents of four blocks each."""
    starts = ids(0, 4, 8, 12)
    skips, generations = ids(0, 0, 0), ids(70, 70, 70)
    places = ids(4, 7, 2)
    return Extents(places, generations, starts, skips, names_of(*"ABC"), names_of(*"0AB"), suffix=suffix)


def read() -> Extents:
    """Behind two blocks of the first, and before the last of the third."""
    return Extents(ids(4, 7, 2), ids(70, 71, 72), ids(0, 2, 6, 9), ids(2, 0, 0))


# One rank


@pytest.mark.parametrize("suffix", [b"", PRIVATE])
def test_a_spill_has_names_and_the_pools_seals(suffix: bytes) -> None:
    rank, slots = Rank(), np.arange(20, 32)
    rank.submit(rank.spill, written(suffix), slots)
    job = rank.job
    assert (job.job_id, job.verb, job.suffix) == (5, Verb.PUT, suffix)
    assert job.places.tolist() == [4, 7, 2]
    assert job.generations.tolist() == [70, 70, 70]
    assert job.starts.tolist() == [0, 4, 8, 12]
    assert job.slots.tolist() == slots.tolist()
    assert job.seals is not None and np.array_equal(job.seals, rank.pool.seals(slots.tolist()))
    assert np.array_equal(job.names, names_of(*"ABC")) and np.array_equal(job.parents, names_of(*"0AB"))


def test_seals_are_what_the_pool_knows_not_what_it_holds() -> None:
    """A slot that rots between its store and its spill is not made right by a checksum of its own."""
    rank = Rank()
    before = rank.pool.seals([20])
    rank.pool.fill([20])
    rank.submit(rank.spill, written(), np.arange(20, 32))
    assert rank.job.seals is not None and rank.job.seals[0] == before[0]


def test_a_fetch_leaves_out_what_is_not_wanted() -> None:
    rank, slots = Rank(), np.arange(40, 49)
    rank.submit(rank.fetch, read(), slots)
    job = rank.job
    assert job.verb is Verb.GET and job.seals is None and job.names is None
    assert job.skips is not None and job.skips.tolist() == [2, 0, 0]
    assert job.starts.tolist() == [0, 2, 6, 9]
    assert job.slots.tolist() == slots.tolist()


@pytest.mark.parametrize(("num_good", "num_blocks"), [(0, 0), (1, 2), (2, 6), (3, 9)])
def test_ends_are_by_blocks(num_good: int, num_blocks: int) -> None:
    rank = Rank()
    rank.submit(rank.fetch, read(), np.arange(40, 49))
    assert isinstance(rank.medium, NotedMedium)
    error = None if num_good == 3 else "torn"
    sums = np.arange(num_blocks, dtype=np.uint64)
    rank.medium.ends = [MediumEnd(5, num_good, error, 0.5, 9, sums)]
    [end] = rank.fetch.copier.poll()
    assert end == CopyEnd(5, num_blocks, error)
    assert end.seconds == 0.5 and end.sums is sums
    assert rank.fetch.copier.poll() == []


def test_jobs_end_in_any_order() -> None:
    rank = Rank()
    rank.submit(rank.fetch, read(), np.arange(40, 49), 5)
    rank.submit(rank.spill, written(), np.arange(20, 32), 6)
    assert isinstance(rank.medium, NotedMedium)
    rank.medium.ends = [MediumEnd(6, 1, "short"), MediumEnd(5, 1, "short")]
    assert [(end.job_id, end.num_copied) for end in rank.spill.copier.poll()] == [(6, 4), (5, 2)]


def test_requests_wait_for_fetches_alone() -> None:
    rank = Rank()
    assert rank.fetch.is_awaited and not rank.spill.is_awaited
    assert rank.fetch.copier is rank.spill.copier
    assert rank.fetch.fills_pool and not rank.spill.fills_pool
    assert not rank.fetch.meets_gpu and not rank.spill.meets_gpu
    assert rank.spill.checks_slots, "the medium does"


def test_bytes_and_blocks_of_a_batch() -> None:
    rank = Rank()
    batch = rank.fetch.batch(ids(), np.arange(40, 49), read())
    slot_bytes = rank.pool.slots.slot_bytes
    assert rank.fetch.num_bytes(batch) == 9 * slot_bytes
    assert rank.fetch.num_bytes(batch, 6) == 6 * slot_bytes
    assert rank.fetch.whole_blocks(batch, 6) == 6


def test_closing_it_closes_the_medium() -> None:
    rank = Rank()
    assert isinstance(rank.medium, NotedMedium)
    assert rank.spill.copier.close(3.0) is False
    assert rank.medium.closed_after == 3.0


def test_the_engine_meets_no_end_of_it() -> None:
    with pytest.raises(AssertionError, match="touches no end"):
        Rank().spill.copier.fence(SPILL)


# Ranks that share bytes


def test_each_moves_what_lies_in_its_places() -> None:
    """Of places 4, 7 and 2 the even ones are the first rank's; it numbers them by halves."""
    slots = np.arange(20, 32)
    first, second = Rank(FIRST), Rank(SECOND)
    for rank in (first, second):
        rank.submit(rank.spill, written(), slots)
    assert first.job.places.tolist() == [2, 1]
    assert first.job.slots.tolist() == [20, 21, 22, 23, 28, 29, 30, 31]
    assert first.job.starts.tolist() == [0, 4, 8]
    assert np.array_equal(first.job.names, names_of("A", "C"))
    assert np.array_equal(first.job.parents, names_of("0", "B"))
    assert second.job.places.tolist() == [3]
    assert second.job.slots.tolist() == [24, 25, 26, 27]
    assert np.array_equal(second.job.names, names_of("B"))
    for rank in (first, second):
        assert rank.job.seals is not None
        assert np.array_equal(rank.job.seals, rank.pool.seals(rank.job.slots.tolist()))


def test_each_fetches_what_it_has() -> None:
    first, second = Rank(FIRST), Rank(SECOND)
    for rank in (first, second):
        rank.submit(rank.fetch, read(), np.arange(40, 49))
    assert first.job.slots.tolist() == [40, 41, 46, 47, 48]
    assert first.job.starts.tolist() == [0, 2, 5]
    assert first.job.generations.tolist() == [70, 72]
    assert first.job.skips is not None and first.job.skips.tolist() == [2, 0]
    assert second.job.slots.tolist() == [42, 43, 44, 45]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_every_block_is_of_one_rank(num_parts: int) -> None:
    lane = Rank().spill
    owned = [lane.own(Share(part, num_parts), 5, 12, written()) for part in range(num_parts)]
    assert sorted(np.concatenate(owned).tolist()) == list(range(12))


def test_a_rank_without_a_part_has_an_empty_job() -> None:
    rank = Rank(Share(4, 5))
    extents = written()._replace(places=ids(5, 7, 2))
    rank.submit(rank.spill, extents, np.arange(20, 32))
    job = rank.job
    assert (job.num_extents, job.starts.tolist(), len(job.slots)) == (0, [0], 0)
    assert isinstance(rank.medium, NotedMedium)
    rank.medium.ends = [MediumEnd(5, 0)]
    assert rank.spill.copier.poll() == [CopyEnd(5, 0, None)]


def test_what_is_kept_is_told_by_the_places_of_all() -> None:
    names, parents = names_of("A", "B"), names_of("0", "A")
    suffixes = np.full((2, SUFFIX_BYTES), 7, dtype=np.uint8)
    kept = Kept(ids(0, 3), ids(7, 9), ids(4, 4), names, parents, suffixes)
    facts = tier_facts(kept, 2, 6, EXTENT, SECOND)
    assert facts.places.tolist() == [1, 7]
    assert (facts.num_places, facts.epoch, facts.extent_slots) == (12, 2, EXTENT)
    assert (facts.part, facts.num_parts) == (1, 2)
    assert np.array_equal(facts.names, names) and np.array_equal(facts.parents, parents)
    assert facts.generations.tolist() == [7, 9] and facts.num_slots.tolist() == [4, 4]
    assert facts.suffixes is suffixes


# Down and up again


@pytest.mark.parametrize("share", [Share(), FIRST, SECOND], ids=["alone", "first", "second"])
def test_bytes_come_back_where_they_are_wanted(share: Share) -> None:
    rank = Rank(share, is_noted=False)
    slots = np.arange(20, 32)
    rank.submit(rank.spill, written(), slots, 5)
    [end] = rank.spill.copier.poll()
    own = share.blocks_of(written())
    assert end == CopyEnd(5, len(own), None)
    wanted = read()._replace(generations=ids(70, 70, 70))
    targets = np.arange(40, 49)
    rank.submit(rank.fetch, wanted, targets, 6)
    [end] = rank.fetch.copier.poll()
    mine = share.blocks_of(wanted)
    assert end == CopyEnd(6, len(mine), None)
    sources = np.concatenate([slots[2:4], slots[4:8], slots[8:11]])[mine].tolist()
    assert rank.pool.read(targets[mine].tolist()) == rank.pool.read(sources)
    assert end.sums is not None and np.array_equal(end.sums, rank.pool.seals(sources))
