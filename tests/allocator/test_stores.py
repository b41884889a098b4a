"""Stores in flight: committed in any order, failed, no longer wanted; events."""

from typing import Any

import pytest

from allocator import CapacityError, ChainError, CpuOffloadingBlockAllocator, Evicted, StalePlanError, Stored
from allocator.prefix_tree import PrefixTree
from evictor import LruPolicy, Newcomer
from tests.allocator.pair import LruPair
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with


def test_nothing_is_served_before_its_bytes_are_here() -> None:
    pair = LruPair(8)
    plan = pair.plan_store(LONG)
    assert plan is not None
    assert pair.allocator.lookup(LONG).depth == 0
    pair.commit(plan)
    assert pair.allocator.lookup(LONG).depth == 6
    pair.check()


def test_what_is_known_is_not_stored_again() -> None:
    pair = pair_with(LONG)
    in_flight = pair.plan_store(FORK)
    assert in_flight is not None
    assert in_flight.start == 3
    assert pair.plan_store(LONG) is None
    assert pair.plan_store(FORK) is None


def test_a_later_store_that_lands_first_waits_for_the_earlier_one() -> None:
    pair = LruPair(8)
    first, second, third = (pair.plan_store(LONG, limit=2) for _ in range(3))
    assert first and second and third
    pair.commit(third)
    pair.commit(second)
    assert pair.allocator.resident_depth(LONG) == 0
    pair.commit(first)
    assert pair.allocator.resident_depth(LONG) == 6
    pair.check()


def test_a_failed_store_takes_what_follows_it_and_nothing_else() -> None:
    pair = LruPair(16)
    first, second, third = (pair.plan_store(LONG, limit=2) for _ in range(3))
    beside = pair.plan_store(FORK)
    assert first and second and third and beside
    pair.commit(third)
    pair.abort(second)
    pair.check()
    assert pair.allocator.num_filling == 2 + len(beside.hashes), "third has landed and went at once"
    pair.commit(first)
    pair.commit(beside)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2
    assert pair.allocator.resident_depth(FORK) == 2, "it hung from a position of the failed store"
    assert pair.allocator.num_filling == 0


def test_slots_of_an_unwanted_store_are_kept_until_it_ends() -> None:
    pair = LruPair(4)
    plan = pair.plan_store(OTHER)
    assert plan is not None
    pair.reset()
    pair.check()
    assert pair.allocator.num_filling == 4
    assert pair.plan_store(LONG) is None
    pair.commit(plan)
    assert pair.allocator.num_free == 4
    assert pair.allocator.resident_depth(OTHER) == 0
    pair.check()


def test_the_same_positions_can_be_stored_again_while_the_unwanted_store_is_in_flight() -> None:
    pair = LruPair(8)
    first = pair.plan_store(OTHER)
    assert first is not None
    pair.reset()
    second = pair.plan_store(OTHER)
    assert second is not None
    pair.abort(first)
    pair.commit(second)
    pair.check()
    assert pair.allocator.resident_depth(OTHER) == 4


def test_plans_and_pins_end_once() -> None:
    pair = pair_with(LONG)
    plan, pin = pair.plan_store(FORK), pair.pin(LONG, 0, 6)
    assert plan is not None
    pair.commit(plan)
    pair.unpin(pin)
    with pytest.raises(StalePlanError, match=f"plan {plan.plan_id}"):
        pair.allocator.commit(plan)
    with pytest.raises(StalePlanError, match=f"plan {plan.plan_id}"):
        pair.allocator.abort(plan)
    with pytest.raises(StalePlanError, match="another allocator"):
        pair.allocator.unpin(pin)
    pair.check()


def test_full_blocks_need_hashes() -> None:
    allocator = CpuOffloadingBlockAllocator(8)
    for num_full in (5, -1):
        with pytest.raises(ChainError, match=f"{num_full} full blocks do not fit 4 prefix hashes"):
            allocator.plan_store(OTHER, num_full)
        with pytest.raises(ChainError, match=f"{num_full} full blocks do not fit 4 prefix hashes"):
            allocator.note_full("request", OTHER, num_full)
    allocator.check_invariants()


def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(CapacityError, match="at least 1"):
        CpuOffloadingBlockAllocator(0)


