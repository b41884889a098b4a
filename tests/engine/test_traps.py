"""Traps that only a whole engine shows; numbered as in docs/traps.md."""

import pytest

from tests.engine.answers import BLOCK_SIZE, TOLERANCE, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.inspection import check_idle
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(12 * BLOCK_SIZE + 5, seed=50)


def reset_between_calls(engine: Engine) -> list[bool]:
    """A prompt's stores outlive its request; what a reset says before the next steps, and after them."""
    engine.probe("hold_ends", True)
    engine.ask([PROMPT], 1)
    engine.step()  # tells the workers that the request is over, which the engine would step for anyway
    engine.probe("hold_ends", False)
    answers = [engine.llm.reset_prefix_cache()]
    while len(engine.scheduler.connector._scheduler.ledger):
        engine.step()
    return [*answers, engine.llm.reset_prefix_cache()]


def test_trap_27_an_engine_in_this_process_takes_ends_in_with_its_next_steps(
    inner_engine: EngineProcess,
) -> None:
    """Nobody steps it while it has no request: until then the copies' blocks stay held, and resets fail."""
    assert inner_engine.run(reset_between_calls) == [False, True]
    inner_engine.run(check_idle)
    [answer] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert answer.num_cached == 12 * BLOCK_SIZE, "the store was lost"


def sleep_with_stores_under_way(engine: Engine) -> None:
    engine.probe("hold_ends_for", 20)
    engine.ask([PROMPT], 1)
    engine.llm.sleep(level=1)
    assert engine.llm.is_sleeping()
    engine.llm.wake_up()


def test_trap_47_sleep_waits_for_copies_and_empties_the_pool(engine: EngineProcess) -> None:
    [cold] = engine.run(Engine.ask, [PROMPT])
    assert engine.run(Engine.forget_all)
    engine.run(sleep_with_stores_under_way)
    assert engine.run(Engine.settle)["pool_used_blocks"] == 0
    [again] = engine.run(Engine.ask, [PROMPT])
    assert again.num_cached == 0
    assert difference(again, cold) <= TOLERANCE


def sleep_and_wake_up(engine: Engine) -> bool:
    side = engine.scheduler.connector._scheduler
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    return engine.scheduler.connector._scheduler is side


def test_trap_92_what_a_worker_tells_again_on_waking_up_empties_nothing(inner_engine: EngineProcess) -> None:
    """From vLLM 0.33 on. Jobs would begin at 0 again, which workers take for those they know."""
    inner_engine.run(Engine.ask, [PROMPT])
    inner_engine.run(Engine.settle)
    assert inner_engine.run(sleep_and_wake_up), "jobs are counted anew"
    inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    assert answer.num_cached == 12 * BLOCK_SIZE
