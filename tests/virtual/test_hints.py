"""Hints of requests on vLLM's real scheduler: who stays in a pool under pressure."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from offload.scheduler.offer import Offer
from offload.testing.virtual import VirtualEngine
from tests.offload.counted import Counted
from tests.virtual.driver import come_to_rest, depth_of, serve, step_until, tokens

POOL = {"gpu_blocks": 32, "cpu_slots": 64, "block_size": 4}
DOCUMENT = 10  # blocks


def ask(engine: VirtualEngine, number: int, hints: dict[str, Any] | None = None) -> Any:
    """About a document of its own."""
    return serve(engine, tokens(4 * DOCUMENT, number), hints=hints)


@pytest.mark.parametrize(
    "hints", [{"cpu_offload_pin_seconds": 1000}, {"cpu_offload_priority": "high"}], ids=str
)
def test_a_document_that_is_to_stay_survives_pressure(
    hints: dict[str, Any], engines: Callable[..., VirtualEngine]
) -> None:
    engine = engines(**POOL)
    kept, other = ask(engine, 0, hints), ask(engine, 1)
    for number in range(2, 10):
        ask(engine, number)
    assert depth_of(engine, kept) == DOCUMENT
    assert depth_of(engine, other) == 0


def test_hints_reach_what_is_in_the_pool_already(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**POOL)
    kept, other = ask(engine, 0), ask(engine, 1)
    ask(engine, 0, {"cpu_offload_pin_seconds": 1000})
    for number in range(2, 10):
        ask(engine, number)
    assert (depth_of(engine, kept), depth_of(engine, other)) == (DOCUMENT, 0)


def test_a_pin_and_a_time_to_live_end_by_the_engines_clock(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**POOL, step_seconds=10.0)
    pinned = ask(engine, 0, {"cpu_offload_pin_seconds": 10})
    recent = [ask(engine, number) for number in range(1, 6)]
    mortal = ask(engine, 6, {"cpu_offload_ttl_seconds": 10})
    ask(engine, 7)
    assert depth_of(engine, pinned) < DOCUMENT
    ask(engine, 8)
    assert depth_of(engine, mortal) == 0
    assert [depth_of(engine, request) for request in recent[1:]] == [DOCUMENT] * 4


def ask_meanwhile(engine: VirtualEngine, hints: dict[str, Any]) -> Any:
    """With these hints, while one without computes the same; it is over later, and others come after it."""
    prompt = tokens(4 * DOCUMENT)
    plain = engine.add(prompt, 4)
    step_until(engine, lambda: plain.num_output_tokens > 1)
    hinted = engine.add(prompt, 4, hints=hints)
    step_until(engine, plain.is_finished)
    assert not hinted.is_finished()
    for number in range(1, 12):
        ask(engine, number)
    return plain


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_hints_reach_what_only_the_gpu_has(store: str, engines: Callable[..., VirtualEngine]) -> None:
    """The other one's hints, none, were told first; and nothing was known when the hints came."""
    engine = engines(**POOL, store=store, eviction_policy="lru")
    plain = ask_meanwhile(engine, {"cpu_offload_priority": "high"})
    assert depth_of(engine, plain) == DOCUMENT


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_pins_reach_what_only_the_gpu_has(store: str, engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**POOL, store=store, eviction_policy="lru")
    ask_meanwhile(engine, {"cpu_offload_pin_seconds": 1000})
    assert engine.side.allocator.resizing.num_pinned == DOCUMENT


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_hints_stay_though_others_have_the_same_on_the_gpu_later(
    store: str, engines: Callable[..., VirtualEngine]
) -> None:
    engine = engines(**POOL, store=store, eviction_policy="lru")
    ask(engine, 0, {"cpu_offload_pin_seconds": 1000})
    kept = ask(engine, 0)
    for number in range(1, 12):
        ask(engine, number)
    assert depth_of(engine, kept) == DOCUMENT == engine.side.allocator.resizing.num_pinned


@pytest.mark.parametrize("policy", ["hazard", "lru"])
@pytest.mark.parametrize("num_again", [0, 2], ids=["", "some of which the GPU has, too"])
@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize(
    "hints", [{"cpu_offload_keep": False}, {"cpu_offload_priority": "low"}], ids=["unwanted", "low"]
)
def test_what_asks_for_less_takes_no_slots_from_others(
    hints: dict[str, Any], store: str, num_again: int, policy: str, engines: Callable[..., VirtualEngine]
) -> None:
    """Nor do its first blocks, where its last ones have been refused."""
    engine = engines(gpu_blocks=64, cpu_slots=60, block_size=4, chunk=8, store=store, eviction_policy=policy)
    others = [ask(engine, number) for number in range(12)]
    lacking = engine.side.allocator.hollow.lacking

    def num_slots() -> int:
        return sum(int((~lacking(each.block_hashes, 0, DOCUMENT)).sum()) for each in others)

    assert engine.side.allocator.num_free == 0
    before = num_slots()
    for number in range(20, 24):
        serve(engine, tokens(4 * 3 * DOCUMENT, number), hints=hints)
        for again in range(4, 4 + num_again):
            ask(engine, again)
        assert num_slots() == before
    come_to_rest(engine)


