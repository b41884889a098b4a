"""Traps of the scheduler that give a model wrong KV; numbered as in docs/traps.md.

Every engine here checks what each request attends to and what each resident slot holds, at every step.
"""

import pytest

from offload.messages import LOAD, STORE
from offload.testing.copiers.faulty import Fault
from tests.virtual.driver import (
    LOADING,
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

overlapped = pytest.mark.parametrize("overlapped", [False, True], ids=["step by step", "overlapped"])


@overlapped
def test_trap_01_exactly_what_has_been_computed_is_stored(engines: Engines, overlapped: bool) -> None:
    engine = engines(chunk=10, overlapped=overlapped)
    request = engine.add(tokens(38), 12)
    scheduled = 0
    while not request.is_finished():
        engine.step()
        scheduled = max(scheduled, request.num_computed_tokens)
        assert engine.side.allocator.num_resident <= min(scheduled, request.num_tokens) // 4
    come_to_rest(engine)
    assert depth_of(engine, request) == (request.num_tokens - 1) // 4


@overlapped
def test_trap_02_the_last_sampled_token_was_never_computed(engines: Engines, overlapped: bool) -> None:
    engine = engines(overlapped=overlapped)
    request = engine.add(tokens(13), 3)
    step_until(engine, request.is_finished)
    assert len(request.block_hashes) == 4, "the hashes should cover the last token, which was not computed"
    come_to_rest(engine)
    assert depth_of(engine, request) == 3


def test_trap_03_abort_during_a_load_stores_nothing(engines: Engines) -> None:
    """The aborted request's counter says that all of it is computed, and nothing of it is."""
    engine = engines()
    warm(engine, tokens(20))
    hold(engine, LOAD)
    request = engine.add(tokens(20), 4)
    step_until(engine, lambda: request.status == LOADING)
    engine.side.allocator.drop(request.block_hashes, 0)  # as when another's load of it fails
    assert request.num_computed_tokens == 20 and depth_of(engine, request) == 0
    engine.abort(request.request_id)
    assert engine.side.allocator.num_filling == 0, "a store of blocks that nobody has filled"
    come_to_rest(engine)


@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])
def test_trap_04_and_05_a_resumed_request_is_stored_from_its_new_blocks(
    engines: Engines, v2_runner: bool
) -> None:
    engine = engines(gpu_blocks=10, cpu_slots=50, v2_runner=v2_runner, policy="priority", max_num_seqs=2)
    engine.copiers[0].force(STORE, *[Fault.FAIL] * 100)
    hog, victim = engine.add(tokens(4), 31), engine.add(tokens(12, first=1), 16, priority=2)
    engine.step()
    engine.add(tokens(5, first=2), 9, priority=1)
    step_until(engine, lambda: victim.num_output_tokens == 1)
    before = list(table_of(engine, victim))
    step_until(engine, hog.is_finished)
    assert victim.num_preemptions > 0
    engine.copiers[0].relent()
    engine.history.step += 100  # the pause after the failures is over
    step_until(engine, lambda: len(table_of(engine, victim)) >= len(before))
    assert table_of(engine, victim)[: len(before)] != before, "the test is blind: it got its blocks back"
    come_to_rest(engine)
    assert depth_of(engine, victim) == 6


@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])
def test_trap_05_what_a_preempted_request_had_is_not_stored_when_it_resumes(
    engines: Engines, v2_runner: bool
) -> None:
    """Its full blocks had to wait because stores in flight hold enough; then they are others'."""
    engine = engines(gpu_blocks=14, chunk=4, max_num_seqs=2, policy="priority", v2_runner=v2_runner)
    hold(engine, STORE)
    first = engine.add(tokens(28), 1)
    step_until(engine, first.is_finished)
    victim = engine.add(tokens(9, first=1), 20, priority=1)
    step_until(engine, lambda: victim.num_output_tokens > 0)
    assert depth_of(engine, victim) == 0 and len(engine.side.allocator._uncached)
    hog = engine.add(tokens(4, first=2), 20)
    step_until(engine, lambda: len(table_of(engine, hog)) == 6)
    assert victim.num_preemptions and not table_of(engine, victim)
    release(engine)
    step_until(engine, lambda: bool(table_of(engine, victim)))
    assert victim.num_computed_tokens < 4, "the test is blind: blocks of it were still there"
    come_to_rest(engine)
    assert depth_of(engine, victim) == 7


def test_trap_06_blocks_of_a_store_at_finish_are_not_given_to_others(engines: Engines) -> None:
    engine = engines(gpu_blocks=24)
    hold(engine, STORE)
    request = engine.add(tokens(12), 9)
    step_until(engine, lambda: request.num_output_tokens == 8)
    table = table_of(engine, request)
    step_until(engine, request.is_finished)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert [pool.blocks[block_id].ref_cnt for block_id in table[:5]] == [1] * 5
    other = engine.add(tokens(68, first=1), 4)
    step_until(engine, lambda: other.num_output_tokens > 0)
    assert not set(table[:5]) & set(table_of(engine, other))
    come_to_rest(engine)
    assert depth_of(engine, request) == 5


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.REFUSE])
def test_trap_09_every_rank_reports_every_load_once(engines: Engines, fault: Fault) -> None:
    engine = engines(num_ranks=3)
    warm(engine, tokens(20))
    engine.copiers[1].force(LOAD, fault)
    reports = [0, 0, 0]
    for index, rank in enumerate(engine.ranks):
        ask = rank.connector.get_transfer_results

        def counted(finished: set[str], ask=ask, index=index):  # type: ignore[no-untyped-def]
            results = ask(finished)
            reports[index] += len(results.finished_recving)
            return results

        rank.connector.get_transfer_results = counted  # type: ignore[method-assign]
    hold(engine, LOAD, 2)
    request = engine.add(tokens(20), 4)
    for _ in range(6):
        engine.step()
    come_to_rest(engine)
    assert reports == [1, 1, 1] and request.is_finished()


