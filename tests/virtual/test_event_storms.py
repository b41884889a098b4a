"""A storm of KV events on vLLM's real scheduler: spread over steps, and none left when the engine sleeps."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from offload.testing.virtual import VirtualEngine
from offload.vllm import kv_events
from tests.virtual.driver import serve, tokens


def test_every_event_is_published_before_the_engine_sleeps(
    engines: Callable[..., VirtualEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES", 3)
    engine = engines(cpu_slots=64, gpu_blocks=40)
    engine.side.allocator._log.is_on = True
    steps = watch_events(engine)
    serve(engine, tokens(40))
    assert num_hashes(steps, BlockStored) == 10
    engine.reset()
    steps.clear()
    engine.add([0], 1)  # events travel on steps
    engine.drain()
    assert num_hashes(steps, BlockRemoved) == 10
    assert max(sum(len(event.block_hashes) for event in step) for step in steps) == 3


def watch_events(engine: VirtualEngine) -> list[list[Any]]:
    """What each step publishes from now on."""
    connector = engine.scheduler.connector
    steps: list[list[Any]] = []
    take_events = connector.take_events

    def watched() -> Any:
        events = list(take_events())
        steps.append(events)
        return events

    connector.take_events = watched
    return steps


def num_hashes(steps: list[list[Any]], kind: type) -> int:
    return sum(len(event.block_hashes) for step in steps for event in step if isinstance(event, kind))
