"""A LoRA adapter that is loaded again in place: nothing stored before is served to it or after it."""

from collections import Counter
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from allocator import CpuOffloadingBlockAllocator, hash_chain
from offload.messages import LOAD, STORE
from offload.scheduler.adapters import Adapters, _Roots
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.memory_engine import MemoryEngine
from offload.testing.virtual import MODELS, VirtualEngine
from tests.virtual import driver
from tests.virtual.driver import Engines, depth_of, serve, tokens

BLOCK = 4
BLOCKS = 10
PROMPT = tokens(BLOCK * BLOCKS)

LORA = LoRARequest("adapter", 1, "/adapters/1")
RELOADED = LoRARequest("adapter", 1, "/adapters/1", load_inplace=True)
MOVED = LoRARequest("adapter", 1, "/adapters/2", load_inplace=True)
SAME_NAME = LoRARequest("adapter", 3, "/adapters/1", load_inplace=True)
SAME_ID = LoRARequest("renamed", 1, "/adapters/1", load_inplace=True)
OTHER = LoRARequest("other", 2, "/adapters/other")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(engines: Engines, request: pytest.FixtureRequest) -> VirtualEngine:
    """Its adapters compute other bytes with each reload."""
    engine = engines(cpu_slots=200, gpu_blocks=60, chunk=64, first_part=2, overlapped=request.param)
    engine.audit.explain_failures = True
    return engine


@pytest.mark.parametrize(
    "reloaded",
    [RELOADED, MOVED, SAME_ID, SAME_NAME],
    ids=["same path", "new path", "same id", "same name"],
)
def test_nothing_stored_before_is_served_to_it_or_after_it(
    engine: VirtualEngine, reloaded: LoRARequest
) -> None:
    computed = driver.watch(engine)
    serve(engine, PROMPT, lora=LORA)
    others = [serve(engine, PROMPT), serve(engine, PROMPT, lora=OTHER)]
    driver.forget_gpu(engine)
    again = serve(engine, PROMPT, lora=reloaded)
    assert computed[again.request_id] == len(PROMPT)
    assert depth_of(engine, again) == 0, "its own KV may be of several weights"
    driver.forget_gpu(engine)
    after = serve(engine, PROMPT, lora=LORA)
    assert computed[after.request_id] == len(PROMPT)
    assert depth_of(engine, after) == BLOCKS
    driver.forget_gpu(engine)
    third = serve(engine, PROMPT, lora=LORA)
    assert computed[third.request_id] == 1, "what was stored after it is served"
    assert [depth_of(engine, other) for other in others] == [BLOCKS, BLOCKS], "others keep theirs"


def test_a_store_in_flight_is_not_kept(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Counter[str]()
    monkeypatch.setattr(engine.side.stores.holds, "count_unstored", lambda num, why: lost.update({why: num}))
    driver.hold(engine, STORE)
    old = driver.finish(engine, PROMPT, lora=LORA)
    assert engine.jobs
    in_flight = engine.side.stores.holds.num_held
    driver.finish(engine, tokens(5, 3), lora=RELOADED)
    driver.release(engine)
    driver.come_to_rest(engine)
    assert depth_of(engine, old) == 0 and lost == {"reset": in_flight}
    assert engine.side.allocator.num_free == engine.side.allocator.capacity


def test_what_waits_to_be_stored_is_let_go_of(engine: VirtualEngine) -> None:
    """A request that has ended holds blocks until they are stored; those of another adapter stay."""
    backlog = engine.side.stores.backlog
    driver.hold(engine, STORE)
    engine.add(tokens(72, 2), 1, lora=OTHER)
    old = driver.finish(engine, tokens(60, 1), lora=LORA)
    assert backlog.num_queued, "the test is blind: everything is under way"
    other = driver.finish(engine, PROMPT[:20], lora=OTHER)
    driver.finish(engine, [1], lora=RELOADED)
    assert all(pending.request is other for pending in backlog._queue)
    driver.come_to_rest(engine)
    assert depth_of(engine, old) == 0 and depth_of(engine, other) == 5


def test_what_a_running_request_computed_is_not_stored_after_all(engine: VirtualEngine) -> None:
    """Neither its prompt nor its answer; those of another adapter are."""
    running = engine.add(PROMPT, 40, lora=LORA)
    other = engine.add(PROMPT, 40, lora=OTHER)
    driver.step_until(engine, lambda: running.num_output_tokens > 8)
    driver.finish(engine, tokens(5, 3), lora=RELOADED)
    driver.come_to_rest(engine)
    assert running.is_finished() and depth_of(engine, running) == 0
    assert depth_of(engine, other) == len(other.all_token_ids) // BLOCK - (
        len(other.all_token_ids) % BLOCK == 0
    )


