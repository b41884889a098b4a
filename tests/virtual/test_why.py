"""Why a prompt was not found: each reason as vLLM's real scheduler produces it, and read back."""

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from offload.messages import LOAD, STORE
from offload.peer_messages import Unused
from offload.scheduler.offer import Why
from offload.scheduler.why.absence import _BY_OFFER, _FOUND
from offload.scheduler.why.note import Note
from offload.scheduler.why.notes import Notes
from offload.scheduler.why.reasons import OF_OTHERS, TEXTS, WHY_UNSTORED, Missing, Reason, Unfetched
from offload.testing.copiers.faulty import Fault
from offload.testing.media.faulty import MediumFault
from offload.testing.memory_engine import MemoryRequest
from offload.testing.virtual import MODELS, VirtualEngine
from offload.testing.virtual.resizes import Resizes, resize
from offload.testing.virtual.tier import FETCH
from offload.worker.media.base import Verb
from tests.virtual.driver import (
    Counts,
    Engines,
    come_to_rest,
    finish,
    forget_gpu,
    forget_gpu_while_held,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
)
from tests.virtual.test_peers import Pair
from tests.virtual.test_tiers import WHOLE, Tiered

BLOCK = 4
PROMPT = tokens(10 * BLOCK + 1)
LONG = tokens(40 * BLOCK + 1, 7)
LORA = LoRARequest("adapter", 1, "/adapters/1")


@pytest.fixture
def engine(engines: Engines) -> VirtualEngine:
    return engines(gpu_blocks=60, cpu_slots=60, chunk=64)


def note_of(engine: VirtualEngine, request: Request) -> Note:
    [note] = engine.side.notes.of(lambda each: each == request.request_id, 2)
    return note


def why(engine: VirtualEngine, request: Request) -> Missing:
    """The one reason that something of it was not found."""
    [missing] = note_of(engine, request).missing
    assert missing.text(0.0)
    return missing


def ask(engine: VirtualEngine, prompt: list[int] = PROMPT, **options: Any) -> Missing:
    return why(engine, serve(engine, prompt, **options))


# Where tokens came from


def test_tokens_by_source(engine: VirtualEngine) -> None:
    cold, gpu = serve(engine, PROMPT), serve(engine, PROMPT)
    forget_gpu(engine)
    pool = serve(engine, PROMPT)
    assert note_of(engine, cold).tokens() == {"gpu": 0, "computed": 41}
    assert note_of(engine, gpu).tokens() == {"gpu": 40, "computed": 1}
    assert note_of(engine, pool).tokens() == {"gpu": 0, "pool": 40, "computed": 1}
    assert note_of(engine, pool).missing == ()
    assert note_of(engine, pool).restoring > 0 and note_of(engine, pool).state == "completed"


def test_tokens_that_a_tier_brought_are_the_tiers_for_who_waited_for_them() -> None:
    tiered = Tiered()
    prompt = tokens(63 * BLOCK + 2)
    serve(tiered.engine, prompt)
    tiered.evict()
    waited = note_of(tiered.engine, serve(tiered.engine, prompt)).tokens()
    forget_gpu(tiered.engine)
    later = note_of(tiered.engine, serve(tiered.engine, prompt)).tokens()
    assert waited[FETCH.source] == WHOLE and waited.get("pool", 0) == 0
    assert later["pool"] == WHOLE and FETCH.source not in later
    tiered.engine.close()


def test_what_was_lost_on_the_way_is_not_from_the_pool(engine: VirtualEngine) -> None:
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, Fault.FAIL)
    request = serve(engine, PROMPT)
    note = note_of(engine, request)
    assert note.tokens() == {"gpu": 0, "computed": len(PROMPT)}
    assert [each.reason for each in note.missing] == [Reason.FAILED]
    assert (note.missing[0].from_token, note.missing[0].num_tokens) == (0, 40)


