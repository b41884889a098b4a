"""The circuit breaker, on a clock of the test's own."""

import logging
from itertools import count

import pytest

from offload.scheduler.breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    CircuitBreaker,
)


class Outage:
    """A breaker, its clock, and transfers by number."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = CircuitBreaker("stores", lambda: self.now)
        self._ids = count()

    def begin(self) -> int:
        assert self.breaker.allows
        transfer = next(self._ids)
        self.breaker.began(transfer)
        return transfer

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.breaker.failed(self.begin())

    def pause(self) -> float:
        """Seconds until a transfer may begin."""
        began = self.now
        while not self.breaker.allows:
            self.now += 0.25
        return self.now - began


@pytest.fixture
def outage() -> Outage:
    return Outage()


def test_failures_in_a_row_open_it(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN - 1)
    assert outage.breaker.allows
    outage.fail()
    assert not outage.breaker.allows


def test_one_that_hangs_opens_it_at_once(outage: Outage) -> None:
    outage.breaker.failed(outage.begin(), hangs=True)
    assert not outage.breaker.allows


def test_a_success_between_keeps_it_closed(outage: Outage) -> None:
    for _ in range(5):
        outage.fail(FAILURES_TO_OPEN - 1)
        outage.breaker.succeeded(outage.begin())
    assert not outage.breaker.is_outage


def test_pauses_double_while_trials_fail(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    pauses = [outage.pause()]
    for _ in range(8):
        outage.fail()
        pauses.append(outage.pause())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)


def test_one_trial_at_a_time(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    outage.pause()
    trial = outage.begin()
    assert not outage.breaker.allows
    outage.now += 1000
    assert not outage.breaker.allows
    outage.breaker.dismissed(trial)
    assert outage.breaker.allows, "a trial that said nothing is followed by another"
    outage.breaker.succeeded(outage.begin())
    assert outage.breaker.allows and not outage.breaker.is_outage


def test_transfers_from_before_the_pause_change_nothing(outage: Outage) -> None:
    early = [outage.begin() for _ in range(4)]
    outage.fail(FAILURES_TO_OPEN)
    outage.breaker.succeeded(early[0])
    outage.breaker.failed(early[1])
    assert outage.pause() == FIRST_PAUSE_SECONDS
    trial = outage.begin()
    outage.breaker.succeeded(early[2])
    outage.breaker.failed(early[3])
    assert outage.breaker.is_outage and not outage.breaker.allows
    outage.breaker.failed(trial)
    assert outage.pause() == 2 * FIRST_PAUSE_SECONDS


def test_a_success_after_the_pause_ends_the_outage(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    outage.pause()
    outage.fail()
    outage.pause()
    outage.breaker.succeeded(outage.begin())
    outage.fail(FAILURES_TO_OPEN - 1)
    assert not outage.breaker.is_outage
    outage.fail()
    assert outage.pause() == FIRST_PAUSE_SECONDS


def test_an_outage_is_two_lines_in_the_log(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage.fail(FAILURES_TO_OPEN)
    for _ in range(5):
        outage.pause()
        outage.fail()
    outage.pause()
    outage.breaker.succeeded(outage.begin())
    outage.breaker.succeeded(outage.begin())
    first, last = caplog.messages
    assert "stores pause: 8 in a row failed; one is tried after 1 s" in first
    assert "stores go on: one" in last
