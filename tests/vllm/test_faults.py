"""Faults below the engine, one at a time on the real scheduler: each costs a miss, and nothing else."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from allocator.slot_pool import SlotState
from offload.breaker import FAILURES_TO_OPEN
from offload.copiers import Fault
from offload.transfer import DEADLINE_SECONDS
from offload.vllm.virtual import VirtualEngine
from tests.vllm.driver import (
    LOAD,
    LOADING,
    STORE,
    come_to_rest,
    depth_of,
    forget_gpu,
    hold,
    release,
    serve,
    step_until,
    table_of,
    tokens,
    warm,
    watch,
)

Engines = Callable[..., VirtualEngine]

BLOCKS = 10
PROMPT = tokens(4 * BLOCKS)
DEADLINE_STEPS = int(DEADLINE_SECONDS)

ENDING = [Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]
LATE = [Fault.STUCK, Fault.DIE]

ranks = pytest.mark.parametrize("num_ranks", [1, 2])
overlapped = pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])


def counted(engine: VirtualEngine) -> Counter[str]:
    """What the connector's counters count from now on."""
    totals = Counter[str]()
    count = engine.side.metrics.count

    def count_too(name: str, amount: float = 1) -> None:
        totals[name] += int(amount)
        count(name, amount)

    engine.side.metrics.count = count_too  # type: ignore[method-assign]
    return totals


def free_gpu_blocks(engine: VirtualEngine) -> int:
    blocks: int = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return blocks


@ranks
@pytest.mark.parametrize("fault", ENDING)
def test_a_failed_store_leaves_the_pool_and_bothers_no_request(
    engines: Engines, fault: Fault, num_ranks: int
) -> None:
    """The second chunk's store fails: what follows it goes too, what comes before it stays."""
    engine = engines(num_ranks=num_ranks, chunk=16)
    hold(engine, STORE)
    engine.copiers[-1].force(STORE, Fault.NONE, fault)
    request = engine.add(PROMPT, 3)
    step_until(engine, request.is_finished)
    assert request.num_output_tokens == 3
    come_to_rest(engine)
    assert depth_of(engine, request) == 4
    forget_gpu(engine)
    computed = watch(engine)
    again = serve(engine, PROMPT, 3)
    assert list(again.output_token_ids) == list(request.output_token_ids)
    assert computed[again.request_id] == 4 * BLOCKS - 16 + 2


@overlapped
@ranks
@pytest.mark.parametrize("fault", [*ENDING, Fault.WRONG_BYTES])
def test_a_failed_load_is_recomputed_from_its_first_bad_block_and_nobody_else_notices(
    engines: Engines, fault: Fault, num_ranks: int, overlapped: bool
) -> None:
    """One request decodes, one is restored beside, one is restored in vain: in parts of 2, 2, 4 and 2."""
    engine = engines(gpu_blocks=80, num_ranks=num_ranks, overlapped=overlapped, first_part=2)
    others = [tokens(24, first) for first in (1, 2)]
    for prompt in (*others, PROMPT):
        serve(engine, prompt)
    forget_gpu(engine)
    decoding = engine.add(others[0], 30)
    step_until(engine, lambda: decoding.num_output_tokens > 2)
    totals, computed = counted(engine), watch(engine)
    engine.copiers[-1].force(LOAD, Fault.NONE, Fault.NONE, fault)
    victim, beside = engine.add(PROMPT, 2), engine.add(others[1], 2)
    step_until(engine, lambda: victim.is_finished() and beside.is_finished())
    kept = 4 + {Fault.STOP_HALFWAY: 2, Fault.END_SHORT: 2, Fault.WRONG_BYTES: 2}.get(fault, 0)
    assert computed[victim.request_id] == 4 * BLOCKS - 4 * kept + 1
    assert computed[beside.request_id] == 2, "its first token and the next, from restored KV"
    assert totals["restored_tokens"] == 4 * (kept + 6)
    assert totals["failed_jobs"] == 1
    come_to_rest(engine)
    assert depth_of(engine, victim) == BLOCKS, "what was computed again should be stored again"
    assert decoding.num_output_tokens == 30


@ranks
@pytest.mark.parametrize("fault", LATE)
def test_a_stuck_load_is_computed_instead_and_its_memory_left_alone(
    engines: Engines, fault: Fault, num_ranks: int
) -> None:
    engine = engines(gpu_blocks=60, num_ranks=num_ranks)
    warm(engine, PROMPT)
    room = free_gpu_blocks(engine)
    engine.copiers[-1].force(LOAD, fault)
    victim = engine.add(PROMPT, 3)
    step_until(engine, lambda: victim.status == LOADING)
    doomed = table_of(engine, victim)
    slots = engine.side.allocator.lookup(victim.block_hashes).slots[:, 0]
    computed = watch(engine)
    step_until(engine, victim.is_finished, DEADLINE_STEPS + 20)
    assert computed[victim.request_id] == 4 * BLOCKS + 2
    assert free_gpu_blocks(engine) == room - BLOCKS, "blocks that are still written were given back"
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in doomed)
    in_use = engine.side.allocator._pool.select(slots, SlotState.LEAVING)
    assert in_use.tolist() == slots.tolist(), "slots that are still read were given back"
    assert engine.side.ledger.num_given_up == 1
    come_to_rest(engine)
    assert free_gpu_blocks(engine) == room and engine.side.allocator.num_leaving == 0
    assert engine.side.ledger.num_given_up == 0
    assert list(serve(engine, PROMPT, 3).output_token_ids) == list(victim.output_token_ids)


