"""What empties the pool when weights change, on vLLM's real scheduler: the promises of docs/operations.md."""

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from offload.messages import LOAD, STORE
from offload.testing.virtual import VirtualEngine
from offload.testing.virtual.history import WrongBytesError
from tests.virtual.driver import (
    LOADING,
    come_to_rest,
    depth_of,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
)

SIZES = {"gpu_blocks": 40, "cpu_slots": 64}
PROMPT = tokens(40)


def load_new_weights(engine: VirtualEngine) -> None:
    """As ``update_weights`` does: no hook of a connector is called."""
    engine.generation += 1


def pause(engine: VirtualEngine, mode: str) -> None:
    """``pause_generation(mode, clear_cache=True)``, as vLLM's engine core does it."""
    scheduler = engine.scheduler
    if mode == "abort":
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
    step_until(engine, engine.is_idle)
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.audit.pool_was_reset()


def resume(engine: VirtualEngine) -> None:
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_by_default_a_reset_leaves_the_pool(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**SIZES)
    request = serve(engine, PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    assert depth_of(engine, request) == 10
    load_new_weights(engine)
    with pytest.raises(WrongBytesError):
        serve(engine, PROMPT)


def test_a_reset_of_the_connector_empties_it(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**SIZES)
    request = serve(engine, PROMPT)
    load_new_weights(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.audit.pool_was_reset()
    assert depth_of(engine, request) == 0
    serve(engine, PROMPT)
    assert engine.counts["loads"] == 0


def test_it_empties_the_pool_also_where_copies_hold_blocks(engines: Callable[..., VirtualEngine]) -> None:
    """vLLM's own cache it does not: the call says False, and is to be made again."""
    engine = engines(**SIZES)
    request = serve(engine, PROMPT)
    hold(engine, STORE)
    other = engine.add(tokens(40, 1), 1)
    step_until(engine, other.is_finished)
    assert not engine.reset()
    assert depth_of(engine, request) == 0
    release(engine)
    step_until(engine, engine.is_idle)
    assert engine.reset()
    assert depth_of(engine, other) == 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_empties_it_also_during_a_restore(mode: str, engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**SIZES)
    warm(engine, PROMPT)
    hold(engine, LOAD)
    restored, running = engine.add(PROMPT, 3), engine.add(tokens(8, 7), 20)
    step_until(engine, lambda: restored.status == LOADING)
    release(engine)
    pause(engine, mode)
    assert engine.side.allocator.num_resident == 0
    assert restored.is_finished() and running.is_finished()
    load_new_weights(engine)
    resume(engine)
    serve(engine, PROMPT)
    come_to_rest(engine)


def test_pausing_to_keep_requests_works_without_a_restore(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(**SIZES)
    warm(engine, PROMPT)
    running = engine.add(tokens(8, 7), 20)
    step_until(engine, lambda: running.num_output_tokens > 2)
    pause(engine, "keep")
    assert engine.side.allocator.num_resident == 0
    assert not running.is_finished()
    load_new_weights(engine)
    resume(engine)
    come_to_rest(engine)
    assert running.is_finished()


def test_pausing_to_keep_requests_fails_once_a_restore_has_landed(
    engines: Callable[..., VirtualEngine],
) -> None:
    """vLLM refuses: the request that waits holds blocks, and only a step that schedules could take it on.

    Nothing is emptied. After a resume and a step or two the same pause works.
    """
    engine = engines(**SIZES)
    warm(engine, PROMPT)
    hold(engine, LOAD)
    restored, running = engine.add(PROMPT, 20), engine.add(tokens(8, 7), 20)
    step_until(engine, lambda: restored.status == LOADING)
    release(engine)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        pause(engine, "keep")
    assert not engine.jobs
    assert depth_of(engine, restored) == 10
    resume(engine)
    step_until(engine, lambda: restored.status == RequestStatus.RUNNING)
    pause(engine, "keep")
    assert engine.side.allocator.num_resident == 0
    load_new_weights(engine)
    resume(engine)
    come_to_rest(engine)
    assert restored.is_finished() and running.is_finished()
