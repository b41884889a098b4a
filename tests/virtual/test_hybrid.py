"""Hybrid models over our connector: asked again, shared, branched, failed; numbers as in docs/traps.md."""

import numpy as np
import pytest
from vllm.v1.request import Request, RequestStatus

from allocator.bags import Checkpoint
from allocator.node import Node
from offload.messages import LOAD, STORE
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import MODELS, VirtualEngine, run_seed
from offload.testing.virtual.audit import complete_bags
from offload.testing.virtual.cells import NULL_BLOCK
from offload.testing.virtual.drawing import HAS_EXACT_STATES
from offload.testing.virtual.groups import FULL, STATE
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    forget_gpu,
    forget_gpu_while_held,
    hold,
    serve,
    step_until,
    tokens,
    warm,
    watch,
)

HYBRIDS = [model for model, groups in MODELS.items() if any(group.kind != FULL for group in groups)]
STATES = [model for model in HYBRIDS if any(group.kind == STATE for group in MODELS[model])]
WINDOWS = [model for model in HYBRIDS if model not in STATES]
WITH_PREFIX = [model for model in HYBRIDS if any(group.kind == FULL for group in MODELS[model])]

any_hybrid = pytest.mark.parametrize("model", HYBRIDS)

CHUNK = 20
DOCUMENT = tokens(56)
NUM_ASKED = 13
"""Tokens of a question."""


def hybrid(engines: Engines, model: str, **settings: object) -> VirtualEngine:
    return engines(
        **{"groups": MODELS[model], "gpu_blocks": 150, "cpu_slots": 300, "chunk": CHUNK} | settings
    )


def ask(number: int, document: list[int] = DOCUMENT) -> list[int]:
    """The document with another question."""
    return document + tokens(NUM_ASKED, first=number)


def chain_of(engine: VirtualEngine, request: Request) -> list[bytes]:
    return list(engine.side._engine.chain(request))


def resident(engine: VirtualEngine, request: Request) -> int:
    """Leading positions of it that the pool has."""
    return engine.side.allocator.resident_depth(chain_of(engine, request))


def usable(engine: VirtualEngine, chain: list[bytes]) -> int:
    """Its deepest checkpoint."""
    return engine.side.allocator.usable_depth(chain, len(chain))


def nodes(engine: VirtualEngine) -> list[Node]:
    return list(engine.side.allocator._tree.nodes())


def checkpoint_at(engine: VirtualEngine, depth: int) -> Checkpoint:
    """The one there, of the only chain."""
    (found,) = [each for node in nodes(engine) for each in complete_bags(node) if each.depth == depth]
    return found


def load_held(engine: VirtualEngine, prompt: list[int]) -> Request:
    """A request whose load has begun and does not end."""
    hold(engine, LOAD)
    request = engine.add(prompt, 1)
    step_until(engine, lambda: request.status == LOADING)
    return request


@any_hybrid
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_second_ask_computes_a_chunk_beside_its_question_at_most(
    engines: Engines, model: str, num_ranks: int
) -> None:
    """vLLM itself keeps nothing that another question could begin with."""
    engine = hybrid(engines, model, num_ranks=num_ranks)
    warm(engine, ask(1))
    computed = watch(engine)
    second = serve(engine, ask(2))
    assert engine.counts["loads"] == 1
    assert computed[second.request_id] <= NUM_ASKED + max(CHUNK, engine.settings.block_tokens)
    come_to_rest(engine)


@any_hybrid
def test_trap_58_a_sibling_has_it_from_the_gpu(engines: Engines, model: str) -> None:
    """It waits while that is on its way, and loads nothing itself, at once or later."""
    engine = hybrid(engines, model)
    warm(engine, ask(1))
    computed = watch(engine)
    second = load_held(engine, ask(2))
    sibling = engine.add(ask(3), 1)
    for _ in range(5):
        engine.step()
    assert not computed.get(sibling.request_id), "it does not wait"
    come_to_rest(engine)
    later = serve(engine, ask(4))
    assert engine.counts["loads"] == 1
    assert max(computed[request.request_id] for request in (second, sibling, later)) <= NUM_ASKED + CHUNK


@any_hybrid
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves it", "ends with it"])
def test_trap_58_one_that_cannot_go_on_where_a_restore_ends_does_not_wait_for_it(
    engines: Engines, model: str, leaves: bool
) -> None:
    """A request computes its last token at least, so it needs a checkpoint before that."""
    engine = hybrid(engines, model)
    warm(engine, ask(1))
    leader = load_held(engine, ask(2))
    (restore,) = engine.side.restores
    stop = len(restore.chain) * engine.side.block_size
    other = leader.all_token_ids[: 24 if leaves else stop]
    request = engine.add([*other, *tokens(9 if leaves else 0, 5)], 1)
    step_until(engine, lambda: request.status != RequestStatus.WAITING, 5)
    come_to_rest(engine)