@pytest.mark.parametrize(("chunk", "counter"), [(1024, "lost_seconds"), (256, "saved_seconds")])
def test_seconds_saved_and_lost(chunk: int, counter: str, engines: Engines) -> None:
    """A step takes a second, a restore several: it pays where the prompt takes more steps than that."""
    engine = engines(gpu_blocks=400, cpu_slots=400, chunk=chunk)
    counts = Counts(engine)
    prompt = tokens(1001, 3)
    for first in (1, 2):
        serve(engine, tokens(1001, first))
    warm(engine, prompt)
    note = note_of(engine, serve(engine, prompt))
    gain = engine.side.costs.prefill.seconds(0, 1000) - note.held - note.restoring
    assert note.num_restored == 1000 and note.restoring > 0
    assert note.gain == pytest.approx(gain)
    assert {name: counts[name] for name in ("lost_seconds", "saved_seconds") if counts[name]} == {
        counter: pytest.approx(abs(gain))
    }


# What is remembered of others


def test_nobody_had_it(engine: VirtualEngine) -> None:
    assert ask(engine) == Missing(0, 40, Reason.UNSEEN)


def test_it_goes_on_behind_another(engine: VirtualEngine) -> None:
    first = serve(engine, PROMPT[:40])
    missing = ask(engine, [*PROMPT[:40], *tokens(2 * BLOCK, 5)])
    assert missing == Missing(40, 8, Reason.ENDS_BEFORE, by=first.request_id)


def test_its_hash_differs_from_a_position_on(engine: VirtualEngine) -> None:
    first = serve(engine, PROMPT)
    missing = ask(engine, [*PROMPT[:26], *tokens(14, 5)])
    assert missing == Missing(24, 16, Reason.DIFFERS, by=first.request_id)


def test_it_has_another_salt(engine: VirtualEngine) -> None:
    first = serve(engine, PROMPT, salt="one")
    assert ask(engine, salt="other") == Missing(0, 40, Reason.SALT, by=first.request_id)


def test_it_has_another_adapter(engine: VirtualEngine) -> None:
    first = serve(engine, PROMPT)
    assert ask(engine, lora=LORA) == Missing(0, 40, Reason.ADAPTER, by=first.request_id)


def test_what_was_forgotten_is_not_claimed(engine: VirtualEngine) -> None:
    """Nobody guesses: without what explains it, it is unknown how it was lost, or who had it."""
    first = serve(engine, PROMPT)
    engine.side.allocator.departures._by_first.clear()
    engine.side.allocator.evict(60)
    engine.side.allocator.departures._by_first.clear()
    forget_gpu(engine)
    assert ask(engine) == Missing(0, 40, Reason.UNKNOWN, by=first.request_id)
    engine.side.allocator.evict(60)
    engine.side.allocator.departures._by_first.clear()
    forget_gpu(engine)
    for number in range(5):
        engine.side.notes.prompts._most_positions = 10
        serve(engine, tokens(9 * BLOCK, number + 3))
    engine.side.notes.check_invariants()
    assert ask(engine, salt="other").reason is Reason.UNSEEN, "who had the same tokens is forgotten, too"


# It left the pool


def test_it_was_evicted_for_another(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=45, chunk=64, eviction_policy="lru")
    first = serve(engine, PROMPT)
    robber = serve(engine, LONG)
    forget_gpu(engine)
    missing = ask(engine)
    assert missing.reason is Reason.EVICTED and missing.whom == robber.request_id
    assert missing.at is not None and note_of(engine, first).ended < missing.at  # type: ignore[operator]
    assert missing.from_token == 5 * BLOCK, "its tail went, as far as was needed"


@pytest.mark.parametrize("unit_slots", [1, 4])
def test_the_pool_was_made_smaller(engines: Engines, unit_slots: int) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=48, chunk=64, resizes=Resizes(48, unit_slots))
    serve(engine, PROMPT)
    resize(engine, 8 / 48)
    come_to_rest(engine)
    assert engine.side.allocator.capacity == 8
    forget_gpu(engine)
    missing = ask(engine, hints={"cpu_offload_store": False})
    assert (missing.reason, missing.whom) == (Reason.SHRUNK, "")
    assert missing.at is not None and 0 < missing.num_tokens < 40, "a part of it is still there"
    assert "as the pool was made smaller" in missing.text(missing.at + 1)


