"""KV events of the pool reach vLLM's publisher; and blocks of generated tokens stay out where told to."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, prompt_of
from tests.engine.conftest import running
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

_WAIT_SECONDS = 120

POOL_BLOCKS = 24


class Mirror:
    """What a subscriber believes to be in the pool."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.parents: dict[int | bytes, int | bytes | None] = {}
        """Prefix hash to the one before it, in the order stored."""
        self.on_gpu: list[int | bytes] = []
        """Prefix hashes that the GPU's prefix cache reported, in that order."""

    def receive(self, milliseconds: int) -> bool:
        """Follow one message; False if none came in that time."""
        if not self._socket.poll(milliseconds):
            return False
        _topic, _number, payload = self._socket.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            self._follow(event)
        return True

    def wait_for(self, num_blocks: int) -> None:
        """Follow messages until the pool holds that many blocks."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while len(self.parents) != num_blocks and time.monotonic() < deadline:
            self.receive(100)
        assert len(self.parents) == num_blocks

    def _follow(self, event: dict[str, Any]) -> None:
        kind, medium = event["type"], event.get("medium")
        if kind == "BlockStored" and medium == "GPU":
            self.on_gpu += event["block_hashes"]
        if medium != "CPU":
            return
        if kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                self.parents.pop(block_hash, None)
            return
        assert kind == "BlockStored"
        assert event["block_size"] == BLOCK_SIZE
        parent = event["parent_block_hash"]
        for block_hash in event["block_hashes"]:
            self.parents[block_hash] = parent
            parent = block_hash


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are too long for a socket's name
        yield f"ipc://{directory}/events"


@pytest.fixture(scope="module")
def small_engine(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A pool of 24 blocks that takes prompts only, and publishes what it holds."""
    extra_config = {"cpu_gib": POOL_BLOCKS * BLOCK_BYTES / 2**30, "store_decode_blocks": False}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with running(tmp_path_factory, extra_config, in_process=True, kv_events_config=events) as engine:
        assert engine.run(Engine.settle)["pool_blocks"] == POOL_BLOCKS
        yield engine


@pytest.fixture
def mirror(small_engine: EngineProcess, endpoint: str) -> Iterator[Mirror]:
    """A subscriber that receives, of an engine that has nothing cached."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        mirror = Mirror(socket)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not mirror.receive(10):
            assert time.monotonic() < deadline, "no event was published"
            assert small_engine.run(Engine.forget_all)
            small_engine.run(Engine.ask, [prompt_of(BLOCK_SIZE + 1, seed=40)], 1)
        assert small_engine.run(Engine.forget_all)
        small_engine.run(Engine.ask, [prompt_of(7 * BLOCK_SIZE + 1, seed=45)], 1)
        small_engine.run(Engine.settle)
        mirror.wait_for(7)
        assert small_engine.run(Engine.forget_all)
        small_engine.run(Engine.settle)
        mirror.wait_for(0)
        mirror.on_gpu.clear()
        yield mirror


def test_events_tell_what_the_pool_holds(small_engine: EngineProcess, mirror: Mirror) -> None:
    """One prompt is stored, another pushes out its tail, a reset everything."""
    first, second = prompt_of(15 * BLOCK_SIZE + 3, seed=41), prompt_of(15 * BLOCK_SIZE + 3, seed=42)
    small_engine.run(Engine.ask, [first])
    small_engine.run(Engine.settle)
    mirror.wait_for(15)
    stored = list(mirror.parents)
    assert stored == mirror.on_gpu, "not the hashes by which the engine knows the blocks"
    assert list(mirror.parents.values()) == [None, *stored[:-1]]

    small_engine.run(Engine.ask, [second])
    counters = small_engine.run(Engine.settle)
    assert counters["pool_used_blocks"] == POOL_BLOCKS
    assert counters["evicted_blocks"] == 2 * 15 - POOL_BLOCKS
    mirror.wait_for(POOL_BLOCKS)
    kept = [block_hash for block_hash in stored if block_hash in mirror.parents]
    assert kept == stored[: POOL_BLOCKS - 15], "not the tail of the older prompt was evicted"

    assert small_engine.run(Engine.forget_all)
    small_engine.run(Engine.settle)
    mirror.wait_for(0)


def test_generated_tokens_are_not_stored(small_engine: EngineProcess) -> None:
    assert small_engine.run(Engine.forget_all)
    question = prompt_of(3 * BLOCK_SIZE + 4, seed=43)
    [answer] = small_engine.run(Engine.ask, [question], 70)
    assert small_engine.run(Engine.settle)["pool_used_blocks"] == 3
    assert small_engine.run(Engine.forget_gpu)
    turn = [*question, *answer.tokens, *prompt_of(40, seed=44)]
    [second] = small_engine.run(Engine.ask, [turn])
    assert second.num_cached == 3 * BLOCK_SIZE
    assert small_engine.run(Engine.settle)["pool_used_blocks"] == len(turn) // BLOCK_SIZE