def test_events_say_what_became_resident_and_what_left() -> None:
    allocator = CpuOffloadingBlockAllocator(6, record_events=True)
    for chain in (OTHER, LONG[:3]):
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
    plan = allocator.plan_store(LONG, 5)
    assert plan is not None
    allocator.abort(plan)
    allocator.drop(LONG, 1)
    assert allocator.take_events() == [
        Stored(OTHER, None),
        Evicted(OTHER[3:]),
        Stored(LONG[:3], None),
        Evicted(OTHER[1:3]),
        Evicted(LONG[1:3]),
    ]
    assert allocator.take_events() == []


def test_events_are_not_kept_unless_asked_for() -> None:
    allocator = CpuOffloadingBlockAllocator(6)
    plan = allocator.plan_store(OTHER, 4)
    assert plan is not None
    allocator.commit(plan)
    assert allocator.take_events() == []


def test_what_is_cut_off_is_listed_bit_by_bit_before_what_comes_later() -> None:
    """A reset used to list all segments of the pool at once: 37,500 chains of 8 took 165 ms."""
    allocator = CpuOffloadingBlockAllocator(12, record_events=True)
    allocator._step_work = allocator._work_left = 1
    for chain in (OTHER, LONG[:2]):
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
        allocator.reset()
    events = [allocator.take_events()]
    while allocator.is_listing:
        allocator.tidy()
        events.append(allocator.take_events())
    news = [event for step in events for event in step]
    assert [list(event.hashes) for event in news] == [
        OTHER,
        *([each] for each in reversed(OTHER)),
        LONG[:2],
        *([each] for each in reversed(LONG[:2])),
    ]
    assert [type(event) for event in news if len(event.hashes) > 1] == [Stored, Stored]
    removed = [sum(isinstance(event, Evicted) for event in step) for step in events]
    assert max(removed) == 1, f"{removed} segments were listed in a step"


def test_hashes_of_what_left_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset may cut off a million; who publishes them takes so many at a time."""
    allocator = CpuOffloadingBlockAllocator(6, record_events=True)
    for chain in (OTHER, LONG[:2]):
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
    allocator.take_events()
    made = []
    monkeypatch.setattr("allocator.node.unpacked", lambda *arguments: made.append(arguments))
    allocator.reset()
    events = allocator.take_events()
    assert not made, "hashes were made though nobody asked for them"
    monkeypatch.undo()
    assert sorted(each for event in events for each in event.hashes) == sorted([*OTHER, *LONG[:2]])


def test_many_stores_that_fail_at_once_ask_for_none_but_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to ask for all others whether they were cut off, too: 2,000 of them took seconds."""
    allocator = CpuOffloadingBlockAllocator(400)
    chains = [[f"{number} {position}".encode().ljust(16) for position in range(2)] for number in range(200)]
    plans = [allocator.plan_store(chain, 2) for chain in chains]
    asked = 0
    node_at = PrefixTree.node_at

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return node_at(*arguments)

    monkeypatch.setattr(PrefixTree, "node_at", counted)
    for number, plan in enumerate(plans):
        assert plan is not None
        if number % 2:
            allocator.commit(plan)
        else:
            allocator.abort(plan)
    assert asked <= 4 * len(plans)
    allocator.check_invariants()
    assert [allocator.resident_depth(chain) for chain in chains] == [0, 2] * 100


class Refusing(LruPolicy[Any]):
    """Thinks any newcomer worth less than all that is there."""

    def choose(self, newcomer: Newcomer[Any] | None = None) -> Any:
        return None if newcomer is not None else super().choose()


def test_what_must_be_stored_takes_the_place_of_what_is_worth_more_but_not_of_what_is_leased() -> None:
    allocator = CpuOffloadingBlockAllocator(len(LONG) + 2, policy=Refusing())
    plan = allocator.plan_store(LONG, len(LONG))
    assert plan is not None
    allocator.commit(plan)
    allocator.leases.begin(LONG, 4)
    refused = allocator.plan_store(OTHER, len(OTHER))
    assert refused is not None and len(refused.hashes) == 2  # into what is free
    allocator.abort(refused)
    stored = allocator.plan_store(OTHER, len(OTHER), must=True)
    assert stored is not None and len(stored.hashes) == len(OTHER)
    assert allocator.resident_depth(LONG) == 4
    allocator.check_invariants()
