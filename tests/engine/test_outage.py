"""A device that dies: offload pauses, requests are served without it, and it comes back."""

import pytest

from offload.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_SECONDS
from tests.engine.answers import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    Prompt,
    difference,
    largest_difference,
    prompt_of,
)
from tests.engine.engine import SHORT, Engine
from tests.engine.inspection import check_idle, pass_time, stop_time
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPTS = [prompt_of(3 * BLOCK_SIZE + 5, seed) for seed in range(60, 66)]
OTHERS = [prompt_of(3 * BLOCK_SIZE + 5, seed) for seed in range(66, 69)]


def ask_in_turn(engine: Engine) -> list[Answer]:
    """Each has ended, its store as well, before the next one comes."""
    answers = []
    for prompt in PROMPTS:
        answers += engine.ask([prompt])
        engine.ask([SHORT], 1)
    return answers


def counters_after(engine: Engine, prompt: Prompt) -> dict[str, float]:
    engine.ask([prompt], 1)
    engine.ask([SHORT], 1)
    return engine.counters()


def test_outage(inner_engine: EngineProcess) -> None:
    """Each request but the first one costs two failed copies, until there were eight."""
    inner_engine.run(stop_time)
    cold = inner_engine.run(ask_in_turn)
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    num_logged = inner_engine.log().count("offload ")
    inner_engine.run(Engine.probe, "fail_next", "STORE", "DIE")
    assert inner_engine.run(counters_after, OTHERS[0])["paused"] == 0
    answers = inner_engine.run(ask_in_turn)
    during = inner_engine.run(Engine.counters)
    assert largest_difference(answers, cold) <= TOLERANCE
    assert {answer.num_cached for answer in answers} == {0}, "served although offload pauses"
    assert during["paused"] == 1
    assert during["failed_jobs"] - before["failed_jobs"] == FAILURES_TO_OPEN
    assert during["restored_tokens"] == before["restored_tokens"]
    assert during["pool_used_blocks"] == 3 + 2 * 3, "the last two were not asked for, one is stuck"

    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    trial = inner_engine.run(counters_after, OTHERS[1])
    assert trial["paused"] == 1
    assert trial["failed_jobs"] - during["failed_jobs"] == 1
    inner_engine.run(Engine.probe, "let_go")
    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    still = inner_engine.run(counters_after, OTHERS[2])
    assert still["paused"] == 1, "the second pause is not longer than the first"
    assert still["stored_bytes"] - trial["stored_bytes"] == 3 * BLOCK_BYTES, "what had been stuck"

    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    after = inner_engine.run(counters_after, OTHERS[2])
    assert after["paused"] == 0
    assert after["failed_jobs"] == trial["failed_jobs"]
    inner_engine.run(check_idle)
    logged = [line for line in inner_engine.log().splitlines() if "offload " in line][num_logged:]
    assert [line.partition(":")[0] for line in logged] == ["offload pauses", "offload goes on"]

    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPTS[-1]])
    assert restored.num_cached == 3 * BLOCK_SIZE
    assert difference(restored, cold[-1]) <= TOLERANCE
