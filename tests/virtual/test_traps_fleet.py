"""Traps of engines whose ranks share the tokens of a block, or a prompt; numbered as in docs/traps.md."""

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from offload.testing.virtual import draw_settings, run_seed
from tests.virtual.driver import Engines, come_to_rest, depth_of, forget_gpu, serve, tokens, watch

SHAPES = {
    "dcp": {"num_ranks": 2, "dcp": 2},
    "dcp of some": {"num_ranks": 6, "dcp": 3},
    "pcp": {"num_ranks": 2, "pcp": 2},
    "pcp and dcp": {"num_ranks": 2, "pcp": 2, "dcp": 2},
    "stages": {"num_ranks": 2, "stages": 2},
}
ANY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


@ANY_SHAPE
def test_trap_78_and_79_a_block_is_as_long_as_the_scheduler_says(
    engines: Engines, shape: dict[str, Any]
) -> None:
    """Offers, stores, events and sizes count the tokens of all ranks that share a block."""
    engine = engines(log_stats=True, **shape)
    size = 4 * engine.settings.dcp
    engine.side.allocator._log.is_on = True
    connector, seen = engine.scheduler.connector, []
    take_events = connector.take_events
    connector.take_events = lambda: seen.extend(events := list(take_events())) or events
    prompt = tokens(5 * size + 1)
    request = serve(engine, prompt)
    assert depth_of(engine, request) == len(request.block_hashes) == 5
    stored = [event for event in seen if isinstance(event, BlockStored)]
    assert {event.block_size for event in stored} == {size} == {engine.side.block_size}
    facts = [rank.side.facts for rank in engine.ranks]
    slot_bytes = sum(fact.slot_bytes // fact.num_sharing for fact in facts)
    assert {fact.num_sharing for fact in facts} == {2 if shape == SHAPES["pcp"] else 1}
    assert sum(copier.copied.total() for copier in engine.copiers) == 5 * slot_bytes
    assert connector._pool_size.slot_bytes == slot_bytes, "in the metrics"
    forget_gpu(engine)
    computed = watch(engine)
    again = serve(engine, prompt)
    assert computed[again.request_id] == 1 and engine.counts["loads"] == 1
    come_to_rest(engine)


@ANY_SHAPE
@pytest.mark.parametrize("overlapped", [False, True], ids=["step by step", "overlapped"])
def test_random_runs_of_such_engines(shape: dict[str, Any], overlapped: bool) -> None:
    """Every byte that a rank attends to is right, through faults, aborts, preemptions and resets."""
    num_loads = 0
    for seed in range(4000, 4004):
        settings = draw_settings(random.Random(seed), overlapped=overlapped)
        settings = replace(settings, **{"dcp": 1} | shape)
        num_loads += run_seed(seed, turns=150, settings=settings).counts["loads"]
    assert num_loads
