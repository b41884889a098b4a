"""What a tier has: random histories beside a disk, and what is easy to get wrong."""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from offload.messages import EPOCH_SHIFT, PRIVATE
from offload.scheduler.tiers.directory import Directory
from tests.offload.scheduler.tiers.directory_machine import DirectoryMachine
from tests.offload.scheduler.tiers.facts import Told, facts, name, starts
from tests.strategies import thorough

A, B, C, D = (name(label) for label in "ABCD")


@pytest.mark.parametrize("num_parts", [1, 2], ids=["ranks", "replicas"])
def test_what_it_says_it_has_lies_on_every_rank(num_parts: int) -> None:
    machine = type("Machine", (DirectoryMachine,), {"num_parts": num_parts})
    run_state_machine_as_test(machine, settings=thorough(150, steps=50))


def directory(*told: Told, num_places: int = 4, epoch: int = 3) -> Directory:
    return Directory(
        [facts(told, num_places=num_places, epoch=epoch)],
        policy="lru",
        clock=lambda: 0.0,
    )


def put(tier: Directory, names: list[bytes], job_id: int = 7) -> list[int]:
    """Write all that it does not know of a chain; returns places."""
    writing = tier.write(names, len(names), len(names))
    assert writing is not None
    tier.extents(writing, job_id, starts(writing))
    tier.end_write(writing, is_good=True)
    return writing.places.tolist()


def test_what_was_kept_is_read_where_it_lies() -> None:
    tier = directory(Told(3, 5, A), Told(1, 9, B, A), Told(2, 2, C))
    assert (tier.depth([A, B]), tier.depth([C]), tier.num_used) == (2, 1, 3)
    reading = tier.read([A, B], 0, 2)
    assert reading.places.tolist() == [3, 1]
    assert reading.generations.tolist() == [5, 9]
    assert tier.read([C], 0, 1).places.tolist() == [2]
    assert put(tier, [D]) == [0], "the place that was free"


def test_what_has_no_parent_is_free() -> None:
    tier = directory(Told(3, 5, A), Told(1, 9, C, B), num_places=2)
    assert (tier.num_places, tier.num_used) == (2, 0), "place 3 is not there any more"
    assert sorted(put(tier, [A, B])) == [0, 1]


def test_generations_are_of_this_life() -> None:
    tier = directory(Told(0, 2 << EPOCH_SHIFT | 77, A), epoch=3)
    writing = tier.write([A, B], 2, 2)
    assert writing is not None
    extents = tier.extents(writing, 0, starts(writing))
    assert extents.generations.tolist() == [3 << EPOCH_SHIFT | 1]


def test_the_epoch_is_that_of_the_rank_with_the_highest() -> None:
    """A rank whose directory was damaged begins from 1 again."""
    both = [facts([], epoch=1), facts([], epoch=9)]
    assert Directory(both, policy="lru", clock=lambda: 0.0).epoch == 9


def test_a_reset_takes_the_places_first_that_hold_nothing() -> None:
    told = [Told(0, 5, A), Told(1, 9, B, A), Told(3, 2, C)]
    tier = directory(*told)
    tier.reset()
    assert (tier.depth([A, B]), tier.num_used, tier.has_room) == (0, 0, True)
    assert put(tier, [D, A, B, C]) == [2, 3, 0, 1], "and then the oldest"


def test_what_is_written_after_a_reset_is_private() -> None:
    tier = directory(Told(0, 5, A))
    before = tier.write([A, B], 2, 1)
    assert before is not None and not tier.extents(before, 1, starts(before)).suffix
    tier.reset()
    after = tier.write([A, B], 2, 2)
    assert after is not None and tier.extents(after, 2, starts(after)).suffix == PRIVATE
    tier.end_write(before, is_good=True)
    assert tier.depth([A, B]) == 0, "what was under way is of another life"
    tier.end_write(after, is_good=True)
    assert tier.depth([A, B]) == 2


def test_a_read_from_before_a_reset_ends_after_it() -> None:
    tier = directory(Told(0, 5, A))
    reading = tier.read([A], 0, 1)
    tier.reset()
    tier.check_invariants()
    tier.end_read(reading)
    assert tier.depth([A]) == 0


def test_ends_of_chains_leave_first_and_none_that_is_read() -> None:
    tier = directory(num_places=3)
    put(tier, [A, B, C])
    reading = tier.read([A, B], 0, 2)
    put(tier, [D])
    assert (tier.depth([A, B, C]), tier.depth([D]), tier.num_evicted) == (2, 1, 1)
    assert tier.write([name("E"), name("F")], 2, 2) is not None
    assert tier.depth([A, B]) == 2
    tier.end_read(reading)


def test_what_is_wrong_is_dropped_with_what_follows() -> None:
    tier = directory(Told(0, 1, A), Told(1, 2, B, A), Told(2, 3, C, B), Told(3, 4, D, A))
    tier.drop([A, B, C], 1)
    assert (tier.depth([A, B, C]), tier.depth([A, D])) == (1, 2)
    assert tier.num_used == 2


def test_places_that_come_twice_are_found_by_its_check() -> None:
    tier = directory()
    tier._place_of[0] = tier._place_of[1]
    with pytest.raises(AssertionError, match="places are not those of slots"):
        tier.check_invariants()
