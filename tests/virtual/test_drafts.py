"""Speculative decoding on the real scheduler, whose traps are numbered as in docs/traps.md.

Drafts are rejected, and draft layers have KV that depends on what follows. Every engine here checks what each
request attends to and drafts from, and what each resident slot holds, at every step.
"""

from collections import Counter

import pytest

from offload.messages import LOAD, STORE
from offload.testing.virtual import run_seed
from offload.testing.virtual.history import WrongBytesError
from tests.seeds import seeds_of_runs
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    depth_of,
    finish,
    forget_gpu,
    hold,
    serve,
    step_until,
    tokens,
    warm,
    watch,
)

overlapped = pytest.mark.parametrize("overlapped", [False, True], ids=["step by step", "overlapped"])
WITH_LAYERS = ["draft_model", "eagle", "mtp"]
DRAFTERS = ["ngram", *WITH_LAYERS]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_runs_with_drafts(first: int) -> None:
    counts = Counter[str]()
    for seed in seeds_of_runs(first, first + 10):
        counts += run_seed(seed, turns=150, kind="draft").counts
    assert counts["loads"] and 0 < counts["right drafts"] < counts["drafts"], counts


@overlapped
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_trap_67_rejected_drafts_are_never_stored(
    engines: Engines, drafter: str, skill: float, overlapped: bool
) -> None:
    """The engine counts all drafts as computed when stores are planned."""
    engine = engines(drafter=drafter, num_drafts=3, draft_skill=skill, overlapped=overlapped)
    request = engine.add(tokens(10), 31)
    while not request.is_finished():
        engine.step()
        assert engine.side.allocator.num_resident <= request.num_tokens // 4
    come_to_rest(engine)
    num_unsettled = 2 if drafter == "mtp" else 0
    assert depth_of(engine, request) == (request.num_tokens - 1 - num_unsettled) // 4
    drafts, right = engine.counts["drafts"], engine.counts["right drafts"]
    assert drafts > 5 and (right == drafts) == (skill == 1.0) and (right == 0) == (skill == 0.0)


@pytest.mark.parametrize(
    ("drafter", "num_layers"), [("ngram", 0), ("draft_model", 1), ("eagle", 1), ("mtp", 3)]
)
def test_trap_68_kv_of_draft_layers_travels_with_the_models(
    engines: Engines, drafter: str, num_layers: int
) -> None:
    plain, engine = engines(), engines(drafter=drafter, num_drafts=3)
    assert engine.settings.slot_bytes * 2 == plain.settings.slot_bytes * (2 + num_layers)
    warm(engine, tokens(22))
    serve(engine, tokens(22))
    assert engine.counts["loads"] == 1
    num_blocks = 5 if drafter in ("ngram", "draft_model") else 4
    assert engine.copiers[0].copied[LOAD] == num_blocks * engine.settings.slot_bytes


@pytest.mark.parametrize(
    ("drafter", "num_restored"), [("ngram", 5), ("draft_model", 5), ("eagle", 4), ("mtp", 4)]
)
def test_trap_69_the_last_block_of_a_hit_is_computed_again_if_its_draft_kv_may_be_anothers(
    engines: Engines, drafter: str, num_restored: int
) -> None:
    """Of five blocks that are there, behind which follows another token each time, and of a full hit."""
    engine = engines(drafter=drafter, num_drafts=3)
    serve(engine, tokens(30))
    prompts = [tokens(20) + tokens(9, first) for first in (1, 2)]
    for prompt in [*prompts, tokens(20)]:
        forget_gpu(engine)
        before = engine.copiers[0].copied[LOAD]
        serve(engine, prompt)
        assert engine.copiers[0].copied[LOAD] - before == num_restored * engine.settings.slot_bytes


def test_trap_69_as_many_tokens_come_from_the_pool_as_from_the_gpu(engines: Engines) -> None:
    computed = {}
    for drafter in WITH_LAYERS:
        engine = engines(drafter=drafter, num_drafts=3, gpu_blocks=60)
        seen = watch(engine)
        serve(engine, tokens(31))
        on_gpu = serve(engine, tokens(31))
        forget_gpu(engine)
        from_pool = serve(engine, tokens(31))
        computed[drafter] = (seen[on_gpu.request_id], seen[from_pool.request_id])
        assert engine.counts["loads"] == 1
    assert computed == {"draft_model": (3, 3), "eagle": (7, 7), "mtp": (7, 7)}