@any_hybrid
def test_trap_58_where_the_second_leaves_the_first_the_third_goes_on(engines: Engines, model: str) -> None:
    """In one step without an end of a chunk, and no longer on the GPU."""
    engine = hybrid(engines, model, chunk=128)
    warm(engine, ask(1))
    computed = watch(engine)
    second = serve(engine, ask(2))
    assert computed[second.request_id] == len(ask(2)), "there is a checkpoint that was not to be there"
    forget_gpu(engine)
    third = serve(engine, ask(3))
    assert computed[third.request_id] == NUM_ASKED
    come_to_rest(engine)


@any_hybrid
@pytest.mark.parametrize("what", ["prefix", "bag"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trap_48_a_failed_load_costs_the_whole_request_once(
    engines: Engines, model: str, what: str, num_ranks: int
) -> None:
    """And the pool what was bad. The next request is not offered that."""
    if what == "prefix" and model not in WITH_PREFIX:
        pytest.skip("it has no prefix")
    engine = hybrid(engines, model, num_ranks=num_ranks, first_part=1)
    request = serve(engine, ask(1))
    forget_gpu(engine)
    chain, before = chain_of(engine, request), resident(engine, request)
    depth = usable(engine, chain[: len(DOCUMENT) // engine.settings.block_tokens])
    if what == "prefix":
        bad = depth - 1
        (node,) = [each for each in nodes(engine) if each.start <= bad < each.start + each.resident]
        slot, left = int(node.slots[bad - node.start, 0]), usable(engine, chain[:bad])
    else:
        slot, left = int(checkpoint_at(engine, depth).slots[-1]), before
    engine.ranks[-1].rot(slot, 0)
    computed = watch(engine)
    hold(engine, STORE)
    second = engine.add(ask(2), 1)
    step_until(engine, second.is_finished)
    assert engine.counts["loads"] == 1 and computed[second.request_id] == len(ask(2))
    assert resident(engine, request) == left, "more has gone than what was bad, and what nobody can use"
    last = usable(engine, chain[:depth])
    assert 0 < last < depth
    forget_gpu_while_held(engine)
    third = engine.add(ask(3), 1)
    step_until(engine, third.is_finished)
    assert computed[third.request_id] == len(ask(3)) - last * engine.settings.block_tokens
    assert engine.counts["loads"] == 2
    come_to_rest(engine)


@any_hybrid
def test_trap_48_a_load_that_is_stuck_ends_for_its_request(engines: Engines, model: str) -> None:
    engine = hybrid(engines, model)
    warm(engine, ask(1))
    engine.copiers[0].force(LOAD, Fault.STUCK)
    computed = watch(engine)
    second = serve(engine, ask(2))
    assert engine.counts["load stuck"] == 1 and computed[second.request_id] == len(ask(2))
    come_to_rest(engine)


@any_hybrid
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.FAIL])
def test_an_abort_during_a_load_lets_go_of_everything(engines: Engines, model: str, fault: Fault) -> None:
    engine = hybrid(engines, model, num_ranks=2)
    warm(engine, ask(1))
    for copier in engine.copiers:
        copier.force(LOAD, fault)
    second = load_held(engine, ask(2))
    engine.abort(second.request_id)
    for _ in range(5):
        engine.step()
    come_to_rest(engine)


@any_hybrid
@pytest.mark.parametrize("num_tokens", [40, 44, 48])
def test_trap_49_of_a_full_hit_all_is_computed_from_the_last_checkpoint_before_its_end(
    engines: Engines, model: str, num_tokens: int
) -> None:
    engine = hybrid(engines, model)
    prompt = tokens(num_tokens)
    warm(engine, prompt)
    computed = watch(engine)
    again = serve(engine, prompt)
    size = engine.settings.block_tokens
    due = num_tokens - (num_tokens - 1) // size * size
    if model in STATES and not HAS_EXACT_STATES:  # they may be lacking there
        assert 0 < due <= computed[again.request_id]
    else:
        assert computed[again.request_id] == due
    come_to_rest(engine)


@any_hybrid
def test_trap_50_offers_are_whole_positions(engines: Engines, model: str) -> None:
    """Behind whatever the GPU has, and whatever a request allows."""
    engine = hybrid(engines, model)
    size, offered = engine.settings.block_tokens, []
    offer = engine.side.offer

    def watched(request: Request, num_local: int) -> object:
        found = offer(request, num_local)
        if found.tokens:
            offered.append((num_local, found.tokens, request.num_tokens))
        return found

    engine.side.offer = watched  # type: ignore[method-assign, assignment]
    warm(engine, ask(1))
    for number, hints in enumerate([None, {"max_load_tokens": 29}, {"max_load_tokens": 43}], 2):
        forget_gpu(engine)
        serve(engine, ask(number)[: 50 + number], hints=hints)
    forget_gpu(engine)
    serve(engine, DOCUMENT[:21])
    serve(engine, ask(9))
    assert len(offered) >= 3
    for num_local, num_tokens, num_asked in offered:
        assert num_tokens % size == (num_local + num_tokens) % size == 0
        assert num_local + num_tokens < num_asked
    come_to_rest(engine)


@any_hybrid
def test_trap_51_and_52_what_is_loaded_goes_where_the_table_has_blocks(engines: Engines, model: str) -> None:
    """Each block of the positions that are loaded is filled once, and no hole is."""
    engine = hybrid(engines, model, chunk=8)
    warm(engine, ask(1))
    request = load_held(engine, ask(2))
    (restore,) = engine.side.restores
    depth = len(restore.chain)
    tables = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    stop = depth * engine.settings.block_tokens
    due = [
        block_id
        for table, group in zip(tables, engine.settings.groups, strict=True)
        for block_id in table[: stop // group.block_size]
    ]
    assert NULL_BLOCK in due, "the test is blind: the request has no hole"
    filled = restore.block_ids.tolist()
    assert sorted(filled) == sorted(block_id for block_id in due if block_id != NULL_BLOCK)
    come_to_rest(engine)
    for rank in engine.ranks:
        assert not np.asarray(rank._pages[:, NULL_BLOCK]).any(), "something was written to a hole"


@pytest.mark.parametrize("model", WINDOWS)
def test_trap_53_windows_of_a_request_that_ends_are_stored(engines: Engines, model: str) -> None:
    """A next turn goes on from the end of the answer."""
    engine = hybrid(engines, model, chunk=64)
    first = serve(engine, tokens(30), 30)
    forget_gpu(engine)
    computed = watch(engine)
    turn = [*first.all_token_ids, *tokens(NUM_ASKED, 3)]
    second = serve(engine, turn)
    size = engine.settings.block_tokens
    assert computed[second.request_id] == len(turn) - 59 // size * size, "all but the token sampled last"
    come_to_rest(engine)


@any_hybrid
def test_trap_54_blocks_of_a_window_are_held_until_their_copy_has_ended(engines: Engines, model: str) -> None:
    """The request itself lets go of them a step later."""
    engine = hybrid(engines, model)
    hold(engine, STORE)
    request = engine.add(ask(1), 20)
    step_until(engine, lambda: request.num_output_tokens == 15)
    tables = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    own = {block_id for table in tables for block_id in table}
    held = {block.block_id for job in engine.jobs for block in job.blocks}
    assert held - own, "the test is blind: the request still has all that is copied"
    assert all(engine.side._engine.num_holds(block_id) for block_id in held)
    come_to_rest(engine)


@any_hybrid
@pytest.mark.parametrize("seed", range(3))
def test_random_histories(model: str, seed: int) -> None:
    """Faults, aborts, preemptions and resets, in models with blocks and windows of any length."""
    assert run_seed(seed, turns=60, kind=model).positions_checked


@any_hybrid
def test_trap_91_local_hits_are_those_of_all_groups(engines: Engines, model: str) -> None:
    """Not those of full attention alone: a state at their end could not be offered."""
    engine = hybrid(engines, model)
    assert not engine.scheduler.connector.supports_divergent_local_hybrid_hits
    warm(engine, ask(1))
    local: list[int] = []
    offer = engine.side.offer
    engine.side.offer = lambda request, num_local: local.append(num_local) or offer(request, num_local)  # type: ignore[func-returns-value]
    serve(engine, ask(2))
    serve(engine, ask(3))
    assert local[0] == 0 < local[-1] and not local[-1] % engine.settings.block_tokens
    come_to_rest(engine)


@pytest.mark.parametrize("cap", [20, 31, 47])
@any_hybrid
def test_of_what_a_client_wants_stored_the_end_is_a_checkpoint(
    engines: Engines, model: str, cap: int
) -> None:
    """Though neither its prompt nor a chunk ends there."""
    engine = hybrid(engines, model, chunk=64)
    request = serve(engine, ask(1), hints={"max_offload_tokens": cap})
    assert resident(engine, request) <= usable(engine, chain_of(engine, request))
    assert usable(engine, chain_of(engine, request)) == cap // engine.settings.block_tokens
    come_to_rest(engine)


def test_a_state_is_of_the_place_where_its_step_ends(engines: Engines) -> None:
    """Not of its prompt's end, which the step of a request that was preempted in its answer runs across."""
    engine = hybrid(engines, "mamba2", match_unit=2, chunk=64, store_decode_blocks=False)
    request = engine.add(tokens(24), 20)
    step_until(engine, lambda: request.num_output_tokens > 14)
    chain = chain_of(engine, request)
    assert usable(engine, chain) * engine.settings.block_tokens == request.num_prompt_tokens
    engine.side.allocator.drop_bag(chain, usable(engine, chain))
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    computed = watch(engine)
    engine.step()
    assert request.num_computed_tokens - computed[request.request_id] < 24 < request.num_computed_tokens
    step_until(engine, request.is_finished)
    come_to_rest(engine)  # which compares what was stored with what should be there