@overlapped
def test_trap_10_a_failed_load_touches_no_other_request(engines: Engines, overlapped: bool) -> None:
    """Ids of blocks that were not filled are matched against everybody; they must not come late."""
    engine = engines(num_ranks=2, overlapped=overlapped)
    warm(engine, tokens(20))
    engine.copiers[0].force(LOAD, Fault.FAIL)
    hold(engine, LOAD, 0)
    computed = watch(engine)
    innocents = [engine.add(tokens(9, first), 20) for first in (1, 2)]
    victim = engine.add(tokens(20), 4)
    for _ in range(6):
        engine.step()
    come_to_rest(engine)
    assert [computed[innocent.request_id] for innocent in innocents] == [28, 28]
    assert computed[victim.request_id] == 23


def test_trap_12_a_store_in_flight_at_a_reset_is_not_committed(engines: Engines) -> None:
    engine = engines()
    hold(engine, STORE)
    request = engine.add(tokens(20), 1)
    step_until(engine, request.is_finished)
    engine.reset()
    come_to_rest(engine)
    assert engine.side.allocator.num_resident == 0


def test_trap_12_a_load_in_flight_at_a_reset_fails(engines: Engines) -> None:
    engine = engines()
    warm(engine, tokens(20))
    hold(engine, LOAD)
    computed = watch(engine)
    request = engine.add(tokens(20), 4)
    step_until(engine, lambda: request.status == LOADING)
    engine.reset()
    come_to_rest(engine)
    assert computed[request.request_id] == 23, "KV of old weights was used"


@overlapped
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_trap_12_a_request_that_runs_across_a_reset_is_never_stored(
    engines: Engines, num_tokens: int, overlapped: bool
) -> None:
    """Not even blocks that fill after it, of which but a part may be of old weights."""
    engine = engines(overlapped=overlapped)
    request = engine.add(tokens(num_tokens), 20)
    step_until(engine, lambda: request.num_output_tokens > 0)
    assert (len(engine.side.ledger) + engine.side.allocator.num_resident > 0) is (num_tokens > 4)
    engine.reset()
    come_to_rest(engine)
    assert engine.side.allocator.num_resident == 0


@overlapped
def test_trap_13_of_a_full_hit_one_token_is_computed(engines: Engines, overlapped: bool) -> None:
    engine = engines(overlapped=overlapped)
    warm(engine, tokens(20))
    computed = watch(engine)
    request = serve(engine, tokens(20))
    assert engine.counts["loads"] == 1 and computed[request.request_id] == 1


def test_trap_14_a_store_of_blocks_that_a_sibling_failed_to_fill_does_not_count(engines: Engines) -> None:
    """Under a MultiConnector the ids of unfilled blocks may be somebody else's."""
    engine = engines()
    hold(engine, STORE)
    request = engine.add(tokens(20), 8)
    step_until(engine, lambda: request.num_output_tokens > 0)
    engine.side.receive(None, {table_of(engine, request)[2]})
    engine.abort(request.request_id)
    come_to_rest(engine)
    assert engine.side.allocator.num_resident == 0


def test_trap_15_a_streaming_session_is_not_stored(engines: Engines) -> None:
    """It takes back tokens and overwrites blocks that were full."""
    engine = engines()
    request = engine.add(tokens(20), 4, resumable=True)
    for _ in range(10):
        engine.step()
    assert request.num_output_tokens == 4
    engine.abort(request.request_id)
    come_to_rest(engine)
    assert engine.side.allocator.num_resident == 0


@pytest.mark.parametrize("num_local", [0, 1, 3])
def test_trap_33_a_load_fills_exactly_what_the_gpu_lacks(engines: Engines, num_local: int) -> None:
    engine = engines()
    warm(engine, tokens(22))
    if num_local:
        serve(engine, tokens(num_local * 4), hints={"cpu_offload_load": False})
    hold(engine, LOAD)
    computed = watch(engine)
    request = engine.add(tokens(22), 1)
    step_until(engine, lambda: request.status == LOADING)
    (job,) = engine.side.ledger.of(engine.side.restores)
    assert job.task.restore.block_ids.tolist() == table_of(engine, request)[num_local:5]
    come_to_rest(engine)
    assert computed[request.request_id] == 2


@pytest.mark.parametrize("block_outermost", [False, True], ids=["LBHNC", "BLHNC"])
@pytest.mark.parametrize("num_local", [0, 2])
def test_trap_37_of_a_load_that_stops_half_way_the_good_part_is_kept(
    engines: Engines, num_local: int, block_outermost: bool
) -> None:
    engine = engines(block_outermost=block_outermost, num_layers=3)
    warm(engine, tokens(41))
    if num_local:
        serve(engine, tokens(num_local * 4), hints={"cpu_offload_load": False})
    engine.copiers[0].force(LOAD, Fault.STOP_HALFWAY)
    computed = watch(engine)
    request = serve(engine, tokens(41))
    # One copy per block and layer stops after half of the blocks; slots in a row are one copy, which has
    # no good half.
    num_good = 0 if block_outermost else (10 - num_local) // 2
    assert computed[request.request_id] == 41 - 4 * (num_local + num_good)
    assert depth_of(engine, request) == 10


def test_a_tenant_is_never_given_anothers_kv(engines: Engines) -> None:
    engine = engines()
    serve(engine, tokens(20), salt="one")
    forget_gpu(engine)
    computed = watch(engine)
    request = serve(engine, tokens(20), salt="another")
    assert engine.counts["loads"] == 0 and computed[request.request_id] == 20