def test_trap_69_draft_kv_of_another_continuation_is_noticed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: without the block that is computed again, the last position is another's."""
    engine = engines(drafter="eagle", num_drafts=3)
    engine.side._engine.drafts = engine.side._engine.drafts._replace(num_volatile_blocks=0)
    serve(engine, tokens(30))
    forget_gpu(engine)
    with pytest.raises(WrongBytesError, match=r"drafts from wrong bytes at token positions \[19\]"):
        serve(engine, [*tokens(20), *tokens(9, first=1)])


@overlapped
def test_trap_70_a_block_is_stored_when_all_that_follows_is_known(engines: Engines, overlapped: bool) -> None:
    """The third module of three reads three tokens behind a position. Two of them are sampled later."""
    engine = engines(drafter="mtp", num_drafts=3, draft_skill=0.0, overlapped=overlapped)
    hold(engine, STORE)
    request = engine.add(tokens(8), 8)
    known = {}
    while not request.is_finished():
        engine.step()
        known.setdefault(engine.side.allocator.num_filling, request.num_tokens)
    assert known[2] >= 8 + 2 and known[1] < known[2]
    come_to_rest(engine)
    assert depth_of(engine, request) == (16 - 1 - 2) // 4


@pytest.mark.parametrize(("num_tokens", "num_restored"), [(17, 3), (22, 4), (26, 5), (28, 5), (31, 5)])
def test_trap_71_a_restore_leaves_the_blocks_that_drafts_need(
    engines: Engines, num_tokens: int, num_restored: int
) -> None:
    """One that would leave fewer of all the GPU's blocks is never admitted, and holds up all behind it."""
    engine = engines(drafter="eagle", num_drafts=4, gpu_blocks=9)  # one token and 2 x 4 take 3 of 8 blocks
    serve(engine, tokens(16))
    warm(engine, tokens(num_tokens))
    computed = watch(engine)
    request = serve(engine, tokens(num_tokens))
    assert computed[request.request_id] == num_tokens - 4 * num_restored


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_trap_29_stages_that_are_not_told_of_the_end_of_a_step_store_with_the_next(
    engines: Engines, drafter: str
) -> None:
    """With a pipeline and drafts vLLM's first runner tells the last stage only."""
    engine = engines(drafter=drafter, num_drafts=3, num_ranks=2)
    first_stage = engine.ranks[0].connector
    first_stage.wait_for_save = first_stage.clear_connector_metadata = lambda: None
    computed = watch(engine)
    warm(engine, tokens(30))
    request = serve(engine, tokens(30))
    come_to_rest(engine)
    assert engine.counts["loads"] == 1 and computed[request.request_id] < 12


def test_siblings_share_a_restore_with_drafts(engines: Engines) -> None:
    """Each loads one block at most beside what the first one has brought."""
    engine = engines(drafter="eagle", num_drafts=2, gpu_blocks=60)
    warm(engine, tokens(40))
    hold(engine, LOAD)
    leader = engine.add(tokens(40), 1)
    step_until(engine, lambda: leader.status == LOADING)
    for first in (1, 2, 3):
        engine.add([*tokens(40), *tokens(3, first)], 2)
    come_to_rest(engine)
    copied = engine.copiers[0].copied[LOAD] // engine.settings.slot_bytes
    assert 9 <= copied <= 9 + 3


def test_stores_that_wait_give_way_to_requests_with_all_blocks_for_their_drafts(engines: Engines) -> None:
    """Of 13 blocks 7 are in flight for ever, and 3 wait for their turn. A prompt and its drafts take 4."""
    engine = engines(drafter="eagle", num_drafts=4, gpu_blocks=14)
    hold(engine, STORE)
    finish(engine, tokens(40))
    assert engine.side.stores.backlog.num_queued == 3
    request = engine.add(tokens(12, first=1), 1)
    step_until(engine, request.is_finished, 25)  # what has waited for 30 is given up in any case
    come_to_rest(engine)


def test_siblings_may_leave_other_kv_at_ends_of_blocks_of_draft_layers() -> None:
    """Engines beside each other have met other continuations; what one left there comes to the others."""
    counts = run_seed(30611101, turns=1000, kind="siblings").counts
    assert counts["drafts"], counts