def test_what_came_back_meanwhile_was_not_evicted_then(engines: Engines) -> None:
    """An eviction before the last time that it was computed explains nothing."""
    engine = engines(gpu_blocks=60, cpu_slots=45, chunk=64, eviction_policy="lru")
    serve(engine, PROMPT)
    serve(engine, LONG)
    forget_gpu(engine)
    again = serve(engine, PROMPT, hints={"cpu_offload_store": False})
    forget_gpu(engine)
    missing = ask(engine)
    assert (missing.reason, missing.detail, missing.by) == (Reason.NEVER_STORED, "hint", again.request_id)


def test_its_bytes_were_wrong(engine: VirtualEngine) -> None:
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, Fault.FAIL)
    finish(engine, [*PROMPT[:20], 1], hints={"cpu_offload_store": False})
    come_to_rest(engine)
    forget_gpu(engine)
    engine.side.notes.prompts._by_mark.clear()
    assert ask(engine).reason is Reason.DROPPED


def test_the_pool_was_reset(engine: VirtualEngine) -> None:
    first = serve(engine, PROMPT)
    assert engine.reset()
    missing = ask(engine)
    assert (missing.reason, missing.by) == (Reason.RESET, first.request_id)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["its request is known", "it is not"])
def test_only_the_gpu_had_it(engines: Engines, is_forgotten: bool) -> None:
    """The pool had no copy, so it was not evicted from there."""
    engine = engines(gpu_blocks=60, cpu_slots=8, chunk=64, store="lazy")
    first = serve(engine, PROMPT)
    for number in range(5):
        serve(engine, tokens(10 * BLOCK + 1, 100 + number))
    if is_forgotten:
        engine.side.notes.prompts._by_mark.clear()
    missing = ask(engine)
    assert missing.from_token == 8 * BLOCK, "the pool has its beginning"
    if is_forgotten:
        assert missing.reason is Reason.ONLY_ON_GPU and missing.at is not None
    else:
        assert missing.reason is Reason.NEVER_STORED
        assert (missing.by, missing.detail) == (first.request_id, "not_admitted")


# It was never stored


def never(engine: VirtualEngine, first: Request, prompt: list[int] = PROMPT) -> str:
    """Why, by the next one that asks."""
    forget_gpu(engine)
    missing = ask(engine, prompt)
    assert missing.reason is Reason.NEVER_STORED and missing.by == first.request_id, missing
    assert missing.detail in WHY_UNSTORED
    return missing.detail


@pytest.mark.parametrize(
    ("hints", "position"),
    [({"cpu_offload_store": False}, 0), ({"max_offload_tokens": 20}, 5)],
    ids=["none", "some"],
)
def test_its_client_did_not_want_it(engine: VirtualEngine, hints: dict[str, Any], position: int) -> None:
    first = serve(engine, PROMPT, hints=hints)
    assert never(engine, first) == "hint"
    assert note_of(engine, first).lost == {"hint": position}


def test_sessions_are_not_stored(engine: VirtualEngine) -> None:
    first = engine.add(PROMPT, 1, resumable=True)
    step_until(engine, lambda: first.num_output_tokens > 0)
    engine.abort(first.request_id)
    engine.drain(500)
    assert never(engine, first) == "session"


def test_its_store_failed(engine: VirtualEngine) -> None:
    engine.copiers[0].force(STORE, Fault.FAIL)
    first = serve(engine, PROMPT, hints={"max_offload_tokens": 40})
    assert "outage" in note_of(engine, first).lost
    assert never(engine, first) == "outage"