def test_a_restore_in_flight_is_void(engine: VirtualEngine) -> None:
    computed = driver.watch(engine)
    serve(engine, PROMPT, lora=LORA)
    driver.forget_gpu(engine)
    driver.hold(engine, LOAD)
    waiting = engine.add(PROMPT, 1, lora=LORA)
    driver.step_until(engine, lambda: waiting.status == driver.LOADING)
    driver.finish(engine, tokens(5, 3), lora=RELOADED)
    driver.come_to_rest(engine)
    assert computed[waiting.request_id] == len(PROMPT)
    assert depth_of(engine, waiting) == 0


@pytest.mark.parametrize(
    "settings",
    [{"step_landed": 1}, {"copies": CopySchedule(bytes_per_poll=1024)}],
    ids=["one part told a step", "parts land one by one"],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restore_that_was_told_in_part_is_void(
    engines: Engines, num_ranks: int, settings: dict[str, Any]
) -> None:
    """The parts that were told are of old weights, too."""
    engine = engines(cpu_slots=200, gpu_blocks=60, chunk=64, first_part=2, num_ranks=num_ranks, **settings)
    computed = driver.watch(engine)
    serve(engine, PROMPT, lora=LORA)
    driver.forget_gpu(engine)
    driver.hold(engine, LOAD)
    waiting = engine.add(PROMPT, 1, lora=LORA)
    driver.step_until(engine, lambda: waiting.status == driver.LOADING)
    driver.release(engine)
    [restore] = engine.side.restores
    num_parts = restore.parts_left
    driver.step_until(engine, lambda: restore.parts_left < num_parts)
    assert restore.parts_left and restore.num_landed
    engine.add(tokens(5, 3), 1, lora=RELOADED)
    driver.come_to_rest(engine)
    assert computed[waiting.request_id] == len(PROMPT)


def test_a_restore_that_begins_in_the_same_step_is_void(engine: VirtualEngine) -> None:
    computed = driver.watch(engine)
    serve(engine, PROMPT, lora=LORA)
    driver.forget_gpu(engine)
    waiting = engine.add(PROMPT, 1, lora=LORA)
    engine.add(tokens(5, 3), 1, lora=RELOADED)
    driver.come_to_rest(engine)
    assert engine.counts["loads"] == 1
    assert computed[waiting.request_id] == len(PROMPT)


def test_while_it_runs_nothing_is_stored_or_served(engine: VirtualEngine) -> None:
    """Its adapter is loaded again in each of its steps."""
    computed = driver.watch(engine)
    reloading = engine.add(tokens(5, 3), 60, lora=RELOADED)
    driver.step_until(engine, lambda: reloading.num_output_tokens > 0)
    first = driver.finish(engine, PROMPT, lora=LORA)
    for _ in range(5):
        engine.step()
    assert depth_of(engine, first) == 0 and not reloading.is_finished()
    engine.abort(reloading.request_id)
    driver.come_to_rest(engine)
    driver.forget_gpu(engine)
    second = serve(engine, PROMPT, lora=LORA)
    assert computed[second.request_id] == len(PROMPT)
    assert depth_of(engine, second) == BLOCKS


def test_old_kv_that_the_gpu_still_has_is_not_stored_again(engine: VirtualEngine) -> None:
    """vLLM's own cache serves it. Where the pool knows what it serves, what follows is stored."""
    serve(engine, PROMPT, lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    engine.adapters.clear()  # the requests below attend to old KV, as vLLM has it
    longer = PROMPT + tokens(2 * BLOCK, 9)
    mixed = serve(engine, longer, lora=LORA)
    assert depth_of(engine, mixed) == 0
    driver.forget_gpu(engine)
    serve(engine, PROMPT, lora=LORA)
    right = serve(engine, longer, lora=LORA)
    assert depth_of(engine, right) == BLOCKS + 2


def test_old_kv_of_a_block_that_was_computed_anew_is_not_stored_again(engine: VirtualEngine) -> None:
    """A prompt of one block is computed whatever the GPU has, which gives the old one to others after it."""
    block = PROMPT[:BLOCK]
    serve(engine, block, lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    anew = serve(engine, block, lora=LORA)
    engine.adapters.clear()  # the next request attends to old KV, as vLLM has it
    mixed = serve(engine, PROMPT, lora=LORA)
    assert depth_of(engine, anew) == depth_of(engine, mixed) == 0
    driver.forget_gpu(engine)
    right = serve(engine, PROMPT, lora=LORA)
    assert depth_of(engine, right) == BLOCKS


def test_old_kv_behind_what_was_computed_anew_is_not_stored_again(engine: VirtualEngine) -> None:
    """The GPU has lost the first block alone. It gives the old second one to others behind the new first.

    So what was computed anew must not get into the pool: it would say that what others are given is right.
    """
    prompt = PROMPT[: 2 * BLOCK + 1]
    old = serve(engine, prompt, lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    pool = engine.scheduler.kv_cache_manager.block_pool
    found = pool.get_cached_block(old.block_hashes[0], [0])
    assert found is not None and pool._maybe_evict_cached_block(found[0])
    anew = serve(engine, prompt, lora=LORA)
    assert depth_of(engine, anew) == 0
    driver.forget_gpu(engine)
    right = serve(engine, PROMPT, lora=LORA)
    assert depth_of(engine, right) == BLOCKS


def test_old_kv_that_only_the_gpu_has_is_not_stored_late(engines: Engines) -> None:
    """That a request which runs has it, too, does not say that it is right."""
    engine = engines(cpu_slots=200, gpu_blocks=60, chunk=64, store="lazy")
    serve(engine, PROMPT, lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    misread: set[str] = set()  # as vLLM has it
    engine.runner._complain = lambda rank, found, index: misread.add(found.work.req_id)  # type: ignore
    first = engine.add(PROMPT + tokens(BLOCK, 9), 12, lora=LORA)
    driver.step_until(engine, lambda: first.num_output_tokens > 0)
    second = serve(engine, PROMPT + tokens(BLOCK, 11), 12, lora=LORA)
    assert misread == {first.request_id, second.request_id}
    for number in range(10):
        serve(engine, tokens(BLOCK * BLOCKS + 1, 20 + number))
    assert depth_of(engine, first) == depth_of(engine, second) == 0
    third = serve(engine, PROMPT, lora=LORA)
    assert third.request_id not in misread


def test_what_is_stored_late_is_of_its_adapter(engines: Engines) -> None:
    """It is over by then."""
    engine = engines(cpu_slots=200, gpu_blocks=60, chunk=64, store="lazy")
    computed = driver.watch(engine)
    request = serve(engine, PROMPT, lora=LORA)
    for number in range(10):  # the GPU evicts it
        serve(engine, tokens(BLOCK * BLOCKS + 1, 20 + number))
    assert depth_of(engine, request) == BLOCKS
    again = serve(engine, PROMPT, lora=LORA)
    assert computed[again.request_id] == 1
    driver.forget_gpu(engine)
    new = serve(engine, PROMPT, lora=RELOADED)
    assert computed[new.request_id] == len(PROMPT) and depth_of(engine, request) == 0


@pytest.mark.parametrize("model", ["window", "mamba", "mixed"])
def test_old_kv_beside_new_kv_of_the_same_hashes_is_not_stored_again(engines: Engines, model: str) -> None:
    """The GPU has old full attention where its hits end before: without windows or states."""
    engine = engines(groups=MODELS[model], gpu_blocks=200, cpu_slots=400, chunk=64)
    document, size = tokens(56), engine.settings.block_tokens
    serve(engine, document + tokens(13, 1), lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    misread: set[str] = set()  # as vLLM has it
    engine.runner._complain = lambda rank, found, index: misread.add(found.work.req_id)  # type: ignore
    computed = driver.watch(engine)
    second, third, fourth = [serve(engine, document + tokens(16, ask), lora=LORA) for ask in (2, 3, 4)]
    assert computed[second.request_id] == second.num_prompt_tokens
    assert second.request_id not in misread and third.request_id in misread
    allocator, chain_of = engine.side.allocator, engine.side._engine.chain
    assert allocator.resident_depth(chain_of(second)) == second.num_prompt_tokens // size
    for request in (third, fourth):
        assert allocator.resident_depth(chain_of(request)) == len(document) // size
    driver.forget_gpu(engine)
    again = serve(engine, document + tokens(16, 3), lora=LORA)
    assert again.request_id not in misread
    assert computed[again.request_id] < again.num_prompt_tokens, "what was stored of the second is served"
    assert allocator.resident_depth(chain_of(again)) == again.num_prompt_tokens // size


def test_nor_is_it_where_a_request_looked_past_what_the_gpu_has(engine: VirtualEngine) -> None:
    """Log-probabilities of a prompt need every token computed: new blocks come beside old ones."""
    serve(engine, PROMPT, lora=LORA)
    serve(engine, tokens(5, 3), lora=RELOADED)
    engine.runner._complain = lambda rank, found, index: None  # type: ignore[method-assign]
    second = engine.add(PROMPT, 1, lora=LORA)
    second.skip_reading_prefix_cache = True
    driver.step_until(engine, second.is_finished)
    third = serve(engine, PROMPT + tokens(2 * BLOCK, 9), lora=LORA)
    assert depth_of(engine, second) == depth_of(engine, third) == 0
    driver.come_to_rest(engine)


def test_it_is_not_stored_once_a_preemption_has_put_old_blocks_before_it(engine: VirtualEngine) -> None:
    """When it is admitted again, the GPU's own cache may supply blocks that the pool does not know."""
    serve(engine, tokens(5, 3), lora=RELOADED)
    driver.hold(engine, STORE)
    request = engine.add(PROMPT, 9, lora=LORA)
    engine.step()
    side = engine.side
    assert side.stores.backlog.get(request.request_id) is not None
    side.offer(request, BLOCKS * BLOCK)
    side.allocated(request, 0)
    assert side.stores.backlog.get(request.request_id) is not None, "the pool knows all of these"
    side.allocator.reset()
    side.offer(request, BLOCKS * BLOCK)
    side.allocated(request, 0)
    assert side.stores.backlog.get(request.request_id) is None
    driver.come_to_rest(engine)


@pytest.mark.parametrize("model", ["window", "mamba"])
def test_what_was_stored_before_that_and_serves_no_hit_leaves_the_pool(engines: Engines, model: str) -> None:
    """As when it ends. It comes to rest only if nothing waits for a checkpoint that will not come."""
    engine = engines(groups=MODELS[model], gpu_blocks=60, cpu_slots=300, chunk=8)
    serve(engine, tokens(5, 3), lora=RELOADED)
    engine.runner._complain = lambda rank, found, index: None  # type: ignore[method-assign]
    driver.hold(engine, STORE)
    request = engine.add(tokens(100, 1), 9, lora=LORA)
    nodes, backlog = engine.side.allocator._tree.nodes, engine.side.stores.backlog
    driver.step_until(engine, lambda: any(node.bags is not None and node.bags.is_open for node in nodes()))
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    assert backlog.get(request.request_id) is not None
    engine.step()
    assert backlog.get(request.request_id) is None and not request.is_finished()
    driver.come_to_rest(engine)


def test_without_the_flag_a_new_path_is_another_adapter(engine: VirtualEngine) -> None:
    computed = driver.watch(engine)
    serve(engine, PROMPT, lora=LORA)
    driver.forget_gpu(engine)
    moved = serve(engine, PROMPT, lora=LoRARequest("adapter", 1, "/adapters/2"))
    assert computed[moved.request_id] == len(PROMPT)


@pytest.mark.parametrize("num_adapters", [1, 1000])
def test_the_roots_that_are_remembered_are_bounded(num_adapters: int) -> None:
    """By what the pool holds, however many adapters there have been."""

    class Stored:
        def __init__(self, number: int, lora: LoRARequest) -> None:
            self.request_id = str(number)
            self.block_hashes = hash_chain([number], 1)
            self.lora_request = lora

    def adapter(number: int, load_inplace: bool = False) -> LoRARequest:
        return LoRARequest(f"{number}", number + 1, f"/adapters/{number}", load_inplace=load_inplace)

    pool = CpuOffloadingBlockAllocator(16)
    adapters = Adapters(pool, MemoryEngine(1, 1))
    for number in range(5000):
        request = Stored(number, adapter(number % num_adapters))
        plan = pool.plan_store(request.block_hashes, 1)
        assert plan is not None
        pool.commit(plan)
        adapters.stored(request, request.block_hashes)  # type: ignore[arg-type]
        assert len(adapters._roots._line) <= 2 * 2 * 16 + 4
        if number % 100 == 0:
            adapters.check_invariants()
    for number in range(num_adapters):
        assert adapters.admit(Stored(number, adapter(number, load_inplace=True)))  # type: ignore[arg-type]
        adapters.check_invariants()
    assert pool.num_free == 16


def test_what_a_reload_takes_leaves_those_of_others_alone() -> None:
    """It costs no look at them, and places in line of what was taken do not pile up."""
    pool = CpuOffloadingBlockAllocator(64)
    roots = _Roots(pool)

    def add(name: str, number: int) -> None:
        chain = hash_chain([number], 1)
        plan = pool.plan_store(chain, 1)
        if plan is not None:
            pool.commit(plan)
        roots.add(name, chain[0])

    for number in range(40):
        add("other", number)
    before = list(roots._line)
    assert roots.take(["mine", 7]) == set() and list(roots._line) == before
    for _ in range(1000):
        add("mine", 50)
        assert roots.take(["mine"]) == set(hash_chain([50], 1))
        roots.check_invariants()
    assert len(roots._line) <= 2 * 41 and len(roots._by_name["other"]) == 40
