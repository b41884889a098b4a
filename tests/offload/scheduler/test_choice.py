"""Whether a restore is made, by what things cost."""

import pytest

from offload.scheduler.choice import HELD_UP, SLOWEST, WORTH, Prospect, Verdict, choose
from offload.scheduler.costs import LinkCost, PrefillCost

TOKEN_BYTES = 1000.0
PROSPECT = Prospect(0, 1000, 1100, TOKEN_BYTES)
"""1000 of 1100 tokens may be loaded. Computed at a token per millisecond, these take a second."""


def prefill_of(seconds_per_token: float) -> PrefillCost:
    now = [0.0]
    prefill = PrefillCost(lambda: now[0], 1000)
    step = prefill.begin(1000, lambda: 0.0)
    now[0] = 1000 * seconds_per_token
    prefill.end(step)
    return prefill


def link_of(seconds_per_token: float, per_job: float = 0.0) -> LinkCost:
    link = LinkCost()
    for num_tokens in (10, 100, 1000):
        link.add(int(num_tokens * TOKEN_BYTES), per_job + num_tokens * seconds_per_token)
    return link


PREFILL = prefill_of(0.001)


def test_as_long_as_a_cost_is_not_known_all_is_loaded() -> None:
    nothing = PrefillCost(lambda: 0.0, 1000)
    for prefill, link in [(nothing, link_of(1.0)), (PREFILL, LinkCost()), (nothing, LinkCost())]:
        choice = choose(prefill, link, PROSPECT)
        assert choice == (1000, Verdict.UNMEASURED, 0.0, 0.0)


@pytest.mark.parametrize(("link", "verdict"), [(0.0009, Verdict.LOADED), (0.0011, Verdict.COMPUTED)])
def test_alone_what_is_over_sooner_is_done(link: float, verdict: Verdict) -> None:
    """A link that takes longer for all saves nothing by a part: first tokens are no dearer than others."""
    choice = choose(PREFILL, link_of(link), PROSPECT)
    assert choice.verdict is verdict
    assert choice.stop == (1000 if verdict is Verdict.LOADED else 0)
    assert choice.load_seconds == pytest.approx(1000 * link + 0.1)
    assert choice.compute_seconds == pytest.approx(1.1)


def test_what_is_on_the_link_already_goes_first() -> None:
    fast = link_of(0.0005)
    assert choose(PREFILL, fast, PROSPECT._replace(queue=0.4)).verdict is Verdict.LOADED
    assert choose(PREFILL, fast, PROSPECT._replace(queue=0.6)).verdict is Verdict.COMPUTED


def test_a_load_may_take_as_long_as_others_keep_the_gpu_busy() -> None:
    fast = link_of(0.0005)
    assert choose(PREFILL, fast, PROSPECT._replace(queue=2.0, backlog=1.4)).verdict is Verdict.COMPUTED
    assert choose(PREFILL, fast, PROSPECT._replace(queue=2.0, backlog=1.6)).verdict is Verdict.LOADED


def test_a_prefill_holds_up_the_answers_of_those_that_are_restored() -> None:
    """A load takes 0.5 s, a prefill 1 s. For each other it may be later by a part of the difference."""
    fast = link_of(0.0005)
    for num_others in (1, 4):
        most = 0.5 + HELD_UP * 0.5 * num_others
        others = PROSPECT._replace(num_restoring=num_others)
        assert choose(PREFILL, fast, others._replace(queue=0.99 * most)).verdict is Verdict.LOADED
        assert choose(PREFILL, fast, others._replace(queue=1.01 * most)).verdict is Verdict.COMPUTED
    slow = PROSPECT._replace(num_restoring=100)
    assert choose(PREFILL, link_of(0.0011), slow).verdict is Verdict.COMPUTED, (
        "it holds up more than a prefill"
    )


def test_on_a_slow_link_nobody_waits_longer_than_the_patience() -> None:
    slow = link_of(0.002)
    busy = PROSPECT._replace(backlog=100.0)
    assert choose(PREFILL, slow, busy._replace(patience=1.1)).verdict is Verdict.LOADED
    impatient = choose(PREFILL, slow, busy._replace(patience=0.5))
    assert impatient.verdict is Verdict.PART
    assert impatient.stop == pytest.approx(250, abs=1)
    assert choose(PREFILL, slow, busy._replace(patience=-1.0)).verdict is Verdict.COMPUTED


def test_a_part_takes_the_time_that_is_free() -> None:
    slow = link_of(0.002, per_job=0.1)
    prospect = PROSPECT._replace(backlog=1.0, patience=9.0, queue=0.3, fixed_bytes=50 * TOKEN_BYTES)
    choice = choose(PREFILL, slow, prospect)
    assert choice.verdict is Verdict.PART
    assert choice.stop == pytest.approx((1.0 - 0.3 - 0.1 - 0.1) / 0.002, abs=1)


def test_a_part_that_saves_next_to_nothing_is_not_loaded() -> None:
    slow, least = link_of(0.002), WORTH * 1100 * 0.002
    for free, verdict in [(0.9 * least, Verdict.COMPUTED), (1.1 * least, Verdict.PART)]:
        prospect = PROSPECT._replace(backlog=free, patience=9.0)
        assert choose(PREFILL, slow, prospect).verdict is verdict


def test_a_link_that_is_far_too_slow_is_not_used_however_much_time_there_is() -> None:
    prospect = PROSPECT._replace(backlog=100.0, patience=100.0)
    assert choose(PREFILL, link_of(0.99 * SLOWEST / 1000), prospect).verdict is Verdict.LOADED
    assert choose(PREFILL, link_of(1.01 * SLOWEST / 1000), prospect).verdict is Verdict.COMPUTED


def test_what_is_behind_the_restore_is_computed_either_way() -> None:
    prospect = PROSPECT._replace(num_tokens=100_000)
    choice = choose(PREFILL, link_of(0.0009), prospect)
    assert choice.verdict is Verdict.LOADED
    assert choice.compute_seconds - choice.load_seconds == pytest.approx(0.1)


def test_a_model_without_full_attention_moves_the_bag_alone() -> None:
    prospect = PROSPECT._replace(token_bytes=0.0, fixed_bytes=500 * TOKEN_BYTES)
    assert choose(PREFILL, link_of(0.001), prospect).verdict is Verdict.LOADED
    assert choose(PREFILL, link_of(0.003), prospect).verdict is Verdict.COMPUTED
    busy = prospect._replace(backlog=0.4, patience=0.4)
    assert choose(PREFILL, link_of(0.003), busy).verdict is Verdict.COMPUTED
