"""Faults below the engine, one at a time on the real scheduler: each costs a miss, and nothing else."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import LOAD, STORE
from offload.scheduler.breaker import FAILURES_TO_OPEN
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.inline import RefusingExecutor
from offload.testing.virtual import VirtualEngine
from offload.worker.transfer import DEADLINE_SECONDS
from tests.virtual.driver import (
    LOADING,
    Counts,
    Engines,
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

BLOCKS = 10
PROMPT = tokens(4 * BLOCKS)
DEADLINE_STEPS = int(DEADLINE_SECONDS)

ENDING = [Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]
LATE = [Fault.STUCK, Fault.DIE]

ranks = pytest.mark.parametrize("num_ranks", [1, 2])
overlapped = pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])


def free_gpu_blocks(engine: VirtualEngine) -> int:
    blocks: int = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return blocks


@ranks
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT])
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
    totals, computed = Counts(engine), watch(engine)
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
    in_use = engine.side.allocator._pool.leaving(slots)
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
    for _ in range(2):  # on trial a single block, then the others
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
    totals, computed = Counts(engine), watch(engine)
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
    breaker = engine.side.stores.breaker
    first = 1
    while not breaker.is_outage:
        serve(engine, tokens(8, first))
        first += 1
    assert engine.counts["store fail"] == FAILURES_TO_OPEN
    engine.copiers[0].relent()
    during = serve(engine, tokens(8, first))
    assert depth_of(engine, during) == 0, "stored during the pause"
    while not breaker.allows:
        serve(engine, tokens(3))
    trial = serve(engine, tokens(8, first + 1))
    assert depth_of(engine, trial) == 1 and not breaker.is_outage
    after = serve(engine, tokens(8, first + 2))
    assert depth_of(engine, after) == 2
    mine = [record.message for record in caplog.records if record.name == "offload.scheduler.breaker"]
    assert len(mine) == 2 and "stores pause" in mine[0] and "stores go on" in mine[1]


def test_failing_restores_pause_offload_though_stores_succeed(engines: Engines) -> None:
    engine = engines(gpu_blocks=40, step_seconds=0.01)
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, *[Fault.FAIL] * 1000)
    for _ in range(FAILURES_TO_OPEN):
        assert not engine.side.restores.breaker.is_outage
        serve(engine, PROMPT)
        forget_gpu(engine)
    assert engine.side.restores.breaker.is_outage
    num_loads = engine.counts["loads"]
    computed = watch(engine)
    missed = serve(engine, PROMPT)
    assert engine.counts["loads"] == num_loads and computed[missed.request_id] == 4 * BLOCKS


def test_a_restore_of_many_parts_is_one_failure(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, first_part=1, step_seconds=0.01)
    warm(engine, tokens(160))
    engine.copiers[0].force(LOAD, *[Fault.FAIL] * 20)
    serve(engine, tokens(160))
    assert engine.counts["load fail"] == 7
    assert not engine.side.restores.breaker.is_outage


def test_after_a_pause_a_single_restore_is_tried(engines: Engines) -> None:
    engine = engines(gpu_blocks=400, cpu_slots=800, chunk=400, step_seconds=0.01, max_num_seqs=32)
    prompts = [tokens(16, first) for first in range(1, 17)]
    for prompt in prompts:
        serve(engine, prompt)
    forget_gpu(engine)
    engine.side.restores.breaker.failed("an earlier one", hangs=True)
    while not engine.side.restores.breaker.allows:
        serve(engine, tokens(3))
    hold(engine, LOAD)
    for prompt in prompts:
        engine.add(prompt, 1)
    for _ in range(3):
        engine.step()
    assert engine.counts["loads"] == 1
    come_to_rest(engine)
    assert not engine.side.restores.breaker.is_outage


def test_loads_that_hang_one_after_another_leave_room_to_run_in(engines: Engines) -> None:
    """However many are tried, half of the GPU's blocks stay usable."""
    engine = engines(gpu_blocks=64, cpu_slots=800, chunk=400, max_num_seqs=16)
    prompts = [tokens(40, first) for first in range(1, 9)]
    for prompt in prompts:
        serve(engine, prompt)
    forget_gpu(engine)
    engine.copiers[0].force(LOAD, *[Fault.STUCK] * 1000)
    for prompt in prompts:
        request = engine.add(prompt, 1)
        step_until(engine, request.is_finished, 500)
    assert engine.side.restores.num_stuck == 30
    late = engine.add(tokens(100, 50), 1)
    step_until(engine, late.is_finished)
    come_to_rest(engine)
    assert engine.side.restores.num_stuck == 0


