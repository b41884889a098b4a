"""Runs of evicted names."""

import random

import pytest

from evictor.ghosts import Ghosts, runs


def test_a_run_is_matched_as_far_as_it_goes() -> None:
    ghosts = Ghosts(100)
    ghosts.add(list(range(40)))
    assert ghosts.match(range(50), 0) == 40
    for size in range(1, 40):
        assert ghosts.match([*range(size), *range(900, 950)], 0) == size, "longer than the run"
        assert ghosts.match([7, *range(size)], 1) == size, "shorter than the run"
    assert ghosts.match(range(50), 1) == 0, "only the first name begins it"


def test_what_is_left_of_a_run_keeps_its_age() -> None:
    ghosts = Ghosts(6)
    ghosts.add([1, 2, 3])
    ghosts.add([4, 5])
    ghosts.take(1, 1)
    assert 1 not in ghosts
    assert ghosts.match([2, 3], 0) == 2
    ghosts.add([6, 7, 8])
    assert len(ghosts) == 6
    assert (ghosts.match([2, 3], 0), ghosts.match([4, 5], 0)) == (1, 2), "the oldest loses its last name"
    ghosts.trim(3)
    assert (2 in ghosts, 4 in ghosts, ghosts.match([6, 7, 8], 0)) == (False, False, 3)
    ghosts.check_invariants()


def test_a_run_replaces_one_with_the_same_beginning() -> None:
    ghosts = Ghosts(9)
    ghosts.add([1, 2, 3])
    ghosts.add([1, 2])
    assert len(ghosts) == 2
    assert ghosts.match([1, 2, 3], 0) == 2
    ghosts.check_invariants()


def test_what_is_left_of_a_run_replaces_one_with_the_same_beginning() -> None:
    ghosts = Ghosts(6)
    ghosts.add([3, 4])
    ghosts.add([1, 2, 3, 4])
    ghosts.take(1, 2)
    ghosts.check_invariants()
    assert len(ghosts) == 2
    for name in range(10, 22, 3):
        ghosts.add([name, name + 1, name + 2])
    ghosts.check_invariants()


def test_the_next_run_begins_where_one_ends() -> None:
    left, right = Ghosts(9), Ghosts(9)
    left.add([5, 6])
    right.add([3, 4])
    left.add([1, 2])
    found = list(runs([0, 1, 2, 3, 4, 5, 7], 1, left, right))
    assert found == [(left, 1, 2), (right, 3, 2), (left, 5, 1)]
    assert list(runs([0, 1], 0, left, right)) == []


def test_no_room_for_ghosts() -> None:
    ghosts = Ghosts(0)
    ghosts.add([1, 2])
    assert len(ghosts) == 0
    ghosts.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_stay_consistent(seed: int) -> None:
    """Few names, so that runs begin alike, within each other and again."""
    rng = random.Random(seed)
    ghosts = Ghosts(rng.randrange(1, 20))
    for _ in range(300):
        start = rng.randrange(12)
        names = list(range(start, start + rng.randrange(1, 8)))
        if rng.random() < 0.5:
            ghosts.add(names)
        elif size := ghosts.match(names, 0):
            ghosts.take(names[0], rng.randint(1, size))
            assert names[0] not in ghosts
        ghosts.check_invariants()
