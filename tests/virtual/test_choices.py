"""Restores that are decided about, on vLLM's real scheduler: by what was measured, and any how."""

import random
from dataclasses import replace
from functools import partial

import pytest

from offload.messages import LOAD
from offload.scheduler import choices, costs
from offload.scheduler.choice import Choice, Prospect, Verdict
from offload.scheduler.costs import LinkCost, PrefillCost
from offload.scheduler.offer import NOTHING, Offer, Why
from offload.scheduler.why.reasons import Reason
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import MODELS, VirtualEngine, run_seed
from offload.testing.virtual.run import draw_kind
from tests.virtual.driver import Counts, Engines, come_to_rest, finish, forget_gpu, serve, tokens, warm, watch
from tests.virtual.test_why import why

BLOCK = 4
PROMPT = tokens(16 * BLOCK + 1)
"""A step computes two blocks, and takes a second."""


@pytest.fixture(autouse=True)
def _short_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_TOKENS", 2 * BLOCK)


@pytest.fixture
def engine(engines: Engines) -> VirtualEngine:
    """The pool has the prompt, and prefill was measured."""
    engine = engines(gpu_blocks=60, cpu_slots=200, chunk=2 * BLOCK, restore="auto")
    warm(engine, PROMPT)
    assert engine.side.costs.prefill.is_known
    return engine


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("overlapped", [False, True])
def test_each_step_is_measured_from_end_to_end(engines: Engines, num_ranks: int, overlapped: bool) -> None:
    """A step takes a second of the clock, and an overlapped one has ended when two more were planned."""
    engine = engines(
        gpu_blocks=60, cpu_slots=200, chunk=2 * BLOCK, num_ranks=num_ranks, overlapped=overlapped
    )
    finish(engine, PROMPT)
    come_to_rest(engine)
    per_token = engine.side.costs.prefill.by_depth()[0]
    assert per_token == engine.settings.step_seconds / (2 * BLOCK)


def test_what_every_step_takes_is_not_taken_for_its_tokens(engines: Engines) -> None:
    """Here a step takes a second whatever it computes. So a prompt takes as many as it has steps."""
    engine = engines(gpu_blocks=200, cpu_slots=400, chunk=8 * BLOCK)
    begun = tokens(4 * BLOCK)
    for turn in range(12):
        finish(engine, begun := begun + tokens((2 + turn % 4) * BLOCK, turn))
    come_to_rest(engine)
    told = engine.side.costs.prefill.seconds(0, 80 * BLOCK)
    assert told == pytest.approx(10 * engine.settings.step_seconds, rel=0.01)


def measure(engine: VirtualEngine, seconds_per_block: float) -> None:
    """Loads take that long. A block takes half a second to compute."""
    link = engine.side.costs.link(LOAD)
    for num_blocks in (1, 4) * 20:
        num_bytes = num_blocks * engine.side._common.block_bytes
        link.add(num_bytes, num_blocks * seconds_per_block, engine.clock())


def chosen(counts: Counts) -> dict[str, float]:
    found = {verdict.value: counts[f"restore_choices:{verdict}"] for verdict in Verdict}
    return {verdict: count for verdict, count in found.items() if count}


def test_what_is_loaded_sooner_is_loaded(engine: VirtualEngine) -> None:
    measure(engine, 0.1)
    counts = Counts(engine)
    finish(engine, PROMPT)
    assert counts["restored_tokens"] == 16 * BLOCK and chosen(counts) == {"loaded": 1}
    come_to_rest(engine)


def test_what_is_computed_sooner_is_computed(engine: VirtualEngine) -> None:
    measure(engine, 1.0)
    counts, computed = Counts(engine), watch(engine)
    request = finish(engine, PROMPT)
    assert counts["restored_tokens"] == 0 and chosen(counts) == {"computed": 1}
    assert computed[request.request_id] == len(PROMPT)
    assert why(engine, request).reason is Reason.CHEAPER
    come_to_rest(engine)


def test_a_request_is_told_that_computing_is_sooner(engine: VirtualEngine) -> None:
    measure(engine, 1.0)
    assert engine.side.offer(engine.add(PROMPT, 1), 0) == NOTHING[Why.COMPUTED]
    come_to_rest(engine)


def test_before_anything_is_measured_all_is_loaded(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_TOKENS", 1_000)
    engine = engines(gpu_blocks=60, cpu_slots=200, restore="auto")
    warm(engine, PROMPT)
    counts = Counts(engine)
    finish(engine, PROMPT)
    assert counts["restored_tokens"] == 16 * BLOCK and chosen(counts) == {"unmeasured": 1}
    come_to_rest(engine)


def test_a_client_may_have_all_loaded_or_none(engine: VirtualEngine) -> None:
    measure(engine, 1.0)
    counts = Counts(engine)
    finish(engine, PROMPT, hints={"cpu_offload_load": True})
    assert counts["restored_tokens"] == 16 * BLOCK and chosen(counts) == {"asked": 1}
    come_to_rest(engine)
    forget_gpu(engine)
    measure(engine, 0.01)
    counts.clear()
    finish(engine, PROMPT, hints={"cpu_offload_load": False})
    assert counts["restored_tokens"] == 0 and not chosen(counts)
    come_to_rest(engine)


@pytest.mark.parametrize(("restore", "restored"), [("always", 16 * BLOCK), ("never", 0)])
def test_what_the_configuration_says_goes_first(engines: Engines, restore: str, restored: int) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=200, chunk=2 * BLOCK, restore=restore)
    warm(engine, PROMPT)
    measure(engine, 1.0 if restored else 0.01)
    counts = Counts(engine)
    request = finish(engine, PROMPT, hints={} if restored else {"cpu_offload_load": True})
    assert counts["restored_tokens"] == restored
    assert chosen(counts) == ({"always": 1} if restored else {})
    come_to_rest(engine)
    assert engine.side.allocator.resident_depth(request.block_hashes) == 16, "it is stored for others"
    if not restored:
        forget_gpu(engine)
        request = engine.add(PROMPT, 1)
        assert engine.side.offer(request, 0) == NOTHING[Why.OFF]
        finish(engine, PROMPT)
        assert why(engine, request).reason is Reason.OFF
        come_to_rest(engine)