def test_answers_are_not_stored(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=60, chunk=64, store_decode_blocks=False)
    first = serve(engine, PROMPT, 24)
    assert never(engine, first, [*PROMPT, *first.output_token_ids]) == "answers"


def test_such_answers_do_not_come_back(engines: Engines) -> None:
    engine = engines(
        gpu_blocks=60, cpu_slots=60, chunk=64, store_decode_blocks="auto", answer_patience=1, answer_run=64
    )
    for number in range(4):
        serve(engine, tokens(9, 20 + number), 24)
    first = serve(engine, PROMPT, 24)
    assert never(engine, first, [*PROMPT, *first.output_token_ids]) == "unreturned"


def test_others_are_worth_more(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=40, chunk=64)
    serve(engine, LONG[:160], hints={"cpu_offload_pin_seconds": 1000})
    engine.side.allocator._policy._limit = 1e9  # type: ignore[attr-defined]
    first = serve(engine, PROMPT, hints={"cpu_offload_keep": False})
    assert never(engine, first) == "not_admitted"


def test_it_was_aborted_before_it_was_stored(engine: VirtualEngine) -> None:
    warm(engine, PROMPT)
    hold(engine, LOAD)
    longer = [*PROMPT[:40], *tokens(3 * BLOCK, 5)]
    first = engine.add(longer, 1)
    engine.step()
    engine.abort(first.request_id)
    come_to_rest(engine)
    assert never(engine, first, longer) == "aborted"


@pytest.mark.parametrize("reason", ["gave_way", "overdue", "reset"])
def test_it_waited_in_the_queue_and_was_given_up(reason: str, engine: VirtualEngine) -> None:
    hold(engine, STORE)
    first = finish(engine, LONG)
    stores = engine.side.stores
    assert stores.backlog.num_queued
    stores.holds.give_up(reason)
    forget_gpu_while_held(engine)
    come_to_rest(engine)
    assert never(engine, first, LONG) == reason


def test_what_is_before_it_had_left(engine: VirtualEngine) -> None:
    engine.copiers[0].force(STORE, Fault.FAIL)
    hold(engine, STORE)
    first = finish(engine, LONG)
    come_to_rest(engine)
    assert note_of(engine, first).lost.keys() == {"outage", "cut_off"}
    assert never(engine, first, LONG) == "outage"


def test_another_was_still_at_it(engine: VirtualEngine) -> None:
    """What one that runs has yet to compute is not lost."""
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 16
    first, second = engine.add(LONG, 1), engine.add(LONG, 1)
    step_until(engine, lambda: note_of(engine, second).num_admissions > 0)
    missing = why(engine, second)
    assert (missing.reason, missing.by) == (Reason.COMPUTING, first.request_id)
    come_to_rest(engine)


# It is there, and was not taken


def test_it_was_on_its_way(engine: VirtualEngine) -> None:
    hold(engine, STORE)
    finish(engine, PROMPT)
    forget_gpu_while_held(engine)
    request = finish(engine, PROMPT)
    assert why(engine, request).reason is Reason.ON_ITS_WAY
    release(engine)


def test_the_last_token_is_computed_in_any_case(engine: VirtualEngine) -> None:
    serve(engine, PROMPT[:40], hints={"cpu_offload_store": False})
    assert ask(engine, PROMPT[:40]) == Missing(36, 4, Reason.LAST_TOKEN)
    assert ask(engine, tokens(BLOCK, 9)) == Missing(0, 4, Reason.UNSEEN), "its own blocks are none of before"


def test_its_client_wanted_less(engine: VirtualEngine) -> None:
    warm(engine, PROMPT)
    assert ask(engine, hints={"cpu_offload_load": False}) == Missing(0, 40, Reason.UNWANTED)
    forget_gpu(engine)
    assert ask(engine, hints={"max_load_tokens": 12}) == Missing(12, 28, Reason.LIMIT)
    assert ask(engine, tokens(41, 9), hints={"cpu_offload_load": False}).reason is Reason.UNSEEN
    longer = [*PROMPT[:40], *tokens(9, 5)]
    assert ask(engine, longer, hints={"max_load_tokens": 48}).reason is Reason.ENDS_BEFORE


