"""The circuit breaker, on a clock of the test's own."""

import logging

import pytest

from offload.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, CircuitBreaker


class Outage:
    """A breaker and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = CircuitBreaker(lambda: self.now)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.breaker.failed()

    def pause(self) -> float:
        """Seconds until jobs are tried again."""
        began = self.now
        while self.breaker.is_open:
            self.now += 0.25
        return self.now - began


@pytest.fixture
def outage() -> Outage:
    return Outage()


def test_failures_in_a_row_open_it(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN - 1)
    assert not outage.breaker.is_open
    outage.fail()
    assert outage.breaker.is_open


def test_a_success_between_keeps_it_closed(outage: Outage) -> None:
    for _ in range(5):
        outage.fail(FAILURES_TO_OPEN - 1)
        outage.breaker.succeeded()
    assert not outage.breaker.is_open


def test_pauses_double_while_the_first_try_after_them_fails(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    pauses = [outage.pause()]
    for _ in range(8):
        outage.fail()
        pauses.append(outage.pause())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)


def test_ends_of_jobs_from_before_the_pause_change_nothing(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    outage.fail(30)
    outage.breaker.succeeded()
    assert outage.pause() == FIRST_PAUSE_SECONDS
    outage.fail()
    assert outage.pause() == 2 * FIRST_PAUSE_SECONDS


def test_a_success_after_the_pause_ends_the_outage(outage: Outage) -> None:
    outage.fail(FAILURES_TO_OPEN)
    outage.pause()
    outage.fail()
    outage.pause()
    outage.breaker.succeeded()
    outage.fail(FAILURES_TO_OPEN - 1)
    assert not outage.breaker.is_open
    outage.fail()
    assert outage.pause() == FIRST_PAUSE_SECONDS


def test_an_outage_is_two_lines_in_the_log(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage.fail(FAILURES_TO_OPEN)
    for _ in range(5):
        outage.pause()
        outage.fail(3)
    outage.pause()
    outage.breaker.succeeded()
    outage.breaker.succeeded()
    first, last = caplog.messages
    assert "offload pauses: 8 copies in a row failed" in first
    assert "offload goes on" in last