def busy(engine: VirtualEngine, num: int = 4) -> None:
    """So many others come whose prompts nobody has; it takes eight seconds to compute each."""
    for number in range(num):
        engine.add(tokens(16 * BLOCK, 100 + number), 1)


def test_while_others_are_computed_a_part_comes_over_a_slow_link(engine: VirtualEngine) -> None:
    measure(engine, 1.0)
    engine.side.restores.choices._longest.note(12.6)  # so nobody has to hurry for five seconds
    counts = Counts(engine)
    request = engine.add(PROMPT, 1)
    busy(engine)
    offer = engine.side.offer(request, 0)
    assert offer.why is Why.PART and offer.tokens == 5 * BLOCK
    come_to_rest(engine)
    assert request.is_finished()
    assert counts["restored_tokens"] == 5 * BLOCK and chosen(counts)["part"] == 1


def test_a_part_ends_at_a_checkpoint_or_is_computed(engines: Engines) -> None:
    engine = engines(groups=MODELS["window"], gpu_blocks=400, cpu_slots=400, chunk=16, restore="auto")
    size = engine.settings.block_tokens
    for length in (4 * size + 1, 12 * size + 1):  # which leave checkpoints
        warm(engine, tokens(length))
    prompt = tokens(12 * size + 1)
    link, block_bytes = engine.side.costs.link(LOAD), engine.side._common.block_bytes
    for num_blocks in (1, 4) * 20:
        link.add(num_blocks * block_bytes, num_blocks * 1e-6, engine.clock())
    request = engine.add(prompt, 1)
    for chosen_blocks, there in [(3, 0), (4, 4), (7, 4), (11, 8), (12, 12)]:
        stop = chosen_blocks * size
        engine.side.restores.choices.make = (  # type: ignore[method-assign]
            lambda request, *_, stop=stop, **__: note(engine, request, stop)
        )
        why = {0: Why.COMPUTED, 12: Why.RESIDENT}.get(there, Why.PART)
        assert engine.side.offer(request, 0) == (NOTHING[why] if not there else Offer(there * size, why))
    come_to_rest(engine)


def note(engine: VirtualEngine, request: object, stop: int) -> int:
    engine.side.restores.choices._made[request.request_id] = Choice(stop, Verdict.PART)  # type: ignore[attr-defined]
    return stop


def test_a_link_that_has_become_fast_is_found_and_used(engine: VirtualEngine) -> None:
    """It is tried now and then. What its copies really take here is next to nothing."""
    measure(engine, 1.0)
    counts = Counts(engine)
    began = engine.clock()
    while not chosen(counts).get("loaded"):
        serve(engine, PROMPT)
        forget_gpu(engine)
        assert engine.clock() < began + 90, chosen(counts)
    assert chosen(counts)["tried"] >= 1 and chosen(counts)["computed"] >= 1
    come_to_rest(engine)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STUCK, Fault.END_SHORT])
def test_a_try_that_goes_wrong_costs_its_request_a_prefill(engine: VirtualEngine, fault: Fault) -> None:
    measure(engine, 1.0)
    engine.history.step += 60
    engine.copiers[0].force(LOAD, fault)
    counts, computed = Counts(engine), watch(engine)
    request = engine.add(PROMPT, 1)
    come_to_rest(engine)
    assert request.is_finished() and chosen(counts)["tried"] == 1
    assert computed[request.request_id] == len(PROMPT)


def any_choice(rng: random.Random, prefill: PrefillCost, link: LinkCost, prospect: Prospect) -> Choice:
    """All, none, or up to any token."""
    first, stop = prospect.first, prospect.stop
    verdict = rng.choice([Verdict.LOADED, Verdict.PART, Verdict.PART, Verdict.COMPUTED])
    ends = {Verdict.LOADED: stop, Verdict.PART: rng.randint(first, stop), Verdict.COMPUTED: first}
    return Choice(ends[verdict], verdict, rng.random(), rng.random())


KINDS = ["plain", "draft", "replica", "tier", "several", "hand-offs", "window", "mamba"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_chosen_every_byte_is_right_and_all_come_to_an_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = 0.0
    for seed in (4100, 4101):
        rng = random.Random(seed)
        settings = replace(draw_kind(kind, seed, rng), restore="auto")
        monkeypatch.setattr(choices, "choose", partial(any_choice, rng))
        monkeypatch.setattr(choices, "TRY_SECONDS", rng.choice([0.0, 15.0]))
        verdicts += sum(run_seed(seed, turns=100, settings=settings).counts.values())
    assert verdicts
