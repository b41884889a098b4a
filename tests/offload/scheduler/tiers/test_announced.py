"""What is announced of a store: each name once until it is taken back, and not too many."""

import random

import pytest

from allocator import Evicted, Stored
from offload.scheduler.tiers import announced as module
from offload.scheduler.tiers.announced import Announced


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def test_what_is_known_is_not_announced_again() -> None:
    announced = Announced()
    announced.announce(names(2), names(1)[0])
    announced.announce(names(0, 1, 2, 3), None)
    assert announced.take() == [
        Stored(names(2), names(1)[0]),
        Stored(names(0, 1), None),
        Stored(names(3), names(2)[0]),
    ]
    assert announced.take() == [] and not announced.is_listing


def test_what_is_missed_is_taken_back_from_its_end() -> None:
    announced = Announced()
    announced.announce(names(1, 2, 3), None)
    announced.take()
    announced.take_back(names(2, 3, 4))
    announced.take_back(names(2))
    assert announced.take() == [Evicted(names(3, 2))]


def test_those_announced_first_are_forgotten() -> None:
    announced = Announced(most_names=3)
    announced.announce(names(1, 2, 3), None)
    announced.announce(names(1), None)
    announced.take()
    announced.announce(names(4, 5), names(3)[0])
    assert announced.take() == [Stored(names(4, 5), names(3)[0]), Evicted(names(3, 2))]
    announced.check_invariants()


def test_a_reset_is_told_bit_by_bit_and_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    announced = Announced()
    announced.announce(names(1, 2, 3), None)
    announced.take()
    announced.clear()
    announced.announce(names(1), None)
    assert announced.take() == [Evicted(names(3, 2))] and announced.is_listing
    assert announced.take() == [Evicted(names(1)), Stored(names(1), None)]
    announced.clear()
    announced.clear()
    assert announced.take() == [Evicted(names(1))] and not announced.is_listing


@pytest.mark.parametrize("seed", range(20))
def test_a_subscriber_knows_what_is_announced(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    rng, announced, told = random.Random(seed), Announced(most_names=10), set[bytes]()
    for _ in range(300):
        some = names(*rng.sample(range(30), rng.randint(1, 8)))
        happens = rng.choices(["announced", "missed", "reset"], [6, 3, 1])[0]
        if happens == "announced":
            announced.announce(some, None)
        elif happens == "missed":
            announced.take_back(some)
        else:
            announced.clear()
        while announced.is_listing and rng.random() < 0.7:
            for event in announced.take():
                assert isinstance(event, Stored | Evicted) and len(set(event.hashes)) == len(event.hashes) > 0
                if isinstance(event, Stored):
                    assert not told & set(event.hashes)
                    told.update(event.hashes)
                else:
                    assert told >= set(event.hashes)
                    told.difference_update(event.hashes)
        if not announced.is_listing:
            assert told == set(announced._names) and len(told) <= 10
        announced.check_invariants()


def test_its_check_can_fail() -> None:
    announced = Announced(most_names=1)
    announced._names = dict.fromkeys(names(1, 2))
    with pytest.raises(AssertionError, match="2 names are announced"):
        announced.check_invariants()