def test_stores_on_trial_cost_a_slot_each(engines: Engines) -> None:
    engine = engines(cpu_slots=40, chunk=48)
    engine.copiers[0].force(STORE, *[Fault.STUCK] * 1000)
    for first in range(1, 6):
        request = engine.add(tokens(40, first), 1)
        step_until(engine, engine.is_idle, 500)
        assert request.is_finished()
    assert BLOCKS < engine.side.allocator.num_filling < 2 * BLOCKS
    come_to_rest(engine)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_after_a_stuck_load_a_request_is_not_offered_another(engines: Engines, num_ranks: int) -> None:
    """Also when another part failed or landed meanwhile: it would wait for room beside itself."""
    engine = engines(gpu_blocks=16, first_part=2, chunk=48, num_ranks=num_ranks)
    warm(engine, PROMPT)
    if num_ranks == 1:
        engine.copiers[0].force(LOAD, Fault.NONE, Fault.FAIL, Fault.STUCK)
    else:
        engine.copiers[0].force(LOAD, Fault.NONE, Fault.NONE, Fault.STUCK)
        engine.copiers[1].force(LOAD, Fault.NONE, Fault.REFUSE)
    victim = engine.add(PROMPT, 1)
    step_until(engine, victim.is_finished, 500)
    assert engine.counts["loads"] == 1
    come_to_rest(engine)


@pytest.mark.parametrize("fault", ENDING)
def test_what_a_failed_store_left_out_is_stored_later(engines: Engines, fault: Fault) -> None:
    engine = engines(chunk=8)
    engine.copiers[0].force(STORE, fault)
    request = serve(engine, PROMPT, 20)
    assert depth_of(engine, request) == (len(PROMPT) + 19) // 4


def test_what_was_stored_behind_a_failed_store_is_stored_again(engines: Engines) -> None:
    """Its own store ends well, and is for nothing."""
    engine = engines(chunk=48, gpu_blocks=60)
    hold(engine, STORE)
    engine.copiers[0].force(STORE, Fault.FAIL)
    first = engine.add(tokens(20), 1)
    step_until(engine, first.is_finished)
    second = engine.add(tokens(40), 30)
    step_until(engine, lambda: second.num_output_tokens > 2)
    release(engine)
    step_until(engine, second.is_finished)
    come_to_rest(engine)
    assert depth_of(engine, second) == (40 + 29) // 4


def test_spoiled_stores_are_no_fault_of_copies(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, step_seconds=0.01)
    hold(engine, STORE)
    for first in range(FAILURES_TO_OPEN + 1):
        serve_one(engine, tokens(4, first))
    engine.side.stores._spoil_jobs()
    come_to_rest(engine)
    assert not engine.side.stores.breaker.is_outage


def test_without_threads_for_checksums_no_other_job_is_ended(engines: Engines) -> None:
    for of_blocks in (False, True):
        engine = engines(gpu_blocks=60, cpu_slots=200, seals_of_blocks=of_blocks)
        warm(engine, PROMPT)
        assert engine.ranks[0].side is not None and engine.ranks[0].side._engine is not None
        engine.ranks[0].side._engine._checker._executors = dict.fromkeys((LOAD, STORE), RefusingExecutor())
        served = serve(engine, PROMPT, 3)
        assert served.num_output_tokens == 3
        engine.audit.check_drained()


def test_a_dead_copier_opens_the_breaker_and_stops_nobody(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=200)
    warm(engine, PROMPT)
    engine.copiers[0].force(STORE, Fault.DIE)
    served = [serve_one(engine, tokens(24, first)) for first in range(1, 30)]
    assert all(request.is_finished() for request in served)
    assert engine.side.stores.breaker.is_outage
    come_to_rest(engine)
    release(engine)
    for first in range(100, 160):
        serve(engine, tokens(24, first))
    assert not engine.side.stores.breaker.is_outage


def test_the_pool_stays_mapped_while_a_stuck_copy_may_use_it(engines: Engines) -> None:
    engine = engines()
    side = engine.ranks[0].side
    assert side is not None and side._memory is not None
    address = side._memory.address
    engine.copiers[0].close = lambda seconds: False  # type: ignore[method-assign]
    side.close()
    gc.collect()
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans)
