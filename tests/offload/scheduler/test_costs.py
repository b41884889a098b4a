"""What is measured of links and of prefill."""

import numpy as np
import pytest

from offload.messages import LOAD, STORE
from offload.scheduler.costs import Costs, LinkCost, PrefillCost

MIB = 1 << 20


class Timed:
    """Steps on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.prefill = PrefillCost(lambda: self.now)

    def compute(self, num_tokens: int, depth: float, seconds: float) -> None:
        """A step, alone."""
        step = self.prefill.begin(num_tokens, lambda: depth)
        self.now += seconds
        self.prefill.end(step)
        self.prefill.check_invariants()


@pytest.fixture
def timed() -> Timed:
    return Timed()


@pytest.mark.parametrize("seed", range(5))
def test_a_line_is_found_among_samples_of_which_a_quarter_took_long_by_chance(seed: int) -> None:
    rng, link = np.random.default_rng(seed), LinkCost()
    late = rng.permutation(32) < 8
    for is_late in late:
        num_bytes = int(rng.integers(1, 64)) * MIB
        link.add(num_bytes, 0.002 + num_bytes * 1e-10 + is_late * rng.random())
    link.check_invariants()
    assert link.per_byte == pytest.approx(1e-10, rel=0.5)
    assert link.seconds(32 * MIB) == pytest.approx(0.002 + 32 * MIB * 1e-10, rel=0.3)


def test_without_noise_the_line_is_exact() -> None:
    link = LinkCost()
    for number in range(1, 20):
        link.add(number * MIB, 0.002 + number * MIB * 1e-10)
    assert link.per_job == pytest.approx(0.002)
    assert link.per_byte == pytest.approx(1e-10)


def test_jobs_of_one_size_tell_of_bytes_alone() -> None:
    link = LinkCost()
    for seconds in (0.5, 1.0, 9.0):
        link.add(1000, seconds)
    assert (link.per_job, link.per_byte) == (0, 0.001)
    assert link.seconds(2000) == 2.0


def test_more_bytes_never_take_less_time() -> None:
    """Samples may fall by chance: then the mean speed counts."""
    link = LinkCost()
    for num_bytes, seconds in [(1000, 1.0), (4000, 0.5), (8000, 0.25)]:
        link.add(num_bytes, seconds)
    link.check_invariants()
    assert (link.per_job, link.per_byte) == (0, 0.5 / 4000)


def test_no_job_takes_less_than_nothing() -> None:
    link = LinkCost()
    for num_bytes, seconds in [(1000, 0.5), (2000, 4.0), (4000, 12.0)]:
        link.add(num_bytes, seconds)
    link.check_invariants()
    assert link.per_job == 0


def test_a_link_forgets() -> None:
    link = LinkCost()
    for _ in range(40):
        link.add(1000, 50.0)
    for _ in range(32):
        link.add(1000, 1.0)
    assert link.seconds(1000) == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_link_that_has_changed_is_known_after_four_jobs(factor: float) -> None:
    """Whichever way, and though 32 samples count else."""
    link = LinkCost()
    for number in range(40):
        link.add(1000 + 1000 * (number % 4), 1.0 + number % 4, float(number))
    assert link.seconds(1000) == pytest.approx(1.0)
    for _ in range(3):
        link.add(2000, 2.0 * factor)
        assert link.seconds(1000) == pytest.approx(1.0)
    link.add(4000, 4.0 * factor, 50.0)
    assert link.seconds(1000) == pytest.approx(1.0 * factor)
    assert link.measured_at == 50.0
    link.check_invariants()


@pytest.mark.parametrize(("size", "seconds"), [(10, 0.5), (10, 0.02), (4000, 16.1), (4000, 1.1)])
def test_jobs_of_one_size_change_the_greater_part_of_what_they_take(size: int, seconds: float) -> None:
    """A job takes 0.1 s and 1 ms a byte. Then all are small, or large, and the link is another one."""
    link = LinkCost()
    for number in range(40):
        link.add(1000 + 1000 * (number % 4), 1.1 + number % 4)
    assert (link.per_job, link.per_byte) == (pytest.approx(0.1), pytest.approx(0.001))
    for _ in range(4):
        link.add(size, seconds)
    assert link.seconds(size) == pytest.approx(seconds)
    kept = link.per_byte if size == 10 else link.per_job
    assert kept == pytest.approx(0.001 if size == 10 else 0.1)
    link.check_invariants()


def test_jobs_that_take_long_now_and_then_change_nothing() -> None:
    link = LinkCost()
    for number in range(200):
        link.add(1000 + 1000 * (number % 4), (1.0 + number % 4) * (9.0 if number % 4 == 3 else 1.0))
        assert number < 8 or link.seconds(1000) == pytest.approx(1.0)


def test_nothing_is_known_at_first() -> None:
    link = LinkCost()
    link.add(0, 5.0)
    assert not link.is_known
    assert link.seconds(10**12) == 0
    link.check_invariants()


def test_tokens_behind_many_cost_more(timed: Timed) -> None:
    timed.compute(1000, 500, 1.0)
    timed.compute(1000, 1500, 2.0)
    timed.compute(1000, 3000, 4.0)
    assert timed.prefill.by_depth() == {0: 0.001, 1024: 0.002, 2048: 0.004}
    assert timed.prefill.seconds(0, 1024) == pytest.approx(1.024)
    assert timed.prefill.seconds(1000, 1100) == pytest.approx(0.024 + 0.152)
    assert timed.prefill.seconds(0, 4096) == pytest.approx(1.024 + 2.048 + 8.192)


def test_where_nothing_was_measured_the_nearest_depth_counts(timed: Timed) -> None:
    timed.compute(1000, 500, 1.0)
    assert timed.prefill.seconds(100_000, 101_000) == pytest.approx(1.0)
    timed.compute(1000, 70_000, 8.0)
    assert timed.prefill.seconds(100_000, 101_000) == pytest.approx(8.0)
    assert timed.prefill.seconds(1024, 2024) == pytest.approx(1.0)


def test_what_was_said_of_a_depth_is_said_anew_after_a_step(timed: Timed) -> None:
    timed.compute(1000, 500, 1.0)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(1.0)
    for _ in range(32):
        timed.compute(1000, 500, 3.0)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(3.0)


def test_pauses_in_some_steps_do_not_count(timed: Timed) -> None:
    for number in range(20):
        timed.compute(1000, 0, 60.0 if number % 2 else 1.0)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(1.0)


def test_a_depth_that_was_measured_seldom_costs_as_the_nearest_that_was_measured_often(timed: Timed) -> None:
    """The first deep prompt is where an engine compiles, and what follows may be loaded for ever."""
    for _ in range(4):
        timed.compute(1000, 0, 1.0)
    for _ in range(3):
        timed.compute(1000, 40_000, 60.0)
    assert timed.prefill.seconds(40_000, 41_000) == pytest.approx(1.0)
    timed.compute(1000, 40_000, 3.0)
    assert timed.prefill.seconds(40_000, 41_000) == pytest.approx(
        60.0
    )  # all four are known, and most are long
    timed.compute(1000, 40_000, 3.0)
    timed.compute(1000, 40_000, 3.0)
    assert timed.prefill.seconds(40_000, 41_000) == pytest.approx(3.0)


def test_a_step_of_answers_says_nothing(timed: Timed) -> None:
    assert timed.prefill.begin(1000, lambda: None) == 0
    timed.now += 1.0
    timed.prefill.end(0)
    assert not timed.prefill.is_known


@pytest.mark.parametrize("idle", [0.0, 60.0])
def test_idle_time_between_steps_does_not_count(timed: Timed, idle: float) -> None:
    for _ in range(3):
        timed.compute(1000, 0, 1.0)
        timed.now += idle
    assert timed.prefill.seconds(0, 1000) == pytest.approx(1.0)


def test_a_step_that_is_planned_while_another_runs_begins_with_its_end(timed: Timed) -> None:
    first = timed.prefill.begin(1000, lambda: 0.0)
    timed.now += 0.25
    second = timed.prefill.begin(1000, lambda: 5000.0)
    timed.now += 0.75
    timed.prefill.end(first)
    timed.now += 2.0
    timed.prefill.end(second)
    timed.prefill.check_invariants()
    assert timed.prefill.by_depth() == {0: 0.001, 4096: 0.002}


def test_a_step_without_a_number_ends_before_what_was_planned_while_it_ran(timed: Timed) -> None:
    assert timed.prefill.begin(1, lambda: 0.0) == 0
    step = timed.prefill.begin(1000, lambda: 0.0)
    timed.now += 7.0
    timed.prefill.end(0)
    timed.now += 1.0
    timed.prefill.end(step)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(1.0)


def test_a_plan_whose_end_is_never_told_says_nothing(timed: Timed) -> None:
    for _ in range(1000):
        timed.prefill.begin(1000, lambda: 0.0)
        timed.prefill.check_invariants()
    assert not timed.prefill.is_known
    timed.compute(1000, 0, 2.0)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(2.0)


def test_a_step_of_few_tokens_is_not_asked_for_its_depth(timed: Timed) -> None:
    def depth() -> float:
        raise AssertionError("this costs a loop over requests")

    timed.prefill.end(timed.prefill.begin(255, depth))
    assert not timed.prefill.is_known
    assert timed.prefill.seconds(0, 100) == 0


def test_each_route_has_its_own() -> None:
    costs = Costs(lambda: 0.0)
    costs.link(LOAD).add(1000, 1.0)
    assert costs.link(LOAD).is_known
    assert not costs.link(STORE).is_known
    costs.check_invariants()
