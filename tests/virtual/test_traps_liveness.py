"""Traps of the scheduler that leave an engine hanging, leaking or spinning; numbered as in docs/traps.md."""

import pytest

from offload.messages import LOAD, STORE
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine
from offload.vllm.connector import CpuOffloadConnector
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


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.FAIL])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trap_23_abort_while_loading_lets_go_of_everything(
    engines: Engines, num_ranks: int, fault: Fault
) -> None:
    engine = engines(num_ranks=num_ranks)
    warm(engine, tokens(20))
    hold(engine, LOAD)
    for copier in engine.copiers:
        copier.force(LOAD, fault)
    request = engine.add(tokens(20), 4)
    step_until(engine, lambda: request.status == LOADING)
    engine.abort(request.request_id)
    for _ in range(5):
        engine.step()
    if fault is Fault.NONE:
        assert table_of(engine, request), "blocks that a copy still writes to were given back"
    come_to_rest(engine)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_trap_24_failed_slots_are_not_served_again(engines: Engines, num_ranks: int) -> None:
    """Also when one rank's failure is known long before the last rank's end."""
    engine = engines(num_ranks=num_ranks)
    warm(engine, tokens(20))
    engine.copiers[0].force(LOAD, *[Fault.FAIL] * 10)
    hold(engine, STORE)
    if num_ranks > 1:
        hold(engine, LOAD, num_ranks - 1)
    first = engine.add(tokens(20), 4)
    step_until(engine, lambda: engine.counts["load fail"] == 1)
    engine.step()
    assert depth_of(engine, first) == 0
    second = engine.add(tokens(20), 4)
    for _ in range(5):
        engine.step()
    come_to_rest(engine)
    assert engine.counts["loads"] == 1 and first.is_finished() and second.is_finished()


def test_trap_24_after_a_failed_load_a_request_is_not_offered_another(engines: Engines) -> None:
    """The scheduler reserves blocks for prefills in flight and goes on counting a request whose load
    failed: a second load would need room beside the request itself, and wait for it for ever."""
    engine = engines(num_ranks=2, gpu_blocks=9, block_size=2)
    warm(engine, tokens(6))
    engine.copiers[0].force(LOAD, Fault.FAIL)
    hold(engine, LOAD, 1)
    victim = engine.add(tokens(11), 1)
    step_until(engine, lambda: victim.status == LOADING and depth_of(engine, victim) == 0)
    sibling = engine.add(tokens(7), 1)
    step_until(engine, sibling.is_finished)
    step_until(engine, lambda: depth_of(engine, victim) == 3)
    filler = engine.add(tokens(9, first=1), 1)
    step_until(engine, filler.is_finished)
    come_to_rest(engine)
    assert victim.is_finished()


def test_trap_25_a_failed_load_is_recomputed_not_failed(engines: Engines) -> None:
    engine = engines()
    assert engine.scheduler.recompute_kv_load_failures
    warm(engine, tokens(20))
    engine.copiers[0].force(LOAD, Fault.FAIL)
    request = serve(engine, tokens(20), 4)
    assert request.num_output_tokens == 4


