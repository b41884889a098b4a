"""Patience beside the sum of all waits."""

import random

import pytest

from offload.scheduler.patience import DEEPEST_DEBT_SECONDS, LONGEST_WAIT_SECONDS, SHARE_OF_TIME, Patience


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_only_while_there_is_patience_waits_a_sixteenth_of_the_time(seed: int) -> None:
    """And half a second, and what the last step of a wait took, which nobody knew before."""
    rng, clock = random.Random(seed), Clock()
    patience = Patience(clock)
    waited = last = 0.0
    for _ in range(2000):
        waits = rng.random() < 0.7 and not patience.is_over
        patience.spend(waits)
        step = rng.choice([0.001, 0.02, 0.3])
        clock.now += step
        waited += step * waits
        last = max(last, step)
        patience.check_invariants()
    allowed = LONGEST_WAIT_SECONDS + SHARE_OF_TIME * (clock.now - 100) + last
    assert 0.5 * allowed < waited <= allowed


def test_a_long_rest_is_worth_no_more_than_one_wait() -> None:
    clock = Clock()
    patience = Patience(clock)
    clock.now += 1000
    patience.spend(True)
    clock.now += LONGEST_WAIT_SECONDS - 0.01
    patience.spend(True)
    assert not patience.is_over
    clock.now += 0.02
    patience.spend(False)
    assert patience.is_over


def test_what_could_not_be_avoided_is_paid_back() -> None:
    """Copies in flight cannot be taken back, however long they take."""
    clock = Clock()
    patience = Patience(clock)
    patience.spend(True)
    clock.now += 10
    patience.spend(False)
    clock.now += (10 - LONGEST_WAIT_SECONDS) / SHARE_OF_TIME - 1
    patience.spend(False)
    assert patience.is_over
    clock.now += 2
    patience.spend(True)
    assert not patience.is_over
    clock.now += 10_000
    patience.spend(False)
    patience.check_invariants()
    clock.now += DEEPEST_DEBT_SECONDS / SHARE_OF_TIME + 1
    patience.spend(False)
    assert not patience.is_over


def test_a_preemption_is_as_bad_as_the_longest_wait() -> None:
    clock = Clock()
    patience = Patience(clock)
    for _ in range(3):
        patience.exhaust()
        patience.check_invariants()
        assert patience.is_over
    clock.now += 2 * LONGEST_WAIT_SECONDS / SHARE_OF_TIME - 0.1
    patience.spend(False)
    assert patience.is_over
    clock.now += 0.2
    patience.spend(False)
    assert not patience.is_over