def test_draft_layers_have_the_end_computed_again(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=60, chunk=64, drafter="eagle", num_drafts=2)
    warm(engine, PROMPT)
    assert ask(engine) == Missing(36, 4, Reason.DRAFTS)


def test_the_gpu_is_too_small_for_a_restore(engines: Engines) -> None:
    """Whatever limit its client gave, that was not the reason."""
    engine = engines(gpu_blocks=12, cpu_slots=60, chunk=64, drafter="ngram", num_drafts=4)
    for _ in range(3):  # stores hold half of the GPU's blocks at most
        warm(engine, PROMPT)
    assert ask(engine, hints={"max_load_tokens": 1000}).reason is Reason.NO_ROOM


def test_restores_were_paused(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=60, chunk=64, step_seconds=0.4)
    warm(engine, tokens(20, 3))
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, Fault.STUCK)
    engine.add(PROMPT, 1)
    step_until(engine, lambda: engine.side.restores.breaker.is_outage, 1000)
    request = engine.add(tokens(20, 3), 1)
    step_until(engine, lambda: note_of(engine, request).num_admissions > 0)
    assert why(engine, request).reason is Reason.PAUSED, note_of(engine, request)
    stranger = engine.add(tokens(20, 11), 1)
    step_until(engine, lambda: note_of(engine, stranger).num_admissions > 0)
    assert why(engine, stranger).reason is Reason.UNSEEN, "a pause costs nothing of what is new"
    come_to_rest(engine)


def test_its_adapter_was_being_loaded_again(engine: VirtualEngine) -> None:
    serve(engine, PROMPT, lora=LORA)
    forget_gpu(engine)
    reloaded = LoRARequest("adapter", 1, "/adapters/1", load_inplace=True)
    assert ask(engine, lora=reloaded).reason is Reason.RELOADING
    assert ask(engine, tokens(41, 9), lora=LORA).reason is Reason.UNSEEN


