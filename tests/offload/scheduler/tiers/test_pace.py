"""Whether fetching beats computing, on a clock of the test's own."""

import pytest

from offload.scheduler.costs import PrefillCost
from offload.scheduler.tiers.pace import Pace


class Measured:
    """What has been measured, in seconds of a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.prefill = PrefillCost(lambda: self.now, 1000)
        self.pace = Pace(self.prefill, lambda: self.now)

    def compute(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, from its plan to its end."""
        step = self.prefill.begin(num_tokens, lambda: 0.0)
        self.now += seconds
        self.prefill.end(step)

    def know(self, per_token: float = 0.001, per_byte: float = 0.000_001) -> None:
        for _ in range(3):
            self.compute(1000, 1000 * per_token)
            self.pace.fetched(1_000_000, 1_000_000 * per_byte)
        self.pace.check_invariants()


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_a_fetch_is_made_while_one_of_them_is_unknown(measured: Measured) -> None:
    assert measured.pace.is_worth(0, 1, 10**12)
    measured.compute(1000, 1.0)
    assert measured.pace.is_worth(0, 1, 10**12)


def test_a_fetch_is_made_where_computing_is_unknown() -> None:
    measured = Measured()
    measured.pace.fetched(10, 1.0)
    assert measured.pace.is_worth(0, 1, 10**12)


def test_the_faster_one_wins(measured: Measured) -> None:
    measured.know(per_token=0.001, per_byte=0.000_001)
    assert measured.pace.is_worth(0, 1000, 999_000)
    assert not measured.pace.is_worth(0, 1000, 1_001_000)


def test_what_is_waited_for_in_any_case_may_take_that_long(measured: Measured) -> None:
    """1,000 tokens take a second to compute; these bytes take two and a half to come."""
    measured.know(per_token=0.001, per_byte=0.000_001)
    assert not measured.pace.is_worth(0, 1000, 2_500_000, 2.4)
    assert measured.pace.is_worth(0, 1000, 2_500_000, 2.6)


@pytest.mark.parametrize(("num_tokens", "counts"), [(255, False), (256, True)])
def test_small_steps_say_nothing_about_prefill(measured: Measured, num_tokens: int, counts: bool) -> None:
    measured.pace.fetched(1_000, 1.0)
    for _ in range(3):
        measured.compute(num_tokens, 0.001)
    assert measured.pace.is_worth(0, 10, 10_000) is not counts


def test_one_stall_is_forgotten(measured: Measured) -> None:
    """Medians: a step or a fetch that took long by chance changes nothing."""
    measured.know()
    measured.compute(1000, 20.0)
    assert not measured.pace.is_worth(0, 1000, 1_100_000)
    measured.pace.fetched(1_000_000, 60.0)
    assert measured.pace.is_worth(0, 1000, 900_000)


def test_what_was_measured_long_ago_is_forgotten(measured: Measured) -> None:
    measured.know(per_byte=0.000_001)
    for _ in range(40):
        measured.pace.fetched(1_000_000, 10.0)
    assert not measured.pace.is_worth(0, 1000, 900_000)


def test_what_was_slow_is_tried_again(measured: Measured) -> None:
    measured.know()
    assert measured.pace.is_worth(0, 1000, 1)
    assert not measured.pace.is_worth(0, 1000, 2_000_000)
    measured.now += 29.0
    assert not measured.pace.is_worth(0, 1000, 2_000_000)
    measured.now += 1.0
    assert measured.pace.is_worth(0, 1000, 2_000_000)
    assert not measured.pace.is_worth(0, 1000, 2_000_000), "once"


def test_an_empty_fetch_says_nothing(measured: Measured) -> None:
    measured.pace.fetched(0, 5.0)
    measured.know()
    assert measured.pace.is_worth(0, 1000, 900_000)


def test_a_fetch_of_few_bytes_takes_its_wait_all_the_same(measured: Measured) -> None:
    """A store far away: what a fetch waits for counts, however little it brings."""
    measured.know()
    for num_bytes in range(1_000_000, 9_000_000, 250_000):
        measured.pace.fetched(num_bytes, 0.5 + num_bytes * 0.000_000_001)
    assert not measured.pace.is_worth(0, 400, 1)
    assert measured.pace.is_worth(0, 600, 1)
