"""What left the pool is remembered by where it began, and what is remembered is bounded."""

from typing import Any

import pytest

from allocator import Cause, CpuOffloadingBlockAllocator
from allocator.departures import Departure, Departures

ONE = [b"a%d" % index for index in range(8)]
OTHER = [b"b%d" % index for index in range(8)]


def store(pool: CpuOffloadingBlockAllocator, chain: list[bytes], whom: str = "") -> None:
    pool.departures.whom = whom
    plan = pool.plan_store(chain, len(chain))
    assert plan is not None
    pool.commit(plan)


@pytest.fixture
def pool() -> CpuOffloadingBlockAllocator:
    pool = CpuOffloadingBlockAllocator(10)
    store(pool, ONE)
    return pool


def test_a_tail_that_was_evicted(pool: CpuOffloadingBlockAllocator) -> None:
    pool.departures.now = 3.0
    store(pool, OTHER, "r1")
    depth = pool.resident_depth(ONE)
    assert pool.departures.of(ONE[depth]) == Departure(Cause.EVICTED, 3.0, "r1")
    assert [pool.departures.of(each) for each in (*ONE[:depth], *OTHER)] == [None] * (depth + 8)
    pool.departures.now = 4.0
    pool.evict(10)
    assert pool.departures.of(ONE[0]) == Departure(Cause.EVICTED, 4.0, ""), "for nobody"
    pool.check_invariants()


@pytest.mark.parametrize(
    "leave", [lambda pool: pool.drop(ONE, 3), lambda pool: pool.forget(ONE[0])], ids=["drop", "forget"]
)
def test_what_was_dropped(pool: CpuOffloadingBlockAllocator, leave: Any) -> None:
    leave(pool)
    left = pool.departures.of(ONE[pool.resident_depth(ONE)])
    assert left is not None and left.cause is Cause.DROPPED
    pool.check_invariants()


def test_what_is_not_there_does_not_leave(pool: CpuOffloadingBlockAllocator) -> None:
    pool.drop(OTHER, 0)
    pool.forget(OTHER[0])
    assert len(pool.departures) == 0


def test_it_is_bounded_and_the_oldest_are_forgotten() -> None:
    departures = Departures(2)
    for number, name in enumerate((b"a", b"b", b"a", b"c")):
        departures.now = float(number)
        departures.note(name, Cause.EVICTED)
        departures.check_invariants()
    assert [departures.of(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert departures.num_forgotten == 1


def test_what_nobody_can_go_on_behind_was_not_evicted() -> None:
    """It leaves as no checkpoint is behind it, and for nobody."""
    pool = CpuOffloadingBlockAllocator(20, bag_slots=3)
    for stop, num_bag in ((4, 3), (8, None)):
        plan = pool.plan_store(ONE, stop, num_bag=num_bag)
        assert plan is not None
        pool.commit(plan)
    pool.departures.begin("", 3.0)
    pool.close(ONE)
    assert pool.departures.of(ONE[4]) == Departure(Cause.DROPPED, 3.0, "")
    pool.check_invariants()


def test_what_only_the_gpu_had() -> None:
    """It was never in the pool. Of what was, the rest of a chain is told apart."""
    pool = CpuOffloadingBlockAllocator(10)
    claims = [pool.hollow.claim(chain, len(chain)) for chain in (ONE, OTHER)]
    plan = pool.hollow.plan(ONE, 0, 4, 4)
    assert plan is not None and pool.commit(plan)
    pool.departures.begin("r1", 3.0)
    for claim in claims:
        assert claim is not None
        pool.hollow.end(claim)
    assert pool.resident_depth(ONE) == 4
    assert pool.departures.of(ONE[4]) == pool.departures.of(OTHER[0]) == Departure(Cause.UNSTORED, 3.0, "r1")
    pool.departures.begin("r2", 4.0)
    pool.evict(10)
    assert pool.departures.of(ONE[0]) == Departure(Cause.EVICTED, 4.0, "r2")
    pool.check_invariants()


def test_what_only_the_gpu_had_before_what_a_load_reads(pool: CpuOffloadingBlockAllocator) -> None:
    """It cannot be shed, and is cut off. What was said of it before is said no more."""
    pool.departures.begin("old", 1.0)
    pool.evict(10)
    store(pool, ONE)
    claim = pool.hollow.claim(ONE, 8)
    assert claim is not None and pool.hollow.empty(ONE, 0, 8, 4) == 4
    pin = pool.pin(ONE, 4, 8)
    pool.departures.begin("", 50.0)
    pool.hollow.end(claim)
    assert pool.known_depth(ONE, 8) == 0
    assert pool.departures.of(ONE[0]) == Departure(Cause.UNSTORED, 50.0, "")
    pool.unpin(pin)
    pool.check_invariants()


def test_what_left_a_pool_that_was_made_smaller(pool: CpuOffloadingBlockAllocator) -> None:
    pool.departures.begin("", 3.0)
    pool.resizing.evict(4)
    depth = pool.resident_depth(ONE)
    assert depth == 4
    assert pool.departures.of(ONE[depth]) == Departure(Cause.SHRUNK, 3.0, "")
    pool.departures.begin("", 4.0)
    pool.evict(pool.num_free + 1)
    assert pool.departures.of(ONE[pool.resident_depth(ONE)]) == Departure(Cause.EVICTED, 4.0, "")
    pool.check_invariants()


def test_what_was_in_slots_that_were_taken_away(pool: CpuOffloadingBlockAllocator) -> None:
    pool.departures.begin("", 3.0)
    pool.resizing.close(pool.lookup(ONE).slots[3:5].reshape(-1))
    assert pool.departures.of(ONE[3]) is None, "it is still there"
    assert pool.resizing.empty(100)
    assert pool.departures.of(ONE[3]) == Departure(Cause.SHRUNK, 3.0, "")
    assert len(pool.departures) == 1
    pool.drop(ONE, 2)
    assert pool.departures.of(ONE[2]) == Departure(Cause.DROPPED, 3.0, "")
    pool.check_invariants()


@pytest.mark.parametrize("slot", [0, 1], ids=["of its prefix", "of its bag"])
def test_what_nobody_can_go_on_behind_as_slots_were_taken_away(slot: int) -> None:
    """It leaves with the checkpoint behind it, and for the same reason."""
    pool = CpuOffloadingBlockAllocator(20, bag_slots=3)
    plan = pool.plan_store(ONE, 6, num_bag=3)
    assert plan is not None
    pool.commit(plan)
    pool.departures.begin("", 3.0)
    pool.resizing.close((plan.bag if slot else plan.slots[4:].reshape(-1))[:1])
    assert pool.resizing.empty(100)
    assert pool.resident_depth(ONE) == 0
    assert pool.departures.of(ONE[0]) == Departure(Cause.SHRUNK, 3.0, "")
    pool.check_invariants()
