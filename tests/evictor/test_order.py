"""Leaves in order, beside a sorted list."""

import gc
import random
from bisect import insort
from itertools import count

import pytest

from evictor.order import Key, Order


class Leaf:
    """Tracked by the collector, as leaves may be."""


@pytest.mark.parametrize("late", [0.0, 0.1, 1.0])
def test_as_a_sorted_list(late: float) -> None:
    """With leaves that mostly come in order, or in any."""
    rng = random.Random(str(late))
    order: Order[Leaf] = Order()
    model: list[tuple[Key, Leaf]] = []
    serial = count()
    for step in range(12_000):
        is_growing = step % 6000 < 3600
        if not model or rng.random() < (0.9 if is_growing else 0.1):
            number = rng.randrange(step + 1) if rng.random() < late else step
            key, leaf = (number // 3, next(serial)), Leaf()
            order.add(key, leaf)
            insort(model, (key, leaf), key=lambda item: item[0])
        else:
            at = 0 if rng.random() < 0.5 else rng.randrange(len(model))
            key, _ = model.pop(at)
            order.remove(key)
        assert len(order) == len(model)
        assert (order.first_key, order.first) == (model[0] if model else (None, None))
        if step % 100 == 0:
            order.check_invariants()
            assert list(order.items()) == model
            low = (rng.randrange(step + 1) // 3,)
            expected = [item for item in model if item[0] >= low]
            assert list(order.items_from(low)) == expected
            assert order.first_from(low) is (expected[0][1] if expected else None)
    while model:
        key, _ = model.pop(rng.randrange(len(model)))
        order.remove(key)
    order.check_invariants()
    assert order.first is order.first_key is None


def test_a_few_that_are_left_of_many_take_little_room() -> None:
    order: Order[int] = Order()
    for number in range(20_000):
        order.add((number,), number)
    assert len(order._keys) > 30
    for number in range(20_000):
        if number % 400:
            order.remove((number,))
    order.check_invariants()
    assert len(order) == 50
    assert len(order._keys) < 10


def test_what_is_not_in_it_is_not_removed() -> None:
    order: Order[int] = Order()
    order.add((1,), 1)
    order.add((3,), 3)
    with pytest.raises(AssertionError, match="is not in it"):
        order.remove((2,))


def test_the_collector_does_not_see_leaves() -> None:
    order: Order[Leaf] = Order()
    leaves = [Leaf() for _ in range(5000)]
    for number, leaf in enumerate(leaves):
        order.add((number * 7 % 5000, number), leaf)
    gc.collect()
    gc.collect()
    seen = [each for each in gc.get_referrers(leaves[17]) if each is not leaves]
    assert seen == []
    tracked = {id(each) for each in gc.get_objects()}
    assert not any(id(key) in tracked for key, _ in order.items())
