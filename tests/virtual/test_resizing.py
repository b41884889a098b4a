"""The pool grows and shrinks while vLLM's real scheduler makes steps, and every byte is right."""

from collections import Counter

import pytest

from offload.testing.virtual import run_seed
from offload.testing.virtual.resizes import Resizes, resize
from tests.virtual.driver import Engines, come_to_rest, forget_gpu, serve, tokens


def test_random_histories_with_resizes_at_random_moments() -> None:
    counts = Counter[str]()
    for seed in range(20):
        counts += run_seed(seed, turns=120, kind="resize").counts
    assert counts["resizes"] > 100
    assert counts["yields"] > 10
    assert counts["slots withdrawn"] and counts["steps of a larger pool"]


def num_slots(engine: object) -> int:
    return engine.side.allocator.capacity  # type: ignore[attr-defined,no-any-return]


def test_an_engine_that_shuts_down_does_not_wait_for_another_size(engines: Engines) -> None:
    engine = engines(cpu_slots=64, resizes=Resizes(128))
    serve(engine, tokens(8))
    come_to_rest(engine)
    assert not engine.side.has_pending_work
    resize(engine, 1.0)
    assert engine.side.has_pending_work
    engine.side._engine.is_ending = lambda: True  # type: ignore[method-assign]
    assert not engine.side.has_pending_work


@pytest.mark.parametrize("unit_slots", [1, 4])
def test_a_pool_shrinks_and_grows_and_serves_what_is_left(engines: Engines, unit_slots: int) -> None:
    engine = engines(cpu_slots=64, resizes=Resizes(128, unit_slots), gpu_blocks=40, num_ranks=2)
    for first in range(0, 400, 100):
        serve(engine, tokens(60, first))
    come_to_rest(engine)
    assert engine.side.allocator.num_resident > 32
    resize(engine, 32 / 128)
    serve(engine, tokens(8, 900))
    come_to_rest(engine)
    assert num_slots(engine) == 32
    assert engine.side.allocator.resizing.num_withdrawn == 96
    assert 0 < engine.side.allocator.num_resident <= 32
    engine.audit.check_pool()
    resize(engine, 1.0)
    serve(engine, tokens(8, 950))
    come_to_rest(engine)
    assert num_slots(engine) == 128
    for first in range(0, 400, 100):
        serve(engine, tokens(60, first))
    come_to_rest(engine)
    forget_gpu(engine)
    before = engine.counts["loads"]
    serve(engine, tokens(60, 300))
    assert engine.counts["loads"] == before + 1
    assert engine.side.allocator.num_resident > 40