@pytest.mark.parametrize(
    "hints", [{"cpu_offload_keep": False}, {"cpu_offload_priority": "low"}], ids=["unwanted", "low"]
)
def test_who_does_not_want_to_be_kept_evicts_nobody(
    hints: dict[str, Any], engines: Callable[..., VirtualEngine]
) -> None:
    engine = engines(**POOL)
    first = ask(engine, 0, hints)
    assert depth_of(engine, first) == DOCUMENT, "there was room"
    others = [ask(engine, number) for number in range(1, 7)]
    assert depth_of(engine, first) == 4
    for number in range(7, 10):
        ask(engine, number, hints)
    assert [depth_of(engine, request) for request in others] == [DOCUMENT] * 6


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_hints_reach_what_another_left_on_the_gpu_alone(
    store: str, engines: Callable[..., VirtualEngine]
) -> None:
    """It may not be stored for that one, so nothing is known of it when the request comes."""
    engine = engines(gpu_blocks=64, cpu_slots=64, block_size=4, store=store, eviction_policy="lru")
    prompt = tokens(4 * DOCUMENT + 1)
    serve(engine, prompt, hints={"cpu_offload_store": False})
    kept = serve(engine, prompt, hints={"cpu_offload_pin_seconds": 1000})
    for number in range(1, 20):
        ask(engine, number)
    assert depth_of(engine, kept) == DOCUMENT
    come_to_rest(engine)


def test_pins_together_get_a_share_of_the_pool(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**POOL)
    pinned = [ask(engine, number, {"cpu_offload_pin_seconds": 1000}) for number in range(4)]
    for number in range(4, 14):
        ask(engine, number)
    assert [depth_of(engine, request) for request in pinned] == [DOCUMENT, 0, 0, 0]


def test_a_waiting_request_is_read_once(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(gpu_blocks=24, cpu_slots=64)
    running = engine.add(tokens(60), 30)
    step_until(engine, lambda: running.num_output_tokens > 0)
    asks = watch_asks(engine)
    hints = Counted({"cpu_offload_store": [0] * 1000, "cpu_offload_load": False})
    waiting = engine.add(tokens(70, first=3), 1, hints=hints)
    step_until(engine, lambda: asks[waiting.request_id] == 1)
    num_read = hints.num_lookups
    assert num_read > 0
    step_until(engine, lambda: asks[waiting.request_id] == 8)
    assert hints.num_lookups == num_read, "it was read again while it waited"
    step_until(engine, waiting.is_finished)
    come_to_rest(engine)
    num_of_hand_offs = 4  # read once, when it is admitted
    assert hints.num_lookups == num_read + num_of_hand_offs, "it was read again"


def test_requests_that_are_never_admitted_leave_nothing(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(gpu_blocks=24, cpu_slots=64)
    running = engine.add(tokens(60), 30)
    step_until(engine, lambda: running.num_output_tokens > 0)
    asks = watch_asks(engine)
    waiting = [
        engine.add(tokens(70, first), 1, hints={"cpu_offload_priority": "high"}) for first in range(1, 4)
    ]
    never_asked = engine.add(tokens(70, 4), 1, hints={"cpu_offload_priority": "high"})
    step_until(engine, lambda: asks[waiting[0].request_id] > 0)
    for request in [*waiting, never_asked]:
        engine.abort(request.request_id)
    come_to_rest(engine)  # which looks for what they left


def watch_asks(engine: VirtualEngine) -> Counter[str]:
    """How often each request asks from now on what the pool has for it."""
    asks = Counter[str]()
    offer = engine.side.offer

    def watched(request: Any, num_local: int) -> Offer:
        asks[request.request_id] += 1
        return offer(request, num_local)

    engine.side.offer = watched  # type: ignore[method-assign]
    return asks


@pytest.mark.parametrize(
    "then", [None, {"cpu_offload_priority": "high", "cpu_offload_ttl_seconds": 3}], ids=str
)
def test_use_of_what_outlived_its_time_does_not_take_the_pool(
    then: dict[str, Any] | None, engines: Callable[..., VirtualEngine]
) -> None:
    """High priority with a short time to live fills the pool, in waves; then each wave is asked for again."""
    engine = engines(**POOL, step_seconds=1.0)
    for number in range(6):
        ask(engine, number, {"cpu_offload_priority": "high", "cpu_offload_ttl_seconds": 3})
        for _ in range(6):
            serve(engine, tokens(1, 100))  # too short to be stored; time passes
    for number in range(6):
        ask(engine, number, then)
    for number in range(6, 12):
        assert depth_of(engine, ask(engine, number)) == DOCUMENT, "newcomers find room"
