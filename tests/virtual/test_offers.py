"""What a waiting request is offered says why, so that every miss can be explained."""

import pytest

from offload.messages import LOAD
from offload.scheduler.offer import COMING, NOTHING, Offer, Why
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import (
    Engines,
    come_to_rest,
    hold,
    step_until,
    tokens,
    warm,
)

BLOCK = 4
PROMPT = tokens(10 * BLOCK + 1)


@pytest.fixture
def engine(engines: Engines) -> VirtualEngine:
    engine = engines(gpu_blocks=40, cpu_slots=60, chunk=64)
    warm(engine, PROMPT)
    return engine


def test_what_the_pool_has(engine: VirtualEngine) -> None:
    request = engine.add(PROMPT, 1)
    assert engine.side.offer(request, 0) == Offer(10 * BLOCK, Why.RESIDENT)
    assert engine.side.offer(request, 3 * BLOCK) == Offer(7 * BLOCK, Why.RESIDENT)
    assert engine.side.offer(request, 10 * BLOCK) == NOTHING[Why.GPU_HAS_ALL]
    longer = engine.add([*PROMPT, *tokens(2 * BLOCK, 5)], 1)
    assert engine.side.offer(longer, 10 * BLOCK) == NOTHING[Why.ABSENT]
    assert engine.side.offer(engine.add(tokens(20, 3), 1), 0) == NOTHING[Why.ABSENT]
    come_to_rest(engine)


@pytest.mark.parametrize("hints", [{"cpu_offload_load": False}, {"max_load_tokens": BLOCK - 1}], ids=str)
def test_what_its_client_does_not_want(engine: VirtualEngine, hints: dict[str, int]) -> None:
    assert engine.side.offer(engine.add(PROMPT, 1, hints=hints), 0) == NOTHING[Why.UNWANTED]
    come_to_rest(engine)


def test_a_prompt_of_one_token_is_computed(engines: Engines) -> None:
    """Even if it fills a block: with none of it left vLLM would ask again, for ever."""
    engine = engines(gpu_blocks=40, cpu_slots=60, block_size=1)
    warm(engine, [7])
    request = engine.add([7], 1)
    step_until(engine, request.is_finished)
    come_to_rest(engine)


def test_what_another_restore_brings(engine: VirtualEngine) -> None:
    hold(engine, LOAD)
    engine.add(PROMPT, 1)
    engine.step()
    assert engine.side.offer(engine.add(PROMPT, 1), 0) == COMING
    come_to_rest(engine)


def test_after_a_restore_that_failed_its_request_is_offered_no_other(engine: VirtualEngine) -> None:
    engine.copiers[0].force(LOAD, Fault.FAIL)
    victim = engine.add(PROMPT, 1)
    step_until(engine, lambda: engine.counts["load fail"] == 1)
    step_until(engine, lambda: not list(engine.side.restores))
    assert engine.side.offer(victim, 0) == NOTHING[Why.FAILED]
    come_to_rest(engine)


def test_during_an_outage(engine: VirtualEngine) -> None:
    warm(engine, tokens(20, 3))
    engine.copiers[0].force(LOAD, Fault.STUCK)
    engine.add(PROMPT, 1)
    step_until(engine, lambda: engine.side.restores.breaker.is_outage, 1000)
    assert engine.side.offer(engine.add(tokens(20, 3), 1), 0) == NOTHING[Why.PAUSED]
    come_to_rest(engine)


def test_one_answer_per_reason() -> None:
    assert {offer.why for offer in NOTHING.values()} == set(Why)
    assert all(offer == Offer(0, why) for why, offer in NOTHING.items())
