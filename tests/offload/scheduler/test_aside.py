"""The least number among requests up to a place, while they come and go."""

import random
from math import inf

import pytest

from offload.scheduler.aside import _Least, _Place

MANY = 2000


class Counted(int):
    """A number that counts how often it is looked at."""

    num_looks = 0

    def __lt__(self, other: object) -> bool:
        Counted.num_looks += 1
        return int(self) < other  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        Counted.num_looks += 1
        return int(self) > other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        Counted.num_looks += 1
        return int(self) == other

    def __neg__(self) -> "Counted":
        Counted.num_looks += 1
        return Counted(-int(self))

    __hash__ = int.__hash__


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_least_of_those_up_to_there(seed: int) -> None:
    rng = random.Random(seed)
    kept, there = _Least(), dict[str, tuple[_Place, int]]()
    most = rng.choice([3, 10, 1000])
    for _ in range(300):
        name, place = str(rng.randrange(20)), _Place(rng.randrange(2), float(rng.randrange(10)))
        if rng.random() < 0.6:
            there[name] = (place, rng.randrange(most))
            kept.put(name, *there[name])
        elif rng.random() < 0.02:
            there.clear()
            kept.clear()
        else:
            assert kept.pop(name) == there.pop(name, None)
        kept.check_invariants()
        last = _Place(rng.randrange(2), rng.random() * 10)
        assert kept.least(last) == min((num for at, num in there.values() if at <= last), default=inf)
        assert sorted(kept.names()) == sorted(there)


def test_many_that_come_in_one_step_are_not_sorted_again_for_each() -> None:
    """Each is put, and then asked for, as in a step in which so many restores begin."""
    rng = random.Random(1)
    kept = _Least()
    Counted.num_looks = 0
    for number in range(MANY):
        kept.put(str(number), _Place(0, rng.random()), Counted(rng.randrange(1000)))
        kept.least(_Place(0, rng.random()))
    for number in range(MANY):
        kept.least(_Place(0, rng.random()))
        kept.pop(str(number))
    assert Counted.num_looks < 100 * MANY, "a look at each for each would be millions"
    assert not kept.names()
