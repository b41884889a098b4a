"""What a load reads stays where it is until the load ends."""

import pytest

from allocator import ChainError
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with
from tests.strategies import chain_of


def test_pinned_slots_and_all_before_them_stay() -> None:
    pair = pair_with(LONG, capacity=6)
    pin = pair.pin(LONG, 2, 4)
    pair.evict(6)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4
    pair.unpin(pin)
    pair.evict(6)
    pair.check()
    assert pair.allocator.num_free == 6


def test_a_pin_survives_the_split_of_its_segment() -> None:
    pair = pair_with(LONG, capacity=12)
    pin = pair.pin(LONG, 0, 6)
    pair.store(FORK)
    pair.evict(12)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.unpin(pin)


@pytest.mark.parametrize("asks_only", [True, False])
def test_a_pin_goes_with_the_tail_of_its_segment(asks_only: bool) -> None:
    """The segment splits near its end, where its pins hang: all of its slots stay."""
    pair = pair_with(LONG, capacity=12)
    pin = pair.pin(LONG, 0, 6)
    leaves_late = chain_of(0, 0, 0, 0, 0, 1, 1)
    if asks_only:
        pair.use(leaves_late)
    else:
        pair.store(leaves_late)
    pair.evict(12)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.unpin(pin)
    pair.evict(12)
    pair.check()
    assert pair.allocator.num_free == 12


def test_dropped_slots_stay_leaving_until_the_last_load_ends() -> None:
    pair = pair_with(LONG, capacity=6)
    one, other = pair.pin(LONG, 0, 6), pair.pin(LONG, 4, 6)
    pair.drop(LONG[:5])
    pair.check()
    assert (pair.allocator.num_leaving, pair.allocator.num_free) == (2, 0)
    pair.unpin(one)
    pair.check()
    assert (pair.allocator.num_leaving, pair.allocator.num_free) == (2, 0)
    pair.unpin(other)
    pair.check()
    assert (pair.allocator.num_leaving, pair.allocator.num_free) == (0, 2)


def test_a_pin_keeps_what_a_drop_has_left_of_it() -> None:
    pair = pair_with(LONG, capacity=6)
    pin = pair.pin(LONG, 0, 6)
    pair.drop(LONG[:6])
    pair.evict(6)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 5
    assert pair.plan_store(OTHER) is None
    pair.unpin(pin)
    pair.store(OTHER)
    pair.check()


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 9), (2, 2), (3, 2), (-1, 2), (0, -1), (0, 0)])
def test_only_resident_positions_can_be_pinned(start: int, stop: int) -> None:
    pair = pair_with(LONG[:4])
    with pytest.raises(ChainError, match=f"{start} to {stop}"):
        pair.allocator.pin(LONG, start, stop)
    pair.check()
