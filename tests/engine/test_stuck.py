"""Copies that do not end: requests go on without them, and nobody touches their memory until they let go."""

from typing import Any

import pytest

from offload.messages import LOAD
from offload.worker.transfer import DEADLINE_SECONDS
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.inspection import (
    Usage,
    check_idle,
    compare_tiers,
    end_pauses,
    pass_time,
    stored_slots,
    usage,
    usage_at_rest,
)
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(12 * BLOCK_SIZE + 5, seed=50)
OTHER = prompt_of(30 * BLOCK_SIZE + 5, seed=51)
"""Takes nearly all that 12 stuck blocks leave of the GPU cache of 48."""

OVERDUE = DEADLINE_SECONDS + 1


def ask_other(engine: Engine) -> Answer:
    """Keeps the engine going, and overwrites what it may."""
    [answer] = engine.ask([OTHER], hints={"cpu_offload_store": False, "cpu_offload_load": False})
    return answer


def ask_past_deadline(engine: Engine, first_part: int) -> Answer:
    """One part of the prompt's load does not end in time."""
    side = engine.scheduler.connector._scheduler
    usual, side.restores.first_part = side.restores.first_part, first_part
    name = engine.add(PROMPT, 4)
    engine.step()
    side.restores.first_part = usual
    while len(side.ledger) > 1:
        assert not engine.step(), "answered without its load"
    pass_time(engine, OVERDUE)
    while not side.ledger.num_given_up:
        engine.step()
    end_pauses(engine)
    [answer] = engine.finish([name])
    return answer


def abort_past_deadline(engine: Engine) -> None:
    """The prompt's load does not end in time, and the request has gone before."""
    name = engine.add(PROMPT, 4)
    engine.step()
    engine.llm.abort_request([name])
    pass_time(engine, OVERDUE)


def stuck_blocks(engine: Engine) -> list[int]:
    """The GPU blocks that stuck loads may still write to."""
    jobs: list[Any] = [job for job in engine.scheduler.connector._scheduler.ledger if job.flow.route == LOAD]
    return [block.block_id for job in jobs for block in job.blocks]


def reset_gpu(engine: Engine) -> bool:
    """As ``Engine.forget_gpu``, without waiting for what is stuck."""
    done: bool = engine.llm.reset_prefix_cache()
    return done


@pytest.mark.parametrize(
    ("first_part", "faults", "stuck"),
    [(16, ["STUCK"], range(12)), (3, ["NONE", "STUCK", "NONE"], range(3, 6))],
    ids=["whole", "second part of three"],
)
def test_stuck_load(inner_engine: EngineProcess, first_part: int, faults: list[str], stuck: range) -> None:
    other = inner_engine.run(ask_other)
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    stored = inner_engine.run(Engine.probe, "read_slots", inner_engine.run(stored_slots))
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    inner_engine.run(Engine.probe, "fail_next", "LOAD", *faults)
    answer = inner_engine.run(ask_past_deadline, first_part)
    blocks = inner_engine.run(stuck_blocks)
    quarantine = Usage(1, 1, len(stuck), num_resident=12, num_other=12 - stuck.start)
    assert difference(answer, cold) <= TOLERANCE
    assert answer.num_cached == stuck.start * BLOCK_SIZE, "what has landed was not used"
    assert len(blocks) == len(stuck)
    assert inner_engine.run(usage_at_rest) == quarantine
    counters = inner_engine.run(Engine.counters)
    assert counters["stuck_jobs"] == counters["jobs_in_flight"] == 1
    assert counters["failed_jobs"] - before["failed_jobs"] == 1
    assert counters["restored_requests"] == before["restored_requests"]

    untouched = inner_engine.run(Engine.probe, "read_blocks", blocks)
    for _ in range(2):
        assert difference(inner_engine.run(ask_other), other) <= TOLERANCE
        [answer] = inner_engine.run(Engine.ask, [PROMPT])
        assert difference(answer, cold) <= TOLERANCE
        assert answer.num_cached == 12 * BLOCK_SIZE
    assert inner_engine.run(usage_at_rest) == quarantine
    assert inner_engine.run(Engine.probe, "read_blocks", blocks) == untouched

    inner_engine.run(Engine.probe, "let_go")
    late = inner_engine.run(Engine.probe, "read_blocks", blocks)
    assert late == [stored[at] for at in stuck], "the stuck copy was not made after all"
    inner_engine.run(check_idle)
    assert inner_engine.run(Engine.settle)["pool_used_blocks"] == 12
    assert inner_engine.run(compare_tiers).largest_difference <= TOLERANCE
    assert inner_engine.run(Engine.forget_gpu)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    assert answer.num_cached == 12 * BLOCK_SIZE
    assert difference(answer, cold) <= TOLERANCE


def test_stuck_load_of_an_aborted_request(inner_engine: EngineProcess) -> None:
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    inner_engine.run(Engine.probe, "fail_next", "LOAD", "STUCK")
    inner_engine.run(abort_past_deadline)
    assert inner_engine.run(usage_at_rest) == Usage(1, 1, 12, num_resident=0, num_other=12)
    inner_engine.run(Engine.probe, "let_go")
    inner_engine.run(check_idle)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    assert answer.num_cached == 0
    assert difference(answer, cold) <= TOLERANCE


def test_stuck_store(inner_engine: EngineProcess) -> None:
    """Its GPU blocks can be used again at once, because what it writes is served to nobody."""
    inner_engine.run(Engine.probe, "fail_next", "STORE", "STUCK")
    [cold] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert inner_engine.run(usage) == Usage(1, 0, 12, num_resident=0, num_other=12)
    inner_engine.run(pass_time, OVERDUE)
    assert inner_engine.run(usage_at_rest) == Usage(1, 1, 0, num_resident=0, num_other=12)
    inner_engine.run(end_pauses)
    [from_gpu] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert from_gpu.num_cached == 12 * BLOCK_SIZE
    assert inner_engine.run(usage_at_rest) == Usage(1, 1, 0, num_resident=12, num_other=12)
    assert inner_engine.run(reset_gpu)
    inner_engine.run(ask_other)

    inner_engine.run(Engine.probe, "let_go")
    inner_engine.run(check_idle)
    assert inner_engine.run(Engine.settle)["pool_used_blocks"] == 12
    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert restored.num_cached == 12 * BLOCK_SIZE
    assert difference(restored, cold) <= TOLERANCE
