"""KV events of hybrid models on vLLM's real scheduler: they say what the pool has, as those of the GPU do."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from allocator.bags import BagState
from offload.testing.virtual import MODELS, VirtualEngine, draw_settings, run_seed
from offload.testing.virtual.drawing import with_model
from tests.virtual.driver import Engines, come_to_rest, serve, tokens

HYBRIDS = [model for model in MODELS if model != "plain"]
KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class Listener:
    """Replays what an engine publishes from now on.

    Attributes:
        held: hashes by vLLM's group.
        num_stored: hashes that were published as stored, ever.
        num_compared: of these, blocks that the GPU's cache had published before.
    """

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self.held: defaultdict[int, set[Any]] = defaultdict(set)
        self.num_stored = self.num_compared = 0
        self._of_gpu: dict[Any, Any] = {}
        self._parents: dict[Any, Any] = {}
        engine.side.allocator._log.is_on = True
        engine.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        engine.scheduler.kv_event_publisher.publish = self._hear_all

    def check(self) -> None:
        """All that is published is there, and all that is there and has a name is published."""
        connector = self._engine.scheduler.connector
        assert not connector._events.is_behind
        for group_id, expected in expected_hashes(self._engine).items():
            assert self.held[group_id] == expected, f"group {group_id}"

    def _hear_all(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) == "CPU":
                self._hear(event)
            elif isinstance(event, BlockStored):
                self._of_gpu.update(((event.group_idx, each), words_of(event)) for each in event.block_hashes)

    def _hear(self, event: Any) -> None:
        group = self._engine.settings.groups[event.group_idx]
        held, hashes = self.held[event.group_idx], set(event.block_hashes)
        assert event.medium == "CPU" and len(hashes) == len(event.block_hashes) > 0
        if isinstance(event, BlockRemoved):
            assert hashes <= held, "what is not there was removed"
            held -= hashes
            return
        assert isinstance(event, BlockStored)
        assert not hashes & held, "what is there was stored"
        assert event.kv_cache_spec_kind == KINDS[group.kind]
        assert event.kv_cache_spec_sliding_window == (group.reach if group.kind == "window" else None)
        size = self._engine.side.block_size if group.kind == "full" else group.block_size
        assert event.block_size == size
        held |= hashes
        self.num_stored += len(hashes)
        for each, parent in zip(
            event.block_hashes, [event.parent_block_hash, *event.block_hashes], strict=False
        ):
            assert self._parents.setdefault(each, parent) == parent, "groups differ in what comes before"
            of_gpu = self._of_gpu.get((event.group_idx, each))
            if of_gpu is not None and group.block_size == self._engine.side.block_size:
                assert words_of(event) == of_gpu
                self.num_compared += 1


def words_of(event: BlockStored) -> tuple[Any, ...]:
    """What is said of each of its blocks."""
    return event.block_size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window


def expected_hashes(engine: VirtualEngine) -> dict[int, set[Any]]:
    """By group: of blocks that end where a position of the pool ends. Token by token, from the tree."""
    size, groups = engine.side.block_size, engine.settings.groups
    expected: dict[int, set[Any]] = {group_id: set() for group_id in range(len(groups))}
    for node in engine.side.allocator._tree.nodes():
        path, upper = list(node.hashes), node.parent
        while upper is not None and upper.parent is not None:
            path, upper = [*upper.hashes, *path], upper.parent
        names = [maybe_convert_block_hash(BlockHash(each)) for each in path]
        depths = [each.depth for each in node.bags or () if each.state is BagState.COMPLETE]
        for group_id, group in enumerate(groups):
            if group.kind == "full":
                expected[group_id].update(names[node.start : node.start + node.resident])
                continue
            for depth in depths:
                first = group.first_read(depth * size)
                for position in range(depth):
                    if (position + 1) * size > first:
                        expected[group_id].add(names[position])
    return expected


@pytest.mark.parametrize("model", HYBRIDS)
def test_trap_89_events_of_every_group_tell_what_the_pool_has(engines: Engines, model: str) -> None:
    """Prompts that fork, in a pool that is too small for them, then a reset."""
    cpu_slots = 90 if any(group.kind == "full" for group in MODELS[model]) else 20
    engine = engines(groups=MODELS[model], gpu_blocks=120, cpu_slots=cpu_slots, chunk=16)
    listener, rng = Listener(engine), random.Random(model)
    for _ in range(30):
        shared = rng.choice([0, 16, 40, 61])
        serve(engine, [*tokens(shared), *tokens(rng.randrange(20, 60), first=rng.randrange(1, 8))])
        come_to_rest(engine)
        listener.check()
    assert listener.num_stored > 50 and any(listener.held.values())
    assert listener.num_compared or all(group.block_size < engine.side.block_size for group in MODELS[model])
    assert engine.side.allocator.num_evicted + engine.side.allocator.num_thinned
    engine.reset()
    serve(engine, [0])
    assert not any(listener.held.values())
    listener.check()


@pytest.mark.parametrize("model", ["window", "windows", "mixed", "mamba_window"])
def test_random_runs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that fail, aborts, preemptions, resets."""
    listeners: list[Listener] = []
    original = VirtualEngine.__init__

    def listening(engine: VirtualEngine, *arguments: Any) -> None:
        original(engine, *arguments)
        listeners.append(Listener(engine))

    monkeypatch.setattr(VirtualEngine, "__init__", listening)
    for seed in range(6):
        rng = random.Random(f"events {model} {seed}")
        settings = replace(draw_settings(rng), cpu_slots=rng.choice([20, 60]))
        run_seed(seed, turns=100, settings=with_model(settings, model, rng))
    for listener in listeners:
        listener._engine.drain()
        listener.check()
    assert sum(listener.num_stored for listener in listeners) > 100
