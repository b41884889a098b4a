"""Of requests that are restored at once some fail: they are computed, and the others notice nothing."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

from tests.engine.answers import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    largest_difference,
    prompt_of,
)
from tests.engine.engine import Engine
from tests.engine.inspection import check_idle, compare_tiers
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

RUNNING = prompt_of(2 * BLOCK_SIZE + 3, seed=40)
PROMPTS = [prompt_of(4 * BLOCK_SIZE + 5, seed) for seed in range(41, 45)]
FOLLOWER = [*PROMPTS[1][: 3 * BLOCK_SIZE], *prompt_of(2 * BLOCK_SIZE + 5, seed=45)]
"""Waits for what the load of another request brings, which fails."""

ALL = [RUNNING, *PROMPTS, FOLLOWER]
LENGTHS = [24, 4, 4, 4, 4, 4]
"""Tokens to generate."""


class Asked(NamedTuple):
    """Answers, and how many prompt tokens were computed for each."""

    answers: list[Answer]
    num_computed: list[int]


def ask_together(engine: Engine) -> Asked:
    """Ask all prompts while the first one decodes.

    vLLM's own count of computed tokens takes a load that failed half-way for a whole one.
    """
    scheduled: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def counted(*arguments: bool) -> Any:
        output = schedule(*arguments)
        scheduled.update(output.num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted
    try:
        names = [engine.add(ALL[0], LENGTHS[0])]
        while not engine.step():
            pass
        names.extend(map(engine.add, ALL[1:], LENGTHS[1:]))
        answers = engine.finish(names)
    finally:
        engine.scheduler.schedule = schedule
    by_name = {request_id.rpartition("-")[0]: count for request_id, count in scheduled.items()}
    num_computed = [
        by_name[name] - len(answer.tokens) + 1 for name, answer in zip(names, answers, strict=True)
    ]
    return Asked(answers, num_computed)


def ask_in_turn(engine: Engine) -> list[Answer]:
    """One after the other; all that can be stored is."""
    answers = []
    for prompt, length in zip(ALL, LENGTHS, strict=True):
        answers += engine.ask([prompt], length)
        engine.settle()
    return answers


@pytest.mark.parametrize(
    ("fault", "num_good"),
    [("REFUSE", 0), ("FAIL", 0), ("STOP_HALFWAY", 2), ("END_SHORT", 2), ("WRONG_BYTES", 2)],
)
def test_two_of_five_loads_fail(inner_engine: EngineProcess, fault: str, num_good: int) -> None:
    cold = inner_engine.run(ask_in_turn)
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    inner_engine.run(Engine.probe, "fail_next", "LOAD", "NONE", "NONE", fault, "NONE", fault)
    asked = inner_engine.run(ask_together)
    after = inner_engine.run(Engine.settle)
    inner_engine.run(check_idle)
    assert largest_difference(asked.answers, cold) <= TOLERANCE
    rest = (4 - num_good) * BLOCK_SIZE + 5
    assert asked.num_computed == [3, 5, rest, 5, rest, 2 * BLOCK_SIZE + 5]
    counted = {name: after[name] - before[name] for name in before}
    assert counted["failed_jobs"] == 2
    assert counted["restored_requests"] == 3 + 2 * (num_good > 0)
    assert counted["restored_tokens"] == (2 + 4 + num_good + 4 + num_good) * BLOCK_SIZE
    assert counted["stored_bytes"] == (2 * (4 - num_good) + 2) * BLOCK_BYTES, "the follower's two as well"
    assert after["pool_used_blocks"] == before["pool_used_blocks"] == 2 + 4 * 4 + 2
    assert inner_engine.run(compare_tiers).largest_difference <= TOLERANCE

    assert inner_engine.run(Engine.forget_gpu)
    asked = inner_engine.run(ask_together)
    assert asked.num_computed == [3, 5, 5, 5, 5, 5]
    assert largest_difference(asked.answers, cold) <= TOLERANCE
