"""What is measured of links and of prefill."""

import numpy as np
import pytest

from offload.messages import LOAD, STORE
from offload.scheduler.costs import Costs, LinkCost, PrefillCost

MIB = 1 << 20
STEP_TOKENS = 2048
"""That a step computes at most."""


class Timed:
    """Steps on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.prefill = PrefillCost(lambda: self.now, STEP_TOKENS)

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


OWN, SHORT, DEEP = 0.01, 20e-6, 30e-6
"""Seconds of a step itself, and of a token before and behind 16,384 others."""


def true_seconds(num_tokens: int, depth: float) -> float:
    return OWN + num_tokens * (DEEP if depth >= 16_384 else SHORT)


def test_a_token_of_short_turns_costs_as_much_as_one_of_long_prompts(timed: Timed) -> None:
    """Turns behind long chains have steps of few tokens, which take a step's own time as well."""
    for turn in range(32):
        timed.compute(num_tokens := 256 + 37 * turn % 400, 20_000, true_seconds(num_tokens, 20_000))
    told = timed.prefill.seconds(16_384, 16_384 + 4 * STEP_TOKENS)
    assert told == pytest.approx(4 * true_seconds(STEP_TOKENS, 20_000), rel=1e-6)


def test_what_a_step_takes_itself_is_told_by_steps_of_any_depth(timed: Timed) -> None:
    """Behind the prompt all turns are of one length."""
    for size in (300, 2048, 700, 2048, 400, 2048):
        timed.compute(size, 3000, true_seconds(size, 3000))
    for _ in range(8):
        timed.compute(300, 20_000, true_seconds(300, 20_000))
    for first, stop in [(2048, 4096), (16_384, 18_432)]:
        assert timed.prefill.seconds(first, stop) == pytest.approx(true_seconds(2048, first), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_pauses_and_noise_change_little_of_that(timed: Timed, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(64):
        size = int(rng.integers(256, 1024))
        late = rng.random() if number % 5 == 4 else 0.0
        timed.compute(size, 20_000, true_seconds(size, 20_000) * rng.uniform(0.9, 1.1) + late)
    told = timed.prefill.seconds(16_384, 16_384 + STEP_TOKENS)
    assert told == pytest.approx(true_seconds(STEP_TOKENS, 20_000), rel=0.2)


def test_steps_of_one_length_do_not_tell_a_step_from_its_tokens(timed: Timed) -> None:
    for size in (600, 700, 800, 900, 1000) * 4:
        timed.compute(size, 0, OWN + size * SHORT)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(SHORT * 1000 + OWN * 1000 / 800)


def test_a_step_of_its_own_takes_no_longer_than_any(timed: Timed) -> None:
    """Long steps that paused, all of the few that there were, and short ones that did not, or the reverse."""
    for _ in range(4):
        timed.compute(300, 0, 60.0)
        timed.compute(2000, 0, true_seconds(2000, 0))
    for _ in range(4):
        timed.compute(2000, 20_000, true_seconds(2000, 20_000))
    told = timed.prefill.seconds(16_384, 18_384)
    assert 0 < told <= 1.1 * true_seconds(2000, 20_000)


def test_a_step_itself_takes_no_longer_than_steps_of_that_depth(timed: Timed) -> None:
    """The machine has become another one since the deep ones."""
    for number in range(16):
        size = 300 if number % 2 else 1200
        timed.compute(size, 20_000, 0.5 + size * DEEP)
    for _ in range(4):
        timed.compute(300, 0, true_seconds(300, 0))
    assert 0 < timed.prefill.seconds(0, 300) <= 1.001 * true_seconds(300, 0)


def test_steps_that_take_less_the_more_they_compute_tell_nothing_of_themselves(timed: Timed) -> None:
    for _ in range(8):
        timed.compute(300, 0, 0.003)
        timed.compute(1000, 0, 1.0)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(0.01), "the lower one of two medians"


def test_few_steps_tell_nothing_of_a_step_itself(timed: Timed) -> None:
    """One of them may have paused."""
    for size, seconds in [(1000, 1.0), (400, 5.0), (2000, 2.0)]:
        timed.compute(size, 0, seconds)
    assert timed.prefill.seconds(0, 1000) == pytest.approx(1.0)


def test_another_machine_is_known_after_32_steps(timed: Timed) -> None:
    for own in (0.5, 0.01):
        for number in range(40):
            size = 300 if number % 2 else 1200
            timed.compute(size, 0, own + size * SHORT)
    assert timed.prefill.seconds(0, STEP_TOKENS) == pytest.approx(true_seconds(STEP_TOKENS, 0))


@pytest.mark.parametrize("sizes", [(1000,), (300, 600, 1200)])
def test_ends_that_are_told_in_a_burst_change_little(timed: Timed, sizes: tuple[int, ...]) -> None:
    """Four stages of a pipeline, each with a step. Now and then the scheduler is late for four of them."""
    stages, planned = 4, []
    for number in range(96):
        size = sizes[number % len(sizes)]
        planned.append((timed.prefill.begin(size, lambda: 0.0), OWN + size * SHORT))
        if len(planned) < stages:
            continue
        step, seconds = planned.pop(0)
        is_burst = number % 10 in (1, 2, 3)  # all that was late is in the step before
        late = sum(each for _, each in planned) if number % 10 == 0 else 0.0
        timed.now += 0.0 if is_burst else seconds + late
        timed.prefill.end(step)
        timed.prefill.check_invariants()
    told = timed.prefill.seconds(0, 1000)
    own = OWN / STEP_TOKENS if len(sizes) > 1 else OWN / 1000
    assert told == pytest.approx(1000 * (SHORT + own), rel=0.2)


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
    costs = Costs(lambda: 0.0, 1000)
    costs.link(LOAD).add(1000, 1.0)
    assert costs.link(LOAD).is_known
    assert not costs.link(STORE).is_known
    costs.check_invariants()
