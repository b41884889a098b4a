"""Looks into an engine that is in this process, when it has nothing to do."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request

from offload.scheduler.breaker import CircuitBreaker
from tests.engine.answers import Prompt
from tests.engine.engine import SHORT, Engine
from tests.engine.worker_probe import ahead


class Comparison(NamedTuple):
    """Blocks that both the GPU's prefix cache and the pool have: how many, how far apart at most."""

    num_blocks: int
    largest_difference: float


class Usage(NamedTuple):
    """What jobs keep.

    Attributes:
        num_jobs: jobs in flight.
        num_stuck: of these, past their deadline.
        num_gpu_blocks: GPU blocks that cannot be given to anybody.
        num_resident: slots that can serve a hit.
        num_other: slots that are neither that nor free.
    """

    num_jobs: int
    num_stuck: int
    num_gpu_blocks: int
    num_resident: int
    num_other: int


def usage_at_rest(engine: Engine) -> Usage:
    """What is in use when all jobs have ended but those past their deadline."""
    while _scheduler_side(engine).has_pending_work:
        engine.ask([SHORT], 1)
    return usage(engine)


def usage(engine: Engine) -> Usage:
    """What is in use now; everything must agree."""
    side = _scheduler_side(engine)
    side.allocator.check_invariants()
    side.ledger.check_invariants()
    pool = engine.scheduler.kv_cache_manager.block_pool
    num_resident = side.allocator.num_resident
    return Usage(
        len(side.ledger),
        side.ledger.num_given_up,
        pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        num_resident,
        side.allocator.capacity - side.allocator.num_free - num_resident,
    )


def stored_slots(engine: Engine) -> list[int]:
    """The slots of the only chain in the pool, in its order."""
    [node] = [node for node in _scheduler_side(engine).allocator._tree.nodes() if node.hashes]
    slots: list[int] = node.slots[:, 0].tolist()
    return slots


def stop_time(engine: Engine) -> None:
    """From now on pauses of the circuit breakers end by ``pass_time`` alone."""
    for breaker in _breakers(engine):
        breaker._clock = partial(float, breaker._clock())


def pass_time(engine: Engine, seconds: float) -> None:
    """For all deadlines and pauses of the connector, so many seconds pass at once."""
    engine.probe("pass_time", seconds)
    for breaker in _breakers(engine):
        breaker._clock = ahead(breaker._clock, seconds)


def end_pauses(engine: Engine) -> None:
    """Nothing pauses, whatever has happened."""
    for breaker in _breakers(engine):
        breaker._pause, breaker._trial, breaker._num_failures = 0.0, None, 0


def _breakers(engine: Engine) -> list[CircuitBreaker]:
    side = _scheduler_side(engine)
    return [side.restores.breaker, side.stores.breaker]


def check_idle(engine: Engine) -> None:
    """Nothing is in flight, nothing is held, nobody is remembered, and everything agrees."""
    engine.settle()
    side = _scheduler_side(engine)
    side.allocator.check_invariants()
    side.ledger.check_invariants()
    assert not len(side.ledger), f"{len(side.ledger)} jobs in flight"
    assert not side.stores.holds.num_held, f"{side.stores.holds.num_held} GPU blocks held"
    assert not side.allocator.num_filling, f"{side.allocator.num_filling} slots filling"
    assert not side.allocator.num_leaving, f"{side.allocator.num_leaving} slots leaving"
    assert not len(side._turns) and not side._local_tokens and not side.stores.backlog, (
        "requests remembered that have ended"
    )
    assert not len(side.allocator._uncached), "GPU blocks of ended requests remembered"
    pool = engine.scheduler.kv_cache_manager.block_pool
    referenced = {
        block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null
    }
    assert not referenced, f"GPU blocks still referenced: {referenced}"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def compare_tiers(engine: Engine) -> Comparison:
    """Compare the KV of every prefix hash that both tiers have."""
    engine.settle()
    tree = _scheduler_side(engine).allocator._tree
    slot_of = {
        prefix_hash: int(slot)
        for node in tree.nodes()
        for prefix_hash, slot in zip(node.hashes, node.slots[:, 0], strict=True)
    }
    block_ids: list[int] = []
    slots: list[int] = []
    for block in engine.scheduler.kv_cache_manager.block_pool.blocks:
        prefix_hash = block.block_hash and get_block_hash(block.block_hash)
        if prefix_hash in slot_of:
            block_ids.append(block.block_id)
            slots.append(slot_of[prefix_hash])
    pairs = zip(engine.probe("read_blocks", block_ids), engine.probe("read_slots", slots), strict=True)
    differences = [
        np.abs(np.frombuffer(one, np.float32) - np.frombuffer(other, np.float32)).max()
        for one, other in pairs
    ]
    return Comparison(len(differences), float(max(differences, default=0)))


def gpu_blocks(engine: Engine, prompt: Prompt) -> list[bytes]:
    """The KV of a prompt's full blocks, as far as the GPU's prefix cache has them."""
    hasher = engine.llm.engine_core.engine_core.request_block_hasher
    request = Request("looked for", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    pool = engine.scheduler.kv_cache_manager.block_pool
    found = [pool.get_cached_block(each, [0]) for each in request.block_hashes]
    block_ids = [blocks[0].block_id for blocks in found if blocks]
    read: list[bytes] = engine.probe("read_blocks", block_ids)
    return read


def _scheduler_side(engine: Engine) -> Any:
    return engine.scheduler.connector._scheduler