@ranks
def test_a_stuck_store_keeps_its_slots_and_gives_the_gpu_its_blocks_back(
    engines: Engines, num_ranks: int
) -> None:
    engine = engines(num_ranks=num_ranks, cpu_slots=2 * BLOCKS + 3, chunk=48)
    room = free_gpu_blocks(engine)
    engine.copiers[-1].force(STORE, Fault.STUCK)
    request = engine.add(PROMPT, 1)
    step_until(engine, request.is_finished)
    step_until(engine, engine.is_idle, DEADLINE_STEPS + 20)
    allocator = engine.side.allocator
    assert (allocator.num_filling, free_gpu_blocks(engine)) == (BLOCKS, room)
    forget_gpu(engine)
    serve_one(engine, PROMPT)
    step_until(engine, engine.is_idle)
    assert (allocator.num_filling, allocator.num_resident) == (BLOCKS, BLOCKS), "stored beside it"
    forget_gpu(engine)
    computed = watch(engine)
    again = serve_one(engine, PROMPT)
    assert computed[again.request_id] == 1
    come_to_rest(engine)
    assert (allocator.num_filling, allocator.num_resident) == (0, BLOCKS)


def serve_one(engine: VirtualEngine, prompt: list[int]) -> Request:
    """As ``serve``, with what is stuck left stuck."""
    request = engine.add(prompt, 1)
    step_until(engine, request.is_finished)
    return request


def test_a_late_load_of_old_weights_harms_nobody(engines: Engines) -> None:
    """The load is stuck, the weights change, and then the old KV comes up after all."""
    engine = engines(gpu_blocks=60)
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, Fault.STUCK)
    victim = engine.add(PROMPT, 3)
    step_until(engine, lambda: victim.status == LOADING)
    engine.reset()
    step_until(engine, victim.is_finished, DEADLINE_STEPS + 20)
    for copier in engine.copiers:
        copier.let_go()
    for first in range(8):
        serve(engine, tokens(60, first))
    come_to_rest(engine)


@ranks
@pytest.mark.parametrize("of_blocks", [False, True], ids=["slots", "blocks"])
def test_a_slot_that_rots_is_found_and_dropped(engines: Engines, num_ranks: int, of_blocks: bool) -> None:
    engine = engines(num_ranks=num_ranks, seals_of_blocks=of_blocks)
    warm(engine, PROMPT)
    slots = engine.side.allocator.lookup(request_hashes(engine, PROMPT)).slots[:, 0].tolist()
    engine.ranks[-1].rot(slots[6], offset=17)
    totals, computed = counted(engine), watch(engine)
    victim = serve(engine, PROMPT)
    assert computed[victim.request_id] == 4 * (BLOCKS - 6)
    assert totals["restored_tokens"] == 4 * 6
    forget_gpu(engine)
    again = serve(engine, PROMPT)
    assert computed[again.request_id] == 1, "the slot was not filled anew"


def request_hashes(engine: VirtualEngine, prompt: list[int]) -> Any:
    """Prefix hashes of a prompt, as the engine has them."""
    request = engine.add(prompt, 1)
    engine.abort(request.request_id)
    return request.block_hashes


@pytest.mark.parametrize("verify", ["never", "always"])
def test_the_engine_sees_rot_that_is_not_verified(engines: Engines, verify: str) -> None:
    """Or the test before this one would prove nothing."""
    engine = engines(verify_loads=verify)
    warm(engine, PROMPT)
    slots = engine.side.allocator.lookup(request_hashes(engine, PROMPT)).slots[:, 0].tolist()
    engine.ranks[0].rot(slots[6], offset=17)
    if verify == "always":
        serve(engine, PROMPT)
        return
    with pytest.raises(AssertionError, match="attends to wrong"):
        serve(engine, PROMPT)


def test_offload_pauses_while_copies_fail_and_goes_on_when_they_do_not(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(step_seconds=0.01)
    warm(engine, PROMPT)
    logging.disable(logging.NOTSET)
    engine.copiers[0].force(STORE, *[Fault.FAIL] * 1000)
    first = 1
    while not engine.side.breaker.is_open:
        serve(engine, tokens(8, first))
        first += 1
    assert engine.counts["store fail"] == FAILURES_TO_OPEN
    engine.copiers[0].relent()
    computed = watch(engine)
    paused, served = serve(engine, PROMPT), serve(engine, tokens(8, first + 1))
    assert computed[paused.request_id] == 4 * BLOCKS, "restored during the pause"
    assert depth_of(engine, served) == 0, "stored during the pause"
    forget_gpu(engine)
    step_until(engine, lambda: not engine.side.breaker.is_open or serve(engine, tokens(3)) is None)
    restored = serve(engine, PROMPT)
    assert computed[restored.request_id] == 1
    assert not engine.side.breaker.is_outage
    mine = [record.message for record in caplog.records if record.name == "offload.breaker"]
    assert len(mine) == 2 and "pauses" in mine[0] and "goes on" in mine[1]


def test_a_dead_copier_opens_the_breaker_and_stops_nobody(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=200)
    warm(engine, PROMPT)
    engine.copiers[0].force(STORE, Fault.DIE)
    served = [serve_one(engine, tokens(24, first)) for first in range(1, 30)]
    assert all(request.is_finished() for request in served)
    assert engine.side.breaker.is_outage
    come_to_rest(engine)
    release(engine)
    last = engine.num_steps + 200
    while engine.side.breaker.is_outage and engine.num_steps < last:
        serve(engine, tokens(24, engine.num_steps))
    assert not engine.side.breaker.is_outage