def test_the_scheduler_took_less(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(engine, PROMPT)
    admitted = engine.side.allocated
    monkeypatch.setattr(engine.side, "allocated", lambda request, num: admitted(request, 0))
    request = engine.add(PROMPT, 1)
    engine.side.offer(request, 0)
    engine.side.allocated(request, 40)
    assert why(engine, request).reason is Reason.TRIMMED


def test_there_is_no_checkpoint(engines: Engines) -> None:
    model = next(name for name, groups in MODELS.items() if len({each.kind for each in groups}) > 1)
    engine = engines(groups=MODELS[model], gpu_blocks=150, cpu_slots=300, chunk=20)
    document = tokens(56)
    serve(engine, [*document, *tokens(13, 1)])
    forget_gpu(engine)
    missing = ask(engine, document[:40])
    assert missing.reason is Reason.NO_CHECKPOINT


def test_it_reads_no_cache(engine: VirtualEngine) -> None:
    warm(engine, PROMPT)
    request = engine.add(PROMPT, 1)
    request.skip_reading_prefix_cache = True
    engine.drain(500)
    assert why(engine, request).reason is Reason.READS_NONE


# It is below


def test_what_a_tier_has_is_cheaper_to_compute() -> None:
    tiered = Tiered()
    prompt = tokens(63 * BLOCK + 2)
    serve(tiered.engine, prompt)
    tiered.evict()
    [flow] = [each for each in tiered.engine.side.flows if hasattr(each, "_pace")]
    flow._pace.is_worth = lambda *arguments: False  # type: ignore[attr-defined]
    missing = ask(tiered.engine, prompt)
    assert (missing.reason, missing.detail) == (Reason.NOT_FETCHED, Unfetched.CHEAPER)
    assert missing.place == FETCH.source
    tiered.engine.close()


def test_a_fetch_fell_short() -> None:
    tiered = Tiered()
    prompt = tokens(63 * BLOCK + 2)
    serve(tiered.engine, prompt)
    tiered.evict()
    tiered.fault(Verb.GET, MediumFault.FAIL)
    missing = ask(tiered.engine, prompt)
    assert missing.reason is Reason.NOT_FETCHED
    assert missing.detail in (Unfetched.FELL_SHORT, Unfetched.PAUSED)
    tiered.engine.close()


# What it costs


def test_notes_are_bounded(engine: VirtualEngine) -> None:
    notes = engine.side.notes
    notes._over = [None] * 3
    for number in range(7):
        serve(engine, tokens(9, number + 2))
    assert len(notes) == 3
    assert [note.request_id for note in notes.of(lambda each: True, 9)] == ["r6", "r5", "r4"]


def test_a_hash_for_each_position_is_kept_of_who_is_over(engines: Engines) -> None:
    """Where vLLM has several for one, as with blocks of several sizes."""
    engine = engines(groups=MODELS["mixed"], gpu_blocks=150, cpu_slots=300, chunk=64)
    request = serve(engine, tokens(80))
    note = note_of(engine, request)
    assert type(note.chain) is list and note.num_charged == len(note.chain) < len(request.block_hashes)
    assert engine.side.notes.prompts.find(note.chain, 2).sharer is note


def test_ids_that_clients_chose_are_cut(engine: VirtualEngine) -> None:
    long = "r" * 5000
    assert len(Note(long, 0.0, 0).request_id) == 320
    engine.side._common.note_of(MemoryRequest(long, PROMPT, [1], BLOCK))
    assert len(engine.side.allocator.departures.whom) == 320


def test_texts_are_whole() -> None:
    assert set(TEXTS) == set(Reason)
    assert set(Reason) > OF_OTHERS
    assert {*_BY_OFFER, *_FOUND} == set(Why)


# Clients are told


def test_a_client_is_told_what_it_asks_for(engine: VirtualEngine) -> None:
    told: list[Any] = []
    notes: Notes = engine.side.notes
    serve(engine, PROMPT, salt="one")
    plain = serve(engine, PROMPT, salt="two")
    told.append(notes.report(plain.request_id))
    asked = serve(engine, PROMPT, salt="three", hints={"cpu_offload_report": True})
    told.append(notes.report(asked.request_id))
    told.append(notes.report(plain.request_id))
    assert told[0] is None and told[2] is None
    assert told[1]["tokens"] == {"gpu": 0, "computed": 41}
    assert told[1]["missing"] == [{"from_token": 0, "tokens": 40, "reason": "unseen"}], "salts stay apart"
    assert why(engine, asked).reason is Reason.SALT


def test_what_is_handed_off_has_no_report_in_its_answer() -> None:
    """Whoever passes that answer on would send it to another engine."""
    pair = Pair()
    told: list[Any] = []
    connector = pair.prefill.scheduler.connector
    finished = connector.request_finished_all_groups
    connector.request_finished_all_groups = lambda *each: told.append(finished(*each)) or told[-1]
    request = serve(pair.prefill, PROMPT, hints={"cpu_offload_report": True})
    assert note_of(pair.prefill, request).hand_off == "40 tokens"
    params = told[0][1]
    assert params["cpu_offload_from_tokens"] == 40 and "cpu_offload_report" not in params
    pair.fleet.close()


def test_a_reference_to_nobody_is_told() -> None:
    pair = Pair()
    peer = "0123456789abcdef"
    stranger = {"cpu_offload_from_v": 1, "cpu_offload_from_peer": peer}
    missing = why(pair.decode, serve(pair.decode, PROMPT, hints=stranger))
    assert (missing.reason, missing.detail) == (Reason.NOT_FETCHED, Unused.UNKNOWN_PEER)
    assert missing.place == f"peer {peer}"
    pair.fleet.close()
