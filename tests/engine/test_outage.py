"""Restores that fail again and again: offload pauses, requests are served without it, and it comes back."""

import pytest

from offload.scheduler.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_SECONDS
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.inspection import check_idle, pass_time, stop_time
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(3 * BLOCK_SIZE + 5, seed=60)


def ask_forgetful(engine: Engine) -> tuple[Answer, dict[str, float]]:
    """Ask for what the pool has and the GPU has not; the answer, and the counters then."""
    assert engine.forget_gpu()
    [answer] = engine.ask([PROMPT])
    return answer, engine.settle()


def pauses_logged(engine: EngineProcess) -> list[str]:
    """Without what vLLM's log has in front of each line."""
    said = [line.partition("] kv-offload: ")[2] for line in engine.log().splitlines()]
    return [line for line in said if line.startswith(("restores ", "stores "))]


def test_outage(inner_engine: EngineProcess) -> None:
    inner_engine.run(stop_time)
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    before = inner_engine.run(Engine.settle)
    num_logged = len(pauses_logged(inner_engine))
    inner_engine.run(Engine.probe, "fail_all", "LOAD", "FAIL")
    for number in range(FAILURES_TO_OPEN):
        answer, during = inner_engine.run(ask_forgetful)
        assert difference(answer, cold) <= TOLERANCE
        assert during["failed_jobs"] - before["failed_jobs"] == number + 1
    assert during["paused"] == 1

    answer, during = inner_engine.run(ask_forgetful)
    assert answer.num_cached == 0 and difference(answer, cold) <= TOLERANCE
    assert during["failed_jobs"] == before["failed_jobs"] + FAILURES_TO_OPEN, "restored during the pause"

    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    answer, trial = inner_engine.run(ask_forgetful)
    assert difference(answer, cold) <= TOLERANCE
    assert trial["paused"] == 1
    assert trial["failed_jobs"] - during["failed_jobs"] == 1
    inner_engine.run(Engine.probe, "heal")
    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    _, still = inner_engine.run(ask_forgetful)
    assert still["paused"] == 1, "the second pause is not longer than the first"

    inner_engine.run(pass_time, FIRST_PAUSE_SECONDS)
    answer, after = inner_engine.run(ask_forgetful)
    assert answer.num_cached == 3 * BLOCK_SIZE and difference(answer, cold) <= TOLERANCE
    assert after["paused"] == 0
    assert after["failed_jobs"] == trial["failed_jobs"]
    inner_engine.run(check_idle)
    logged = pauses_logged(inner_engine)[num_logged:]
    assert [line.partition(":")[0] for line in logged] == ["restores pause", "restores go on"]
