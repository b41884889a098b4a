"""Every rare situation of the allocator, each met for certain, beside the model.

The state machine meets most of them by chance; no test may depend on that.
"""

from collections.abc import Callable

import pytest

from allocator import StorePlan
from tests.allocator.pair import Pair
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with

Scene = Callable[[], Pair]
SCENES: dict[str, Scene] = {}


def meets(situation: str) -> Callable[[Scene], Scene]:
    """Add a scene in which ``situation`` comes up."""

    def add(scene: Scene) -> Scene:
        SCENES[situation] = scene
        return scene

    return add


def _plan(pair: Pair, chain: list[bytes], limit: int | None = None) -> StorePlan:
    plan = pair.plan_store(chain, limit=limit)
    assert plan is not None
    pair.check()
    return plan


def _landed_behind_filling() -> tuple[Pair, StorePlan]:
    """Of two stores of LONG the second has landed; the first is returned."""
    pair = pair_with()
    first, second = _plan(pair, LONG, 3), _plan(pair, LONG)
    pair.commit(second)
    pair.check()
    return pair, first


@meets("abandoned before it ended")
def abandon() -> Pair:
    pair = pair_with(OTHER)
    plan = _plan(pair, LONG)
    pair.abandon(plan)
    pair.check()
    pair.commit(plan)
    return pair


@meets("abandoning frees others that have landed")
def abandon_before_landed() -> Pair:
    pair, first = _landed_behind_filling()
    pair.abandon(first)
    pair.check()
    assert pair.allocator.num_filling == 3
    pair.abort(first)
    return pair


@meets("abort frees others that have landed")
def abort_before_landed() -> Pair:
    pair, first = _landed_behind_filling()
    pair.abort(first)
    assert pair.allocator.num_free == pair.allocator.capacity
    return pair


@meets("abort of an orphan")
def abort_an_orphan() -> Pair:
    pair = pair_with()
    plan = _plan(pair, LONG)
    pair.abandon(plan)
    pair.check()
    pair.abort(plan)
    return pair


@meets("commit out of order")
def commit_out_of_order() -> Pair:
    return _landed_behind_filling()[0]


@meets("commit settles others")
def settle_others() -> Pair:
    pair, first = _landed_behind_filling()
    pair.commit(first)
    assert pair.allocator.resident_depth(LONG) == len(LONG)
    return pair


@meets("drop under a pin")
def drop_all_of_a_pin() -> Pair:
    pair = pair_with(LONG, OTHER)
    pin = pair.pin(LONG, 0, 6)
    pair.drop(LONG[:1])
    pair.check()
    assert pair.allocator.num_leaving == 6
    pair.unpin(pin)
    return pair


@meets("drop of a part of a pin")
def drop_a_part() -> Pair:
    pair = pair_with(LONG, OTHER)
    pin = pair.pin(LONG, 1, 6)
    pair.drop(LONG[:4])
    pair.check()
    pair.evict(99)
    pair.check()
    pair.unpin(pin)
    return pair


@meets("drop orphans a store")
def drop_before_a_store() -> Pair:
    pair = pair_with(LONG)
    plan = _plan(pair, FORK)
    pair.drop(LONG[:2])
    pair.check()
    pair.commit(plan)
    return pair


@meets("evicted beside a pin")
def evict_beside_a_pin() -> Pair:
    pair = pair_with(LONG, OTHER)
    pair.pin(LONG, 0, 6)
    pair.evict(99)
    assert pair.allocator.num_resident == 6
    return pair


@meets("pin of a pinned position")
def pin_twice() -> Pair:
    pair = pair_with(LONG)
    one, other = pair.pin(LONG, 0, 6), pair.pin(LONG, 2, 4)
    pair.check()
    pair.unpin(one)
    pair.check()
    pair.evict(99)
    assert pair.allocator.resident_depth(LONG) == 4
    pair.check()
    pair.unpin(other)
    return pair


@meets("plan behind a filling position")
def plan_behind_filling() -> Pair:
    pair = pair_with()
    _plan(pair, LONG, 2)
    _plan(pair, LONG, 2)
    return pair


@meets("plan shorter than wanted")
def plan_what_fits() -> Pair:
    pair = pair_with(capacity=4)
    assert len(_plan(pair, LONG).hashes) == 4
    return pair


@meets("reset with loads and stores in flight")
def reset_in_flight() -> Pair:
    pair = pair_with(LONG)
    pin, plan = pair.pin(LONG, 0, 6), _plan(pair, OTHER)
    pair.reset()
    pair.check()
    pair.unpin(pin)
    pair.check()
    pair.commit(plan)
    assert pair.allocator.num_free == pair.allocator.capacity
    return pair


@meets("slots of a cut carried over")
def carry_over() -> Pair:
    """What is cut off is stored again, in other slots, while the first ones are still to be given back."""
    pair = pair_with(LONG, FORK)
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
    return pair


@meets("slots of a cut given back later")
def give_back_later() -> Pair:
    pair = pair_with(LONG, FORK, OTHER)
    pair.allocator._step_work = pair.allocator._work_left = 1
    pair.drop(LONG[:2])
    for _ in range(99):
        pair.check()
        pair.tidy()
    assert pair.allocator.num_free == pair.allocator.capacity - len(OTHER) - 1
    return pair


@meets("unpin frees slots")
def unpin_what_was_dropped() -> Pair:
    pair = pair_with(LONG)
    pin = pair.pin(LONG, 0, 6)
    pair.reset()
    pair.check()
    pair.unpin(pin)
    assert pair.allocator.num_free == pair.allocator.capacity
    return pair


@pytest.mark.parametrize("situation", SCENES)
def test_the_scene_meets_its_situation(situation: str) -> None:
    pair = SCENES[situation]()
    pair.check()
    assert pair.seen[situation]
    assert {situation for situation, times in pair.seen.items() if times} <= SCENES.keys()