def test_trap_26_the_engine_stays_awake_until_the_last_copy_has_ended(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_a_store_behind() -> VirtualEngine:
        engine = engines()
        hold(engine, STORE)
        request = engine.add(tokens(20), 1)
        step_until(engine, request.is_finished)
        for _ in range(5):
            engine.step()
        return engine

    engine = leave_a_store_behind()
    assert not engine.is_idle() and not engine.scheduler.requests
    come_to_rest(engine)
    assert engine.is_idle() and engine.side.allocator.num_resident == 5
    monkeypatch.setattr(CpuOffloadConnector, "has_pending_push_work", lambda self: False)
    with pytest.raises(AssertionError, match="jobs left"):
        come_to_rest(leave_a_store_behind())


def test_trap_28_a_plain_reset_with_references_held_fails_and_leaves_a_sound_pool(engines: Engines) -> None:
    engine = engines()
    hold(engine, STORE)
    request = engine.add(tokens(20), 1)
    step_until(engine, request.is_finished)
    assert engine.reset() is False
    with pytest.raises(RuntimeError, match="Failed to reset"):
        engine.reset(running=True)
    come_to_rest(engine)
    assert engine.side.allocator.num_resident == 0
    assert engine.reset() is True


def test_trap_31_stores_that_do_not_end_leave_blocks_to_run_with(engines: Engines) -> None:
    engine = engines(gpu_blocks=33, cpu_slots=100)
    hold(engine, STORE)
    for first in range(40):
        request = engine.add(tokens(6, first), 1)
        step_until(engine, request.is_finished)
    come_to_rest(engine)


def test_trap_32_a_request_that_cannot_be_admitted_pins_nothing(engines: Engines) -> None:
    engine = engines(gpu_blocks=12)
    warm(engine, tokens(36))
    hog = engine.add(tokens(20, first=1), 20)
    step_until(engine, lambda: hog.num_output_tokens > 2)
    waiting = engine.add(tokens(36), 1)
    for _ in range(5):
        engine.step()
    assert waiting.num_computed_tokens == 0 and not engine.side.allocator._pins
    engine.abort(waiting.request_id)
    come_to_rest(engine)


def test_trap_34_followers_wait_for_the_part_of_a_load_they_share(engines: Engines) -> None:
    """They have it from the GPU as soon as it has landed, and load nothing a second time."""
    engine = engines(gpu_blocks=100, first_part=4)
    warm(engine, tokens(80))
    hold(engine, LOAD)
    leader = engine.add(tokens(80), 1)
    step_until(engine, lambda: leader.status == LOADING)
    followers = [engine.add(tokens(32) + tokens(3, first), 2) for first in (1, 2, 3)]
    strangers = [engine.add(tokens(20, first), 2) for first in (4, 5)]
    computed = watch(engine)
    for _ in range(5):
        engine.step()
    assert all(stranger.is_finished() for stranger in strangers), "others queued behind those who wait"
    assert not any(computed.get(follower.request_id) for follower in followers)
    for job in list(engine.side.ledger.of(engine.side.restores))[:2]:
        engine.copiers[0].hurry([job.job_id])
    step_until(engine, lambda: all(follower.is_finished() for follower in followers))
    assert leader.status == LOADING, "the rest of its load is still held"
    assert [computed[follower.request_id] for follower in followers] == [4, 4, 4]
    come_to_rest(engine)
    assert engine.counts["loads"] == 1 and computed[leader.request_id] == 1


def test_trap_34_what_has_landed_of_an_aborted_load_is_not_lost(engines: Engines) -> None:
    engine = engines(gpu_blocks=60)
    warm(engine, tokens(40))
    hold(engine, LOAD)
    leader = engine.add(tokens(40), 1)
    step_until(engine, lambda: leader.status == LOADING)
    follower = engine.add(tokens(40) + tokens(3, 1), 2)
    engine.step()
    engine.abort(leader.request_id)
    computed = watch(engine)
    come_to_rest(engine)
    assert engine.counts["loads"] == 1 and computed[follower.request_id] == 4


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STOP_HALFWAY, Fault.STUCK, Fault.DIE])
def test_trap_34_nobody_waits_for_a_load_that_fails(engines: Engines, fault: Fault) -> None:
    engine = engines(gpu_blocks=60, first_part=2)
    warm(engine, tokens(40))
    engine.copiers[0].force(LOAD, Fault.NONE, fault)
    leader = engine.add(tokens(40), 1)
    step_until(engine, lambda: leader.status == LOADING)
    follower = engine.add(tokens(40) + tokens(3, 1), 2)
    computed = watch(engine)
    step_until(engine, lambda: follower.is_finished() and leader.is_finished())
    assert computed[follower.request_id] <= 44 - 8, "what had landed was computed again"
    come_to_rest(engine)


def test_trap_45_a_prefix_that_only_the_gpu_has_is_stored_again(engines: Engines) -> None:
    """A cursor would go on behind what the pool has evicted, and the tail could never be taken."""
    engine = engines(cpu_slots=9, gpu_blocks=40)
    serve(engine, tokens(20))
    serve(engine, tokens(36, first=1))
    computed = watch(engine)
    request = serve(engine, [*tokens(20), *tokens(8, first=2)])
    assert computed[request.request_id] == 8, "the GPU's own cache should have supplied the beginning"
    assert depth_of(engine, request) == 7
    forget_gpu(engine)
    again = serve(engine, [*tokens(20), *tokens(8, first=2)])
    assert computed[again.request_id] == 1


def test_nothing_moves_while_copies_are_held_and_all_of_it_after(engines: Engines) -> None:
    engine = engines(overlapped=True)
    hold(engine, STORE)
    request = engine.add(tokens(20), 1)
    step_until(engine, request.is_finished)
    assert depth_of(engine, request) == 0
    release(engine)
    come_to_rest(engine)
    assert depth_of(engine, request) == 5
