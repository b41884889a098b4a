"""Short words for the tests that drive a virtual engine by hand."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from offload.messages import Route
from offload.scheduler.quiet import QuietSide
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.vllm import connector

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


Engines = Callable[..., VirtualEngine]
"""The fixture ``engines``: makes one with these ``VirtualSettings``."""


def make_engine(**settings: Any) -> VirtualEngine:
    return VirtualEngine(VirtualSettings(**settings), random.Random(0))


def publish_events(patch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on publish KV events of the pool, and of what is below it."""

    def with_events(*arguments: Any, **named: Any) -> QuietSide:
        return QuietSide(*arguments, **{**named, "record_events": True})

    patch.setattr(connector, "QuietSide", with_events)


def tokens(count: int, first: int = 0) -> list[int]:
    """Prompts with different ``first`` share no prefix."""
    return [(first * 31 + 7 * index) % 512 for index in range(count)]


class Counts:
    """What an engine's connector has counted since this was made, by the keys of ``Metrics``."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._metrics = engine.side.metrics
        self.clear()

    def __getitem__(self, key: str) -> float:
        return self._metrics.totals.get(key, 0) - self._before.get(key, 0)

    def clear(self) -> None:
        """It begins again now."""
        self._before = self._metrics.totals


def step_until(engine: VirtualEngine, done: Callable[[], bool], max_steps: int = 200) -> None:
    for _ in range(max_steps):
        if done():
            return
        engine.step()
    raise AssertionError(f"nothing of the kind within {max_steps} steps")


def serve(engine: VirtualEngine, prompt: list[int], max_tokens: int = 1, **options: Any) -> Request:
    """Send one request and let the engine come to rest."""
    request = engine.add(prompt, max_tokens, **options)
    engine.drain(500)
    assert request.is_finished()
    return request


def finish(engine: VirtualEngine, prompt: list[int], max_tokens: int = 1, **options: Any) -> Request:
    """Send one request and step until it is over; what is copied may still be under way."""
    request = engine.add(prompt, max_tokens, **options)
    step_until(engine, request.is_finished)
    return request


def forget_gpu(engine: VirtualEngine) -> None:
    """Empty the GPU's own prefix cache, so that the next hit can only come from the pool."""
    assert engine.reset(connector=False)


def forget_gpu_while_held(engine: VirtualEngine) -> None:
    """As ``forget_gpu``, while stores hold blocks: nothing of it is found again."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        pool._maybe_evict_cached_block(block)


def warm(engine: VirtualEngine, prompt: list[int]) -> None:
    """Put ``prompt`` into the pool and nowhere else."""
    serve(engine, prompt)
    forget_gpu(engine)


def hold(engine: VirtualEngine, way: Route, *ranks: int) -> None:
    """Copies of that direction wait, on these ranks or on all."""
    for rank in ranks or range(len(engine.copiers)):
        engine.copiers[rank].held.add(way)


def release(engine: VirtualEngine) -> None:
    """All copies go on."""
    for copier in engine.copiers:
        copier.held.clear()


def depth_of(engine: VirtualEngine, request: Request) -> int:
    """Leading blocks of the request that are resident in the pool."""
    return engine.side.allocator.resident_depth(request.block_hashes)


def table_of(engine: VirtualEngine, request: Request) -> list[int]:
    """GPU blocks of the request, as the scheduler has them."""
    blocks: list[int] = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    return blocks


def come_to_rest(engine: VirtualEngine) -> None:
    """Everything ends, and nobody holds anything."""
    release(engine)
    engine.drain(1000)
    engine.audit.check_drained()


def watch(engine: VirtualEngine) -> dict[str, int]:
    """Tokens computed per request from now on; what comes from a cache is not in it."""
    computed: dict[str, int] = {}
    execute = engine.runner.execute

    def watched(output: Any, generation: int) -> Any:
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            computed[req_id] = computed.get(req_id, 0) + num_scheduled
        return execute(output, generation)

    engine.runner.execute = watched  # type: ignore[method-assign]
    return computed
