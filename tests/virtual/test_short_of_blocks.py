"""A request whose restore failed needs GPU blocks, and others that are restored hold them."""

from itertools import count

import pytest
from vllm.v1.request import Request

from offload.messages import LOAD
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import MODELS, VirtualEngine
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    forget_gpu,
    forget_gpu_while_held,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
)

FAILING, BESIDE, LATER = tokens(48), tokens(40, first=1), tokens(28, first=2)
NUM_BLOCKS = len(FAILING) // 4 + len(BESIDE) // 4 + 2
"""Both fit, with a block more for each."""


def one_failed(engines: Engines, gpu_blocks: int) -> tuple[VirtualEngine, Request, Request]:
    """A request whose restore has failed, and one behind it whose restore is under way."""
    engine = engines(gpu_blocks=gpu_blocks + 1, cpu_slots=64)
    for document in FAILING, BESIDE, LATER:
        serve(engine, document)
        forget_gpu(engine)
    engine.copiers[0].force(LOAD, Fault.REFUSE, Fault.NONE)
    hold(engine, LOAD)
    failed, restored = engine.add([*FAILING, 1], 4), engine.add([*BESIDE, 1], 4)
    step_until(engine, lambda: engine.side.restores.left_over()["requests whose restores failed"] != [])
    engine.step()
    assert restored.status == LOADING
    return engine, failed, restored


def test_it_is_computed_at_once_if_there_are_enough(engines: Engines) -> None:
    engine, failed, restored = one_failed(engines, 2 * NUM_BLOCKS)
    step_until(engine, failed.is_finished)
    assert restored.status == LOADING
    come_to_rest(engine)


def test_if_there_are_too_few_the_other_goes_on(engines: Engines) -> None:
    """vLLM looks at none behind a request that it has too few blocks for."""
    engine, failed, restored = one_failed(engines, NUM_BLOCKS)
    engine.step()
    assert not failed.num_output_tokens, "this meant to leave it too few blocks"
    release(engine)
    step_until(engine, lambda: failed.is_finished() and restored.is_finished())
    come_to_rest(engine)


def test_no_later_restore_takes_them_from_it(engines: Engines) -> None:
    engine, failed, restored = one_failed(engines, NUM_BLOCKS)
    num_loads = engine.counts["loads"]
    later = [engine.add([*LATER, number], 1) for number in range(20)]
    for _ in range(5):
        engine.step()
        assert engine.counts["loads"] == num_loads
        assert [engine.side.offer(request, 0).tokens for request in later] == [None] * len(later)
    release(engine)
    step_until(engine, failed.is_finished)
    assert restored.is_finished() and not any(request.is_finished() for request in later)
    step_until(engine, lambda: all(request.is_finished() for request in later))
    assert engine.counts["loads"] > num_loads
    come_to_rest(engine)


def test_nobody_waits_for_one_that_is_aborted(engines: Engines) -> None:
    engine, failed, _ = one_failed(engines, NUM_BLOCKS)
    engine.abort(failed.request_id)
    later = engine.add([*LATER, 1], 1)
    step_until(engine, lambda: later.status == LOADING)
    come_to_rest(engine)


LARGE = tokens(180)
SMALL = [tokens(40, first=number) for number in range(3, 33)]


@pytest.mark.parametrize("model", ["window", "mamba_window"])
def test_a_large_restore_begins_before_small_ones_that_come_later(engines: Engines, model: str) -> None:
    """Models with windows leave vLLM more to reserve, so restores wait for each other."""
    engine = engines(
        groups=MODELS[model],
        gpu_blocks=101,
        cpu_slots=4000,
        chunk=64,
        max_num_seqs=16,
        max_model_len=200,
        copies=CopySchedule(longest_delay=6),
    )
    for document in LARGE, *SMALL:
        warm(engine, document)
    numbers = count()

    def ask_more() -> Request:
        number = next(numbers)
        return engine.add([*SMALL[number % len(SMALL)], number, 3], 4)

    before = [ask_more() for _ in range(12)]
    engine.step()
    large = engine.add([*LARGE, 9], 1)
    later = []
    while not large.is_finished():
        later.append(ask_more())
        engine.step()
        forget_gpu_while_held(engine)
    assert sum(request.is_finished() for request in later) <= len(before)
    assert engine.counts["loads"] > len(before)
    come_to_rest(engine)
