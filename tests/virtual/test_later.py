"""With `"store": "lazy"` blocks are copied before the GPU evicts them, not earlier, and nothing is lost."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request

from offload.messages import STORE
from offload.scheduler import side
from offload.scheduler.engine import Remains
from offload.scheduler.later import _PATIENCE_SECONDS, Later
from offload.scheduler.pool import late_stores
from offload.scheduler.tiers.tier import TierLimits
from offload.testing.copiers.seeded import CopySchedule, Fault
from offload.testing.virtual import MODELS, VirtualEngine
from offload.testing.virtual.resizes import Resizes
from offload.testing.virtual.run import run_seed
from tests.seeds import OTHER_SEEDS
from tests.virtual.driver import (
    LOADING,
    Counts,
    Engines,
    come_to_rest,
    depth_of,
    finish,
    forget_gpu,
    hold,
    publish_events,
    serve,
    step_until,
    tokens,
    watch,
)
from tests.virtual.test_tiers import Tiered
from tests.virtual.test_why import note_of

BLOCK = 4
DOCUMENT = 6
"""Blocks of a document, which a token and an answer follow."""
CHUNK = 2
"""Blocks that a step computes."""
READ = {"is_read": True}


@pytest.fixture(autouse=True, params=["with gaps", "without"])
def is_gapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the pool may lack what the GPU has of a chain. Where tiers read it, it may not."""
    if request.param == "without":
        monkeypatch.setattr(
            side, "late_stores", lambda *args, **named: late_stores(*args, **named | {"is_read": True})
        )
    return bool(request.param == "with gaps")


def document(number: int, num_blocks: int = DOCUMENT) -> list[int]:
    return tokens(BLOCK * num_blocks + 1, first=number)


def lazy(engines: Engines, gpu_blocks: int, **settings: Any) -> VirtualEngine:
    defaults = {"cpu_slots": 400, "chunk": CHUNK * BLOCK, "store": "lazy"}
    return engines(gpu_blocks=gpu_blocks, **defaults | settings)


def later_of(engine: VirtualEngine) -> Later:
    later = engine.side.stores.later
    assert later is not None
    return later


def on_gpu(engine: VirtualEngine, request: Request) -> int:
    """Leading blocks of the request that the GPU's prefix cache has."""
    has = engine.side._engine.has
    hashes = request.block_hashes
    return next((index for index, each in enumerate(hashes) if not has(each)), len(hashes))


def found(engine: VirtualEngine, request: Request) -> int:
    """Leading blocks of the request that are found in either: what follows on the GPU is of no use alone."""
    in_pool, hashes = depth_of(engine, request), request.block_hashes
    return max(in_pool, on_gpu(engine, request)) if in_pool < len(hashes) else in_pool


# When


def test_nothing_is_stored_while_the_gpu_has_room(engines: Engines) -> None:
    engine = lazy(engines, 100)
    counts = Counts(engine)
    for number in range(8):
        serve(engine, document(number))
    assert counts["stored_bytes"] == 0
    come_to_rest(engine)


def test_what_the_gpu_evicts_is_in_the_pool(engines: Engines) -> None:
    """More documents than the GPU has room for: none is computed again, and the latest are not copied."""
    engine = lazy(engines, 60)
    requests = [serve(engine, document(number)) for number in range(24)]
    assert [depth_of(engine, request) for request in requests[:14]] == [DOCUMENT] * 14
    assert [depth_of(engine, request) for request in requests[-5:]] == [0] * 5
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 24
    counts = Counts(engine)
    for number in range(24):
        serve(engine, document(number))
    assert counts["local_tokens"] + counts["restored_tokens"] == 24 * DOCUMENT * BLOCK
    come_to_rest(engine)


def test_what_is_used_again_and_again_is_never_copied(engines: Engines) -> None:
    engine = lazy(engines, 60)
    for number in range(24):
        serve(engine, document(0))
        request = serve(engine, document(number))
    assert on_gpu(engine, request) == DOCUMENT
    hot = serve(engine, document(0))
    assert depth_of(engine, hot) == 0
    come_to_rest(engine)


