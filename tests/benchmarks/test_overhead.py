"""What overhead says of its ratios."""

import random

import pytest

from benchmarks.overhead.__main__ import interval


def test_ratios_that_are_alike_leave_no_doubt() -> None:
    assert list(interval([1.02] * 8)) == pytest.approx([1.02, 1.02])


def test_one_start_says_nothing() -> None:
    assert interval([1.02]) == (0.0, float("inf"))


def test_an_interval_is_as_published() -> None:
    """Eight values of mean 0 and standard deviation 1 (in logarithms): 2.365 / sqrt(8) = 0.8362."""
    logs = [each * (7 / 8) ** 0.5 for each in (1, -1) * 4]
    low, high = interval([2.718281828459045**each for each in logs])
    assert [low, high] == pytest.approx([2.718281828459045**-0.8362, 2.718281828459045**0.8362], 1e-3)


@pytest.mark.parametrize("count", [2, 8, 40])
def test_19_of_20_intervals_have_what_is_true(count: int) -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = interval([rng.lognormvariate(0.01, 0.03) for _ in range(count)])
        hits += low <= 2.718281828459045**0.01 <= high
        assert low < high
    assert 0.93 < hits / 2000 < 0.98
