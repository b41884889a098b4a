"""The proxy's index of KV events beside vLLM's real scheduler: it says what the pool has, and the disk."""

import random
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import KVEventBatch

from offload.proxy.kv_index import EngineIndex, Prompt
from offload.proxy.kv_messages import events_in
from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import come_to_rest, depth_of, forget_gpu, publish_events, serve, tokens
from tests.virtual.test_event_tokens import LIMITS
from tests.virtual.test_tiers import BLOCK, POSITIONS, Tiered


@pytest.fixture(autouse=True)
def with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_events(monkeypatch)


def listen(engine: VirtualEngine, medium: str, index: EngineIndex) -> None:
    """Have the index hear what is published of a medium, as it would come over the network."""

    def publish(batch: Any) -> None:
        own = [each for each in batch.events if getattr(each, "medium", None) == medium]
        for event in events_in(msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=own))):
            assert event is not None
            index.hear(event)
        index.check_invariants()

    engine.scheduler.kv_event_publisher.publish = publish


def prompts(rng: random.Random, count: int) -> list[tuple[list[int], str | None]]:
    """That fork from each other, some with a salt."""
    made: list[list[int]] = [tokens(100)]
    for number in range(count - 1):
        cut = rng.randrange(0, 25) * BLOCK
        made.append([*rng.choice(made)[:cut], *tokens(rng.randrange(5, 60), first=number + 1)])
    return [(each, rng.choice([None, None, "salt"])) for each in made]


@pytest.mark.parametrize("as_numbers", ["0", "1"])
def test_it_says_what_the_pool_has(monkeypatch: pytest.MonkeyPatch, as_numbers: str) -> None:
    """While it evicts, whatever the hashes look like; then after a reset."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    rng, index = random.Random(as_numbers), EngineIndex(10_000)
    tiered = Tiered(num_places=2)
    engine = tiered.engine
    listen(engine, "CPU", index)
    asked = prompts(rng, 30)
    requests = []
    for prompt, salt in asked:
        requests.append(serve(engine, prompt, salt=salt))
        come_to_rest(engine)
        forget_gpu(engine)
        serve(engine, [1])
        for request, (ids, with_salt) in zip(requests, asked, strict=False):
            whole = list(request.all_token_ids)
            assert whole[: len(ids)] == ids
            found = index.depth(Prompt(whole, "", with_salt or ""))
            assert found == depth_of(engine, request) * BLOCK
    assert engine.side.allocator.num_evicted and len(index) > 50
    assert engine.reset()
    serve(engine, [1])
    come_to_rest(engine)
    assert not len(index)
    engine.close()


def test_it_says_what_the_disk_has() -> None:
    """Extents, of which the index knows nothing but their token ids."""
    rng, index = random.Random(3), EngineIndex(10_000)
    tiered = Tiered(num_places=12, limits=LIMITS)
    listen(tiered.engine, "STORAGE", index)
    directory, grid = tiered.tier.spills._directory, tiered.tier.spills._grid
    requests = []
    for prompt, _ in prompts(rng, 20):
        requests.append(serve(tiered.engine, prompt))
        come_to_rest(tiered.engine)
        forget_gpu(tiered.engine)
        serve(tiered.engine, [1])
        for request in requests:
            names = grid.names(request.block_hashes)
            found = index.depth(Prompt(list(request.all_token_ids), "", ""))
            assert found == directory.depth(names) * POSITIONS * BLOCK
    assert len(index) > 5
    tiered.engine.close()
