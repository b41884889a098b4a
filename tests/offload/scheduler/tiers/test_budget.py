"""Bytes that may be written, on a clock of the test's own."""

import pytest

from offload.scheduler.tiers.budget import DAY_SECONDS, WriteBudget


class Day:
    """A budget of 100 bytes per day for a tier of 1,000, and its clock in seconds."""

    def __init__(self, bytes_per_day: float = 100.0) -> None:
        self.now = 5_000.0
        self.budget = WriteBudget(bytes_per_day, 1_000.0, lambda: self.now)

    def left_after(self, days: float) -> float:
        self.now += days * DAY_SECONDS
        self.budget.check_invariants()
        return self.budget.left


def test_the_first_fill_is_free() -> None:
    day = Day()
    assert day.budget.left == 1_000
    day.budget.take(1_000)
    assert day.left_after(0) == 0


def test_what_is_taken_comes_back_day_by_day() -> None:
    day = Day()
    day.budget.take(1_000)
    assert day.left_after(0.5) == pytest.approx(50)
    assert day.left_after(0.5) == pytest.approx(100)
    day.budget.take(60)
    assert day.left_after(1) == pytest.approx(140)


def test_no_more_is_saved_up_than_the_tier_holds() -> None:
    day = Day()
    day.budget.take(10)
    assert day.left_after(100) == 1_000
    day.budget.take(300)
    assert day.left_after(0) == 700


def test_asking_often_makes_no_more_of_it() -> None:
    day = Day()
    day.budget.take(1_000)
    for _ in range(1_000):
        day.left_after(0.001)
    assert day.budget.left == pytest.approx(100)


@pytest.mark.parametrize(
    ("kept", "days", "written", "left"),
    [
        (1_000, 0, 0, 0),
        (1_000, 3, 0, 300),
        (1_000, 3, 120, 180),
        (1_000, 3, 900, 0),
        (400, 1, 0, 700),
        (400, 90, 0, 1_000),
    ],
)
def test_what_a_life_has_not_used_is_there_in_the_next(
    kept: float, days: float, written: float, left: float
) -> None:
    day = Day()
    day.budget.begin_again(kept, days * DAY_SECONDS, written)
    assert day.left_after(0) == pytest.approx(left)


def test_what_was_there_before_may_be_more_than_a_day_brings() -> None:
    """A tier that is full after a restart has nothing left, and no debt that a day does not pay."""
    day = Day(bytes_per_day=1_000.0)
    day.budget.take(1_000)
    assert day.left_after(0) == 0
    assert day.left_after(1) == pytest.approx(1_000)
