"""Every rare situation of the allocator, each met for certain, beside the model.

The state machine meets most of them by chance; no test may depend on that.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from allocator import StorePlan
from tests.allocator.pair import Pair
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with

Steps = Callable[[Pair], None]


class Scene(NamedTuple):
    """What is done to an allocator of 16 slots, or so many, that has stored these chains."""

    steps: Steps
    chains: tuple[list[bytes], ...]
    capacity: int


SCENES: dict[str, Scene] = {}


def meets(situation: str, *chains: list[bytes], capacity: int = 16) -> Callable[[Steps], Steps]:
    """Add a scene in which ``situation`` comes up. The pair that it is given holds ``chains``."""

    def add(steps: Steps) -> Steps:
        SCENES[situation] = Scene(steps, chains, capacity)
        return steps

    return add


def _plan(pair: Pair, chain: list[bytes], limit: int | None = None) -> StorePlan:
    plan = pair.plan_store(chain, limit=limit)
    assert plan is not None
    pair.check()
    return plan


def _land_behind_filling(pair: Pair) -> StorePlan:
    """Of two stores of LONG the second lands; the first is returned."""
    first, second = _plan(pair, LONG, 3), _plan(pair, LONG)
    pair.commit(second)
    pair.check()
    return first


@meets("abandoned before it ended", OTHER)
def abandon(pair: Pair) -> None:
    plan = _plan(pair, LONG)
    pair.abandon(plan)
    pair.check()
    pair.commit(plan)


@meets("abandoning frees others that have landed")
def abandon_before_landed(pair: Pair) -> None:
    first = _land_behind_filling(pair)
    pair.abandon(first)
    pair.check()
    assert pair.allocator.num_filling == 3
    pair.abort(first)


@meets("abort frees others that have landed")
def abort_before_landed(pair: Pair) -> None:
    first = _land_behind_filling(pair)
    pair.abort(first)
    assert pair.allocator.num_free == pair.allocator.capacity


@meets("abort of an orphan")
def abort_an_orphan(pair: Pair) -> None:
    plan = _plan(pair, LONG)
    pair.abandon(plan)
    pair.check()
    pair.abort(plan)


@meets("commit out of order")
def commit_out_of_order(pair: Pair) -> None:
    _land_behind_filling(pair)


@meets("commit settles others")
def settle_others(pair: Pair) -> None:
    first = _land_behind_filling(pair)
    pair.commit(first)
    assert pair.allocator.resident_depth(LONG) == len(LONG)


@meets("drop under a pin", LONG, OTHER)
def drop_all_of_a_pin(pair: Pair) -> None:
    pin = pair.pin(LONG, 0, 6)
    pair.drop(LONG[:1])
    pair.check()
    assert pair.allocator.num_leaving == 6
    pair.unpin(pin)


@meets("drop of a part of a pin", LONG, OTHER)
def drop_a_part(pair: Pair) -> None:
    pin = pair.pin(LONG, 1, 6)
    pair.drop(LONG[:4])
    pair.check()
    pair.evict(99)
    pair.check()
    pair.unpin(pin)


@meets("drop of a filling position", OTHER)
def drop_what_is_to_come(pair: Pair) -> None:
    """It has no bytes that could be wrong."""
    plan = _plan(pair, LONG)
    pair.drop(LONG[:4])
    pair.check()
    pair.commit(plan)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == len(LONG)


@meets("drop orphans a store", LONG)
def drop_before_a_store(pair: Pair) -> None:
    plan = _plan(pair, FORK)
    pair.drop(LONG[:2])
    pair.check()
    pair.commit(plan)


@meets("evicted beside a pin", LONG, OTHER)
def evict_beside_a_pin(pair: Pair) -> None:
    pair.pin(LONG, 0, 6)
    pair.evict(99)
    assert pair.allocator.num_resident == 6


@meets("pin of a pinned position", LONG)
def pin_twice(pair: Pair) -> None:
    one, other = pair.pin(LONG, 0, 6), pair.pin(LONG, 2, 4)
    pair.check()
    pair.unpin(one)
    pair.check()
    pair.evict(99)
    assert pair.allocator.resident_depth(LONG) == 4
    pair.check()
    pair.unpin(other)


@meets("plan behind a filling position")
def plan_behind_filling(pair: Pair) -> None:
    _plan(pair, LONG, 2)
    _plan(pair, LONG, 2)


@meets("plan shorter than wanted", capacity=4)
def plan_what_fits(pair: Pair) -> None:
    assert len(_plan(pair, LONG).hashes) == 4


@meets("reset with loads and stores in flight", LONG)
def reset_in_flight(pair: Pair) -> None:
    pin, plan = pair.pin(LONG, 0, 6), _plan(pair, OTHER)
    pair.reset()
    pair.check()
    pair.unpin(pin)
    pair.check()
    pair.commit(plan)
    assert pair.allocator.num_free == pair.allocator.capacity


@meets("slots of a cut carried over", LONG, FORK)
def carry_over(pair: Pair) -> None:
    """What is cut off is stored again, in other slots, while the first ones are still to be given back."""
    pair.allocator._work_left = 0
    pin = pair.pin(LONG, 0, 6)
    pair.reset()
    pair.check()
    assert pair.allocator.num_free == 8
    pair.store(LONG)
    pair.check()
    pair.drop(LONG[:3])
    pair.check()
    pair.unpin(pin)
    pair.check()
    pair.store(OTHER)


@meets("event that waits for a cut", LONG, FORK)
def publish_after_cuts(pair: Pair) -> None:
    """The same positions are stored and cut off again before they are listed: events stay in order."""
    pair.allocator._work_left = pair.allocator._step_work = 0
    for _ in range(3):
        pair.reset()
        pair.check()
        pair.store(LONG[:2])
        pair.drop(LONG[:2])
        pair.store(FORK[:1])
        pair.check()
    pair.allocator._step_work = 1
    for _ in range(99):
        pair.tidy()
        pair.check()
    assert not pair.has_carried


@meets("slots of a cut given back later", LONG, FORK, OTHER)
def give_back_later(pair: Pair) -> None:
    pair.allocator._step_work = pair.allocator._work_left = 1
    pair.drop(LONG[:2])
    for _ in range(99):
        pair.check()
        pair.tidy()
    assert pair.allocator.num_free == pair.allocator.capacity - len(OTHER) - 1


@meets("unpin frees slots", LONG)
def unpin_what_was_dropped(pair: Pair) -> None:
    pin = pair.pin(LONG, 0, 6)
    pair.reset()
    pair.check()
    pair.unpin(pin)
    assert pair.allocator.num_free == pair.allocator.capacity


@meets("lease of a leased position", LONG, OTHER)
def lease_twice(pair: Pair) -> None:
    first, second = pair.lease(LONG[:2]), pair.lease(LONG)
    pair.check()
    pair.evict(16)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == len(LONG) == pair.allocator.leases.num_slots
    pair.end_lease(second)
    pair.check()
    pair.evict(16)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2
    pair.end_lease(first)
    pair.evict(16)
    assert pair.allocator.resident_depth(LONG) == 0


@meets("lease of a filling position", FORK)
def lease_what_is_to_come(pair: Pair) -> None:
    plan = _plan(pair, LONG)
    lease = pair.lease(LONG)
    pair.check()
    pair.commit(plan)
    pair.check()
    pair.evict(16)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == len(LONG)
    pair.end_lease(lease)
    pair.check()


@meets("lease of what is gone", OTHER)
def lease_what_never_comes(pair: Pair) -> None:
    first = _plan(pair, LONG, 3)
    pair.commit(first)
    second = _plan(pair, LONG)
    lease = pair.lease(LONG)
    pair.abort(second)
    pair.check()
    pair.evict(16)  # what is left of it stays
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 3 == pair.allocator.leases.num_slots
    pair.store(LONG)
    pair.check()
    pair.evict(16)  # what came again is no part of it
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 3
    pair.reset()
    pair.tidy()
    pair.check()
    assert pair.allocator.leases.num_slots == 0
    pair.end_lease(lease)
    pair.check()


@pytest.mark.parametrize("situation", SCENES)
def test_the_scene_meets_its_situation(situation: str) -> None:
    scene = SCENES[situation]
    pair = pair_with(*scene.chains, capacity=scene.capacity)
    scene.steps(pair)
    pair.check()
    assert pair.seen[situation]
    assert {situation for situation, times in pair.seen.items() if times} <= SCENES.keys()
