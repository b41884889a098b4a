"""Answers on the real scheduler with `store_decode_blocks` "auto": stored where they come back."""

from collections import Counter
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import Route
from offload.observe.metrics import Metrics
from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import (
    Engines,
    come_to_rest,
    depth_of,
    finish,
    forget_gpu,
    serve,
    step_until,
    tokens,
)

BLOCK = 4
PROMPT, ANSWER = 8, 9
"""Tokens: two blocks, and two more, as the last token of an answer is never computed."""

SIZES = {"gpu_blocks": 60, "cpu_slots": 400, "chunk": 64, "verify_loads": "never", "eviction_policy": "lru"}


@pytest.fixture
def engine(engines: Engines) -> VirtualEngine:
    """One that gives up after four answers that stay away; two that come back are worth that."""
    return engines(store_decode_blocks="auto", answer_patience=4, **SIZES)


def strangers(engine: VirtualEngine, count: int, **options: Any) -> list[Request]:
    """Requests one after the other that have nothing in common, each with an answer of two blocks."""
    first = engine._next_id + 1
    return [serve(engine, tokens(PROMPT, first + number), ANSWER, **options) for number in range(count)]


def go_on(engine: VirtualEngine, request: Request) -> Request:
    """The next turn: prompt, answer, and a message of a block."""
    return serve(engine, [*request.all_token_ids, *tokens(BLOCK, engine._next_id)], ANSWER)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the counters about answers have been raised by; the scheduler takes them with every step."""
    counts: Counter[str] = Counter()
    count = Metrics.count

    def counted(metrics: Metrics, name: str, amount: float = 1, route: Route | None = None) -> None:
        if amount and ("answers" in name or name.startswith("unstored")):
            counts[name] += int(amount)
        count(metrics, name, amount, route)

    monkeypatch.setattr(Metrics, "count", counted)
    return counts


def is_shown(engine: VirtualEngine) -> bool:
    """What the gauge says."""
    engine.side._has_news = True
    engine.side.take_metrics()
    return bool(engine.side.metrics._shown["stores_answers"])


def test_answers_that_stay_away_are_no_longer_stored(engine: VirtualEngine, told: Counter[str]) -> None:
    assert is_shown(engine)
    requests = strangers(engine, 7)
    depths = [depth_of(engine, request) for request in requests]
    assert depths == [4, 4, 4, 4, 2, 2, 2], "the fifth request has four before it"
    assert told == {"answers": 7, "unstored_blocks_unreturned": 6} and not is_shown(engine)


@pytest.mark.parametrize("from_gpu", [False, True])
def test_answers_that_were_not_stored_are_seen_when_they_come_back(
    engine: VirtualEngine, told: Counter[str], from_gpu: bool
) -> None:
    """Whether the GPU has them still, or nobody: what would have been found counts."""
    first, second = strangers(engine, 7)[-2:]
    for request in (first, second):
        if not from_gpu:
            forget_gpu(engine)
        assert depth_of(engine, request) == 2 and not engine.side.stores.answers.is_open
        last = go_on(engine, request)
    assert engine.side.stores.answers.num_returned == 2 and engine.side.stores.answers.is_open
    assert depth_of(engine, last) == (last.num_tokens - 1) // BLOCK, "so the last one is stored"
    assert told["answers"] == 9 and told["returned_answers"] == 2 and is_shown(engine)


def test_answers_that_come_back_from_the_pool_are_stored_on(engine: VirtualEngine) -> None:
    request = strangers(engine, 1)[0]
    for _ in range(4):
        forget_gpu(engine)
        request = go_on(engine, request)
        assert depth_of(engine, request) == (request.num_tokens - 1) // BLOCK
    assert engine.side.stores.answers.num_returned == 4


def test_what_may_not_be_stored_teaches_nothing(engine: VirtualEngine) -> None:
    strangers(engine, 4, hints={"cpu_offload_store": False})
    strangers(engine, 4, hints={"max_offload_tokens": PROMPT})
    assert engine.side.stores.answers.num_ended == 0
    strangers(engine, 1, hints={"max_offload_tokens": PROMPT + BLOCK})
    assert engine.side.stores.answers.num_ended == 1


def test_answers_without_a_full_block_teach_nothing(engine: VirtualEngine) -> None:
    for number in range(9):
        serve(engine, tokens(PROMPT, number + 1), BLOCK)
    serve(engine, tokens(PROMPT, 100), 1, is_pooled=True)
    assert engine.side.stores.answers.num_ended == 0 and engine.side.stores.answers.is_open


def test_an_aborted_answer_counts_as_far_as_it_went(engine: VirtualEngine) -> None:
    """As one does that ends with a stop string."""
    request = engine.add(tokens(PROMPT, 1), 40)
    step_until(engine, lambda: request.num_output_tokens == 2 * BLOCK + 1)
    engine.abort(request.request_id)
    come_to_rest(engine)
    assert engine.side.stores.answers.num_ended == 1
    go_on(engine, request)
    assert engine.side.stores.answers.num_returned == 1


def test_a_request_that_is_preempted_asks_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds its own answer in the pool when it goes on; that is not what this is about."""
    engine = engines(store_decode_blocks="auto", **{**SIZES, "gpu_blocks": 14})
    asked: list[int] = []
    arrived = engine.side.stores.answers.arrived

    def watched(chain: Any, num_prompt: int, num_found: int) -> Any:
        asked.append(num_prompt)
        return arrived(chain, num_prompt, num_found)

    monkeypatch.setattr(engine.side.stores.answers, "arrived", watched)
    for number in range(3):
        engine.add(tokens(PROMPT, number + 1), 30)
    come_to_rest(engine)
    assert engine.counts["preemptions"] and asked == [2, 2, 2]
    assert engine.side.stores.answers.num_returned == 0


def test_a_reset_keeps_what_was_learned(engine: VirtualEngine) -> None:
    strangers(engine, 5)
    assert engine.reset() and not engine.side.stores.answers.is_open
    assert depth_of(engine, strangers(engine, 1)[0]) == 2


def test_one_that_runs_while_it_changes_leaves_nothing_behind(engine: VirtualEngine) -> None:
    """Runs of its answer are stored already when it is found out that such stay away."""
    long = engine.add(tokens(PROMPT, 99), 100)
    step_until(engine, lambda: depth_of(engine, long) >= 5)
    for number in range(5):
        finish(engine, tokens(PROMPT, number + 1), ANSWER)
    come_to_rest(engine)
    assert not engine.side.stores.answers.is_open
    assert 5 <= depth_of(engine, long) <= (long.num_tokens - 1) // BLOCK


@pytest.mark.parametrize("store", [True, False])
def test_what_is_set_stays(engines: Engines, told: Counter[str], store: bool) -> None:
    engine = engines(store_decode_blocks=store, answer_patience=4, **SIZES)
    depths = {depth_of(engine, request) for request in strangers(engine, 7)}
    assert depths == {4 if store else 2}
    assert not told and is_shown(engine) is store