@pytest.mark.parametrize("delay", [0, 2])
def test_blocks_that_were_copied_are_evicted_in_the_order_of_their_use(engines: Engines, delay: int) -> None:
    """All of them before those that have no copy, also where copies end in another order."""
    engine = lazy(engines, 80, copies=CopySchedule(longest_delay=delay))
    requests = [serve(engine, document(number)) for number in range(12)]
    of_request = {each: number for number, request in enumerate(requests) for each in request.block_hashes}
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    order = [of_request[get_block_hash(block.block_hash)] for block in queue if block.block_hash is not None]
    assert delay or order == sorted(order)
    stored = [depth_of(engine, request) == DOCUMENT for request in requests]
    assert any(stored) and not all(stored)
    are_copied = [stored[number] for number in order]
    assert are_copied == sorted(are_copied, reverse=True)
    come_to_rest(engine)


# Bursts


def found_after_bursts(engines: Engines, chunk: int, **settings: Any) -> tuple[list[int], int]:
    """Blocks found of each document, and documents, where each step takes as many blocks as it can.

    At first the GPU is full of what has no copy.
    """
    gpu_blocks = 10 * (chunk + 8)
    engine = lazy(engines, gpu_blocks, chunk=chunk * BLOCK, **settings)
    requests = [serve(engine, document(number)) for number in range(gpu_blocks // DOCUMENT + 1)]
    for burst in range(3):
        numbers = range(1000 + 100 * burst, 1000 + 100 * burst + engine.settings.max_num_seqs)
        requests += [engine.add(document(number), 1) for number in numbers]
        engine.drain(500)
    come_to_rest(engine)
    return [found(engine, request) for request in requests], len(requests)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_worst_burst_of_prompts_loses_nothing(engines: Engines, chunk: int, delay: int) -> None:
    there, num = found_after_bursts(engines, chunk, copies=CopySchedule(longest_delay=delay))
    assert there == [DOCUMENT] * num


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("chunk", [1, 4])
def test_nor_does_one_where_steps_overlap(engines: Engines, chunk: int, delay: int) -> None:
    copies = CopySchedule(longest_delay=delay)
    there, num = found_after_bursts(engines, chunk, copies=copies, overlapped=True)
    assert there == [DOCUMENT] * num


@pytest.mark.parametrize("delay", [0, 2])
def test_a_large_restore_waits_until_what_it_evicts_is_stored(engines: Engines, delay: int) -> None:
    """It takes half of the GPU at once."""
    large = document(99, 40)
    engine = lazy(engines, 80, copies=CopySchedule(longest_delay=delay), step_seconds=0.01)
    first = serve(engine, large)
    requests = [serve(engine, document(number)) for number in range(13)]
    assert depth_of(engine, first) == 40 and on_gpu(engine, first) == 0
    counts = Counts(engine)
    serve(engine, large)
    assert counts["restored_tokens"] == 40 * BLOCK
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 13
    come_to_rest(engine)


def test_what_gives_way_is_evicted_next(engines: Engines) -> None:
    """It is lost in any case: what waits behind it for its turn is not evicted in its place."""
    engine = lazy(engines, 60)
    for number in range(7):
        serve(engine, document(number))
    hold(engine, STORE)
    for number in range(7, 10):
        finish(engine, document(number))
    for number in range(10, 14):
        engine.add(document(number), 6)
    backlog = engine.side.stores.backlog
    step_until(engine, lambda: backlog.num_queued > 0)
    queued = {block.block_id for block in backlog.queued_blocks()}
    engine.side.stores.holds.give_up("gave_way")
    free = engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    assert {block.block_id for block in free[: len(queued)]} == queued
    come_to_rest(engine)


@pytest.mark.parametrize("is_spelled", [False, True])
def test_images_of_requests_that_are_over_are_not_kept(
    engines: Engines, is_spelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks may stay on the GPU for hours. Tokens are kept where events spell what is stored."""
    if is_spelled:
        publish_events(monkeypatch)
    engine = lazy(engines, gpu_blocks=60)
    request = serve(engine, document(1))
    [left] = later_of(engine)._left.line.values()
    assert left.pending is not None and left.pending.request is not request
    assert isinstance(left.pending.request, Remains) is not is_spelled
    if is_spelled:
        assert left.pending.request.all_token_ids == request.all_token_ids
    image = MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "an image", PlaceholderRange(2, 4))
    request.mm_features = [image]
    remains = engine.side._common.engine.remains(request, is_spelled=True)
    assert remains.mm_features == [replace(image, data=None)] and request.mm_features == [image]


def test_those_who_wait_look_once_at_what_others_have_left(engines: Engines) -> None:
    """However many of them ask in a step in which nobody is given blocks."""
    large = [document(99 - number, 30) for number in range(3)]
    engine = lazy(engines, 80, step_seconds=0.01)
    for prompt in [*large, *map(document, range(13))]:
        serve(engine, prompt)
    hold(engine, STORE)
    requests = [engine.add(prompt, 1) for prompt in large]
    engine.step()
    later = later_of(engine)
    assert later.num_pins == len(large)
    looks, look_back = 0, later._look_back

    def counted() -> None:
        nonlocal looks
        looks += 1
        look_back()

    later._look_back = counted  # type: ignore[method-assign]
    engine.step()
    assert later.num_pins == len(large) and looks == 2  # for the first of them, and at the end of the step
    come_to_rest(engine)
    assert all(request.is_finished() for request in requests)


def test_a_restore_does_not_wait_for_ever(engines: Engines) -> None:
    """What it has evicted is lost then. What the pool has of it stays there meanwhile."""
    large = document(99, 20)
    engine = lazy(engines, 80, step_seconds=0.1)
    serve(engine, large)
    for number in range(13):
        serve(engine, document(number))
    hold(engine, STORE)
    began = engine.clock()
    request = engine.add(large, 1)
    engine.step()
    assert later_of(engine).num_pins == 1
    step_until(engine, lambda: request.status == LOADING or request.is_finished())
    assert _PATIENCE_SECONDS <= engine.clock() - began <= _PATIENCE_SECONDS + 0.5
    assert later_of(engine).num_pins == 0
    come_to_rest(engine)


@pytest.mark.parametrize("ends", ["abort", "reset"])
def test_a_request_that_waits_may_end(engines: Engines, ends: str) -> None:
    large = document(99, 40)
    engine = lazy(engines, 80, step_seconds=0.01)
    serve(engine, large)
    for number in range(13):
        serve(engine, document(number))
    hold(engine, STORE)
    request = engine.add(large, 1)
    engine.step()
    assert later_of(engine).num_pins == 1
    if ends == "abort":
        engine.abort(request.request_id)
    else:
        engine.reset()
    assert later_of(engine).num_pins == 0
    come_to_rest(engine)


# Whose blocks


def test_a_prefix_is_stored_though_the_last_to_use_it_may_not_be(engines: Engines) -> None:
    engine = lazy(engines, 60)
    shared = serve(engine, document(0))
    serve(engine, document(0) + tokens(9, first=5), hints={"max_offload_tokens": 0})
    for number in range(1, 16):
        serve(engine, document(number))
    assert on_gpu(engine, shared) == 0
    assert depth_of(engine, shared) == DOCUMENT
    come_to_rest(engine)


def test_a_prefix_is_stored_though_the_last_to_use_it_stores_less(engines: Engines) -> None:
    engine = lazy(engines, 60)
    shared = serve(engine, document(0))
    serve(engine, document(0) + tokens(9, first=5), hints={"max_offload_tokens": 2 * BLOCK})
    for number in range(1, 16):
        serve(engine, document(number))
    assert on_gpu(engine, shared) == 0
    assert depth_of(engine, shared) == DOCUMENT
    come_to_rest(engine)


def check_a_prefix_in_use(engine: VirtualEngine, hints: dict[str, Any], *, is_shared: bool) -> None:
    """It is not evicted, so it is not in the window. It is stored before it could be, whoever uses it last.

    ``is_shared``: who had it first still runs when the other one comes.
    """
    prefix = tokens(20 * BLOCK, first=77)
    first = engine.add(prefix + document(0), 8)
    step_until(engine, lambda: first.num_computed_tokens > 20 * BLOCK)
    if not is_shared:
        step_until(engine, first.is_finished)
    user = engine.add(prefix + tokens(2, first=3), 90, hints=hints)
    step_until(engine, lambda: first.is_finished() and user.num_output_tokens > 0)
    requests = []
    for number in range(1, 16):
        requests.append(engine.add(document(number), 1))
        step_until(engine, requests[-1].is_finished)
    assert not user.is_finished()
    assert [found(engine, each) for each in requests] == [DOCUMENT] * 15
    step_until(engine, user.is_finished)
    for number in range(20, 40):
        serve(engine, document(number))
    assert on_gpu(engine, first) == 0
    assert depth_of(engine, first) >= 20
    come_to_rest(engine)


@pytest.mark.parametrize("hints", [{}, {"cpu_offload_store": False}], ids=["", "not to be stored"])
def test_a_prefix_that_is_used_again_is_nobodys(engines: Engines, hints: dict[str, Any]) -> None:
    check_a_prefix_in_use(lazy(engines, 100, max_model_len=200), hints, is_shared=False)


@pytest.mark.parametrize("hints", [{}, {"cpu_offload_store": False}], ids=["", "not to be stored"])
def test_a_prefix_that_somebody_still_uses_is_nobodys(engines: Engines, hints: dict[str, Any]) -> None:
    check_a_prefix_in_use(lazy(engines, 100, max_model_len=200), hints, is_shared=True)


@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_what_a_preempted_request_had_is_found(engines: Engines, overlapped: bool) -> None:
    """Two answers outgrow the GPU. The one that gives way restores what it had."""
    engine = lazy(engines, 24, chunk=8 * BLOCK, overlapped=overlapped)
    requests = [engine.add(document(number, 4), 40) for number in range(2)]
    step_until(engine, lambda: any(request.num_preemptions for request in requests))
    (preempted,) = [request for request in requests if request.num_preemptions]
    assert found(engine, preempted) >= (preempted.num_tokens - 1) // BLOCK - 2
    come_to_rest(engine)


@pytest.mark.skipif(OTHER_SEEDS != 0, reason="of this seed")
def test_a_block_that_was_never_computed_is_not_stored_for_its_hash() -> None:
    """Under priority vLLM takes blocks away that this very step has given, and hashed."""
    run_seed(8_000_048, turns=60, kind="lazy")


@pytest.mark.parametrize("times", [1, 4])
def test_prompts_whose_last_block_the_gpu_has_twice_cost_nothing(engines: Engines, times: int) -> None:
    """vLLM computes the last block of a prompt again that it has as a whole, and keeps both."""
    engine = lazy(engines, 400, chunk=8 * BLOCK, cpu_slots=4000)
    requests = []
    for number in range(160):
        requests.append(engine.add(document(number), 1))
        step_until(engine, requests[-1].is_finished)
        for _ in range(times):
            step_until(engine, engine.add(tokens(4 * BLOCK, first=777), 1).is_finished)
    come_to_rest(engine)
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 160


def copied_after_use(engines: Engines) -> tuple[VirtualEngine, list[Request]]:
    """A request has been copied, of which the next one over has used the beginning, and has no more."""
    engine = lazy(engines, 100)
    prompts = [document(98, 10)[:-1] + document(97, 9), document(98, 10), document(99, 20)]
    requests = [finish(engine, prompt) for prompt in prompts]
    hold(engine, STORE)
    later = later_of(engine)
    later._take_turn(next(iter(later._left.line.values())))
    assert later._num_held and len(later._left.line) == 2
    come_to_rest(engine)
    return engine, requests


def test_what_is_copied_is_evicted_before_those_behind_its_user(engines: Engines) -> None:
    engine, requests = copied_after_use(engines)
    blocks = engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    hashes = [get_block_hash(block.block_hash) for block in blocks if block.block_hash is not None]
    first, second, third = (hashes.index(request.block_hashes[-1]) for request in requests)
    assert first < third and second < third


def test_who_comes_after_what_was_copied_is_stored_in_time(engines: Engines) -> None:
    engine, requests = copied_after_use(engines)
    for number in range(16):
        serve(engine, document(number))
    assert [found(engine, request) for request in requests] == [19, 10, 20]
    come_to_rest(engine)


def test_where_requests_may_be_preempted_blocks_are_stored_as_they_fill(engines: Engines) -> None:
    engine = lazy(engines, 40, chunk=8 * BLOCK, max_model_len=160)
    requests = [engine.add(document(number, 4), 60) for number in range(2)]
    step_until(engine, lambda: requests[0].num_output_tokens > 2)
    counts = Counts(engine)
    assert [depth_of(engine, each) for each in requests] == [4, 4]
    step_until(engine, lambda: requests[0].num_output_tokens > 20)
    assert counts["stored_bytes"] > 0
    come_to_rest(engine)
    alone = engine.add(document(5, 4), 60)
    step_until(engine, lambda: alone.num_output_tokens > 20)
    assert depth_of(engine, alone) == 0
    come_to_rest(engine)


# What it must not do


def test_what_the_gpus_cache_has_lost_is_not_stored(engines: Engines) -> None:
    engine = lazy(engines, 60)
    lost = [serve(engine, document(number)) for number in range(7)]
    before = [depth_of(engine, request) for request in lost]
    assert before[-1] == 0
    forget_gpu(engine)
    requests = [serve(engine, document(number)) for number in range(20, 44)]
    assert [depth_of(engine, request) for request in lost] == before
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 24
    come_to_rest(engine)


def test_after_a_reset_nothing_from_before_is_stored(engines: Engines) -> None:
    engine = lazy(engines, 60)
    requests = [serve(engine, document(number)) for number in range(7)]
    engine.reset()
    assert not later_of(engine)._left
    for number in range(20, 44):
        serve(engine, document(number))
    assert [depth_of(engine, request) for request in requests] == [0] * 7
    come_to_rest(engine)


@pytest.mark.parametrize("model", ["window", "columns"])
def test_hybrid_models_store_at_once(engines: Engines, model: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    engine = lazy(engines, 100, groups=MODELS[model])
    assert "its blocks are stored as they fill" in caplog.text
    assert engine.side.stores.later is None
    counts = Counts(engine)
    serve(engine, document(0, 12))
    assert counts["stored_bytes"] > 0
    come_to_rest(engine)


@pytest.mark.parametrize("resizes", [None, Resizes(400, 1, 0.0)], ids=["", "may grow"])
def test_auto_goes_by_the_sizes_at_the_start(
    engines: Engines, is_gapped: bool, resizes: Resizes | None
) -> None:
    """Where others need whole chains in the pool it stores at once."""
    for cpu_slots, is_small in ((60, True), (240, True), (241, False)):
        engine = lazy(engines, 60, cpu_slots=cpu_slots, store="auto", resizes=resizes)
        assert (engine.side.stores.later is not None) is (is_small and is_gapped)


def test_auto_stores_at_once_while_the_pool_has_room(engines: Engines, is_gapped: bool) -> None:
    """Then late: what comes back is on the GPU, and nothing of it is copied."""
    engine = lazy(engines, 60, cpu_slots=90, store="auto")
    assert (engine.side.stores.later is not None) is is_gapped
    requests = [serve(engine, document(number)) for number in range(9)]
    assert [depth_of(engine, each) for each in requests[:8]] == [DOCUMENT] * 8
    for number in range(9, 30):
        serve(engine, document(number))
    last = serve(engine, document(1000))
    if is_gapped:
        assert engine.side.allocator.num_free <= later_of(engine)._window and depth_of(engine, last) == 0
    come_to_rest(engine)


@pytest.mark.parametrize(
    "shares_cores",
    [
        pytest.param(True, id="as told"),
        pytest.param(
            None,
            id="by the platform",
            marks=pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU backend"),
        ),
    ],
)
def test_auto_waits_where_copies_take_cores(
    engines: Engines, is_gapped: bool, shares_cores: bool | None
) -> None:
    """Nothing is copied that the GPU has, and all that it evicts is, as long as the pool has room."""
    engine = lazy(engines, 80, cpu_slots=320, store="auto", shares_cores=shares_cores)
    assert (engine.side.stores.later is not None) is is_gapped
    counts = Counts(engine)
    requests = [serve(engine, document(number)) for number in range(6)]
    assert (counts["stored_bytes"] == 0) is is_gapped
    requests += [serve(engine, document(number)) for number in range(6, 50)]
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 50
    assert not is_gapped or [depth_of(engine, request) for request in requests[-4:]] == [0] * 4
    come_to_rest(engine)


@pytest.mark.parametrize("is_running", [False, True])
def test_nothing_is_stored_after_a_reset_while_the_gpu_has_room(engines: Engines, is_running: bool) -> None:
    """The GPU is empty once more, in another order. What it evicts later is in the pool, as ever.

    So it is when that comes again, and when requests run that lose their blocks by it.
    """
    engine = lazy(engines, 60)
    for number in range(24):
        serve(engine, document(number))
    for times in range(1, 3):
        come_to_rest(engine)
        if is_running:
            engine.add(document(100 * times - 1), 2)
            engine.step()
        assert engine.reset(running=is_running)
        first, counts = 100 * times, Counts(engine)
        requests = [serve(engine, document(number)) for number in range(first, first + 5)]
        assert counts["stored_bytes"] == 0
        requests += [serve(engine, document(number)) for number in range(first + 5, first + 29)]
        assert [found(engine, request) for request in requests] == [DOCUMENT] * 29
        assert [depth_of(engine, request) for request in requests[:19]] == [DOCUMENT] * 19
    come_to_rest(engine)


def test_after_a_reset_that_fails_nothing_is_lost(engines: Engines) -> None:
    """The GPU keeps what it has, the pool does not; what it evicts of those that come then is in the pool."""
    engine = lazy(engines, 60)
    for number in range(24):
        serve(engine, document(number))
    engine.add(document(99), 9)
    engine.step()
    assert not engine.reset()
    requests = [serve(engine, document(number)) for number in range(24, 48)]
    assert [found(engine, request) for request in requests] == [DOCUMENT] * 24
    come_to_rest(engine)


# The pool


def computed_in_turn(engines: Engines, prompts: list[list[int]], store: str) -> int:
    """Tokens computed of all of them, when they have been asked for in turn several times."""
    engine = lazy(engines, 60, cpu_slots=60, eviction_policy="lru", store=store)
    for _ in range(4):
        counts = Counts(engine)
        for prompt in prompts:
            serve(engine, prompt)
    come_to_rest(engine)
    return sum(map(len, prompts)) - int(counts["local_tokens"] + counts["restored_tokens"])


def test_a_full_pool_drops_what_the_gpu_has_first(engines: Engines) -> None:
    """Documents that fit both together, and neither alone: only their last tokens are computed."""
    prompts = [document(number) for number in range(13)]
    assert computed_in_turn(engines, prompts, "eager") == 13 * len(prompts[0])
    assert computed_in_turn(engines, prompts, "lazy") == 13


def test_it_does_not_drop_what_a_store_goes_on_behind(engines: Engines) -> None:
    """All of the documents begin alike."""
    prompts = [tokens(2 * BLOCK, first=99) + document(number) for number in range(13)]
    assert computed_in_turn(engines, prompts, "lazy") == 13


def test_a_tier_gets_what_is_stored_late() -> None:
    """Asked again, as much is computed as where blocks are stored as they fill."""
    computed = {}
    for store in ("eager", "lazy"):
        tiered = Tiered(gpu_blocks=80, chunk=CHUNK * BLOCK, store=store, limits=TierLimits(least_tokens=1))
        prompts = [tokens(16 * BLOCK + 1, first=number) for number in range(30)]
        requests = [serve(tiered.engine, prompt) for prompt in prompts]
        assert found(tiered.engine, requests[0]) == 0
        computed[store] = [tiered.ask(prompt) for prompt in prompts[:14]]
        come_to_rest(tiered.engine)
        tiered.engine.close()
    assert computed["lazy"] == computed["eager"]
    assert computed["lazy"].count(1) > 7


# What the pool may lack


def lacking(engine: VirtualEngine, request: Request) -> list[bool]:
    """Of each block of the request, whether the pool has no copy."""
    hashes = request.block_hashes
    lacks: list[bool] = engine.side.allocator.hollow.lacking(hashes, 0, len(hashes)).tolist()
    return lacks


@pytest.mark.parametrize("num_others", [5, 7])
def test_nothing_is_copied_but_the_end_that_is_evicted_next(
    engines: Engines, is_gapped: bool, num_others: int
) -> None:
    engine = lazy(engines, 100, max_model_len=300)
    large = serve(engine, document(99, 60))
    counts = Counts(engine)
    for number in range(num_others):
        serve(engine, document(number))
    lacks = lacking(engine, large)
    num_copied = lacks.count(False)
    assert lacks == [True] * (60 - num_copied) + [False] * num_copied if is_gapped else num_copied == 60
    num_evicted = 60 - on_gpu(engine, large)
    assert num_evicted <= num_copied and (not is_gapped or num_copied <= 40)
    assert counts["stored_bytes"] == num_copied * engine.side._common.slot_bytes
    computed = watch(engine)
    again = serve(engine, document(99, 60))
    assert computed[again.request_id] == 1
    come_to_rest(engine)


def test_a_tail_is_restored_behind_what_the_gpu_still_has(engines: Engines, is_gapped: bool) -> None:
    engine = lazy(engines, 100, max_model_len=300)
    large = serve(engine, document(99, 60))
    for number in range(8):
        serve(engine, document(number))
    num_there, computed, counts = on_gpu(engine, large), watch(engine), Counts(engine)
    assert 0 < num_there < 60 and depth_of(engine, large) == (0 if is_gapped else 60)
    again = serve(engine, document(99, 60))
    assert computed[again.request_id] == 1 and counts["restored_tokens"] == (60 - num_there) * BLOCK
    come_to_rest(engine)


@pytest.mark.parametrize("num_others", [13, 14])
def test_what_was_restored_is_not_copied_again(engines: Engines, num_others: int) -> None:
    """All of it fits the pool, which it is asked for in turn."""
    engine = lazy(engines, 80)
    for _ in range(2):
        requests = [serve(engine, document(number)) for number in range(num_others)]
    assert [found(engine, each) for each in requests] == [DOCUMENT] * num_others
    counts = Counts(engine)
    for _ in range(2):
        for number in range(num_others):
            serve(engine, document(number))
    assert counts["stored_bytes"] <= 3 * DOCUMENT * engine.side._common.slot_bytes
    come_to_rest(engine)


@pytest.mark.parametrize("num_blocks", [6, 20])
def test_what_the_gpu_loses_without_a_copy_is_not_known(engines: Engines, num_blocks: int) -> None:
    engine = lazy(engines, 80, copies=CopySchedule(fault_rate=1.0, faults=(Fault.FAIL,)))
    lost = serve(engine, document(99, num_blocks))
    for number in range(40):
        serve(engine, document(number))
    assert on_gpu(engine, lost) == 0 == engine.side.allocator.known_depth(lost.block_hashes, num_blocks)
    come_to_rest(engine)


# What a copy has to earn


def test_what_never_comes_back_is_not_copied(engines: Engines, is_gapped: bool) -> None:
    """Others do, in turn, and fill both."""
    engine = lazy(engines, 60, cpu_slots=60)
    for turn in range(80):
        serve(engine, document(turn % 8))
        serve(engine, document(1000 + turn, 2 * DOCUMENT))
    counts = Counts(engine)
    for turn in range(80, 112):
        serve(engine, document(turn % 8))
        last = serve(engine, document(1000 + turn, 2 * DOCUMENT))
    assert counts["local_tokens"] + counts["restored_tokens"] == 32 * DOCUMENT * BLOCK
    if is_gapped:
        assert counts["stored_bytes"] == 0 and depth_of(engine, last) == 0
        assert counts["unstored_blocks_not_admitted"] > 300
    come_to_rest(engine)


@pytest.mark.parametrize("num_heads", [4, 8])
def test_the_end_of_a_prompt_that_never_comes_back_is_not_copied_with_its_beginning(
    engines: Engines, is_gapped: bool, num_heads: int
) -> None:
    """What many begin with is asked for in turn, and is all that fits."""
    engine = lazy(engines, 60, cpu_slots=60)
    for prompt in begun_alike(num_heads, range(110)):
        serve(engine, prompt)
    counts = Counts(engine)
    for prompt in begun_alike(num_heads, range(110, 150)):
        serve(engine, prompt)
    assert counts["local_tokens"] + counts["restored_tokens"] == 40 * DOCUMENT * BLOCK
    assert not is_gapped or counts["stored_bytes"] == 0
    come_to_rest(engine)


def test_whose_end_is_not_copied_is_told_why(engines: Engines, is_gapped: bool) -> None:
    engine = lazy(engines, 60, cpu_slots=60)
    requests = [serve(engine, prompt) for prompt in begun_alike(6, range(150))]
    if is_gapped:
        notes = [note_of(engine, each) for each in requests[110:130]]
        assert [note.lost for note in notes] == [{"not_admitted": DOCUMENT}] * 20
    come_to_rest(engine)


def begun_alike(num_heads: int, numbers: Iterable[int]) -> list[list[int]]:
    """Prompts that begin with one of so many documents, in turn, and end with one of their own."""
    return [[*document(each % num_heads)[:-1], *document(1000 + each, 2 * DOCUMENT)] for each in numbers]


def test_second_copies_keep_slots_that_earn_less_elsewhere(engines: Engines, is_gapped: bool) -> None:
    """All that comes back fits the pool, and not the GPU. It is restored in turn, and not copied again.

    So it is once that has been learned. What never comes back may be copied.
    """
    engine = lazy(engines, 60, cpu_slots=90)
    for number in range(20):
        counts = Counts(engine)
        for each in range(13):
            serve(engine, document(each))
        serve(engine, document(1000 + number, 2 * DOCUMENT))
    assert counts["local_tokens"] + counts["restored_tokens"] == 13 * DOCUMENT * BLOCK
    if is_gapped:
        assert counts["stored_bytes"] <= 2 * DOCUMENT * engine.side._common.slot_bytes
    come_to_rest(engine)


def test_what_was_restored_keeps_its_slots_beside_what_never_comes_back(
    engines: Engines, is_gapped: bool
) -> None:
    engine = lazy(engines, 60, cpu_slots=90)
    for number in range(6):
        for each in range(13):
            last = serve(engine, document(each))
        serve(engine, document(1000 + number, 2 * DOCUMENT))
    assert engine.side.allocator.num_free < DOCUMENT and on_gpu(engine, last) == DOCUMENT
    assert not is_gapped or not any(lacking(engine, last))
    come_to_rest(engine)


def test_who_keeps_slots_hides_nobody_behind(
    engines: Engines, is_gapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked once in a step, a few at a time."""
    engine = lazy(engines, 60, cpu_slots=90)
    for each in (*range(13), *range(13)):
        serve(engine, document(each))
    left, hollow = later_of(engine)._left, engine.side.allocator.hollow
    asked: list[object] = []
    monkeypatch.setattr("offload.scheduler.leavings._ASKED", 2)
    monkeypatch.setattr(hollow, "earns_emptying", lambda claim, _: asked.append(claim))
    num_twice = len(left.has_twice)
    for _ in range(num_twice if is_gapped else 0):
        left.shed(1)
    assert not is_gapped or len(set(asked)) == len(asked) == num_twice > 4
    serve(engine, document(0))
    assert not left.refused
    come_to_rest(engine)


def test_who_is_not_copied_is_told_why(engines: Engines, is_gapped: bool) -> None:
    engine = lazy(engines, 60, cpu_slots=60)
    asked = []
    for turn in range(100):
        serve(engine, document(turn % 8))
        asked.append(serve(engine, document(1000 + turn, 2 * DOCUMENT)))
    if is_gapped:
        notes = [note_of(engine, request) for request in asked[80:95]]
        assert [note.lost for note in notes] == [{"not_admitted": 0}] * 15
    come_to_rest(engine)


# Anything


@pytest.mark.parametrize("seed", range(OTHER_SEEDS, OTHER_SEEDS + 3))
def test_lazy_engines_of_any_kind(seed: int) -> None:
    run_seed(seed, kind="lazy")
