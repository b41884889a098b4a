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
PROMPTS = [prompt_of(7 * BLOCK_SIZE + 5, seed) for seed in range(41, 45)]
FOLLOWER = [*PROMPTS[1][: 5 * BLOCK_SIZE], *prompt_of(2 * BLOCK_SIZE + 5, seed=45)]
"""Waits for what the load of another request brings, which fails."""

ALL = [RUNNING, *PROMPTS, FOLLOWER]
NUM_BLOCKS = 2 + 4 * 7 + 2
"""Full blocks of all prompts, shared ones once."""


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
        names = [engine.add(RUNNING, 24)]
        while not engine.step():
            pass
        names.extend(engine.add(prompt, 4) for prompt in ALL[1:])
        answers = engine.finish(names)
    finally:
        engine.scheduler.schedule = schedule
    by_name = {request_id.rpartition("-")[0]: count for request_id, count in scheduled.items()}
    num_computed = [
        by_name[name] - len(answer.tokens) + 1 for name, answer in zip(names, answers, strict=True)
    ]
    return Asked(answers, num_computed)


def ask_alone(engine: Engine) -> list[Answer]:
    """The cold answers."""
    engine.forget_all()
    lengths = [24] + [4] * len(ALL[1:])
    hints = {"cpu_offload_store": False}
    return [engine.ask([prompt], length, hints=hints)[0] for prompt, length in zip(ALL, lengths, strict=True)]


@pytest.fixture(scope="module")
def cold(session_inner_engine: EngineProcess) -> list[Answer]:
    return session_inner_engine.run(ask_alone)


@pytest.mark.parametrize(
    ("fault", "num_good"),
    [("REFUSE", 0), ("FAIL", 0), ("STOP_HALFWAY", 3), ("END_SHORT", 3), ("WRONG_BYTES", 3)],
)
def test_two_of_five_loads_fail(
    inner_engine: EngineProcess, cold: list[Answer], fault: str, num_good: int
) -> None:
    first = inner_engine.run(ask_together)
    assert largest_difference(first.answers, cold) <= TOLERANCE
    assert first.num_computed == [len(prompt) for prompt in ALL[:-1]] + [2 * BLOCK_SIZE + 5]
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    inner_engine.run(Engine.probe, "fail_next", "LOAD", "NONE", "NONE", fault, "NONE", fault)
    asked = inner_engine.run(ask_together)
    after = inner_engine.run(Engine.settle)
    inner_engine.run(check_idle)

    assert largest_difference(asked.answers, cold) <= TOLERANCE
    rest = 5 + (7 - num_good) * BLOCK_SIZE
    assert asked.num_computed == [3, 5, rest, 5, rest, 2 * BLOCK_SIZE + 5]
    counted = {name: after[name] - before[name] for name in before}
    assert counted["failed_jobs"] == 2
    assert counted["restored_requests"] == 3 + 2 * (num_good > 0)
    assert counted["restored_tokens"] == (2 + 7 + num_good + 7 + num_good) * BLOCK_SIZE
    assert counted["stored_bytes"] == (2 * (7 - num_good) + 2) * BLOCK_BYTES, "the follower's two as well"
    assert after["pool_used_blocks"] == NUM_BLOCKS
    assert inner_engine.run(compare_tiers).largest_difference <= TOLERANCE

    assert inner_engine.run(Engine.forget_gpu)
    asked = inner_engine.run(ask_together)
    assert asked.num_computed == [3, 5, 5, 5, 5, 5]
    assert largest_difference(asked.answers, cold) <= TOLERANCE
