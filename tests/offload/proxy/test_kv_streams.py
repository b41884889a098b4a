"""Policy ``prefix`` over KV events that vLLM's own publisher sends, and where some are missed."""

import asyncio
import random
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

from offload.proxy import kv_streams
from offload.proxy.kv_messages import events_in
from offload.proxy.kv_streams import KvStreams
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.policies import Request
from offload.proxy.prefixes import PrefixPolicy
from offload.proxy.settings import KvSource, ProxySettings
from offload.testing.upstream import Upstream
from offload.testing.upstream.words import encode
from tests.offload.proxy.kit import PROMPT, Stand, on_a_loop, stand, until
from tests.offload.proxy.test_admin import admin
from tests.offload.proxy.test_kv_index import BLOCK, IDS, batch, hashes_of, removed, stored

URL = "http://127.0.0.1:1"
HASHES = hashes_of(IDS)
LONG = {"locate_seconds": 30.0, "tokenize_seconds": 30.0, "history_tokens": 0}
REQUEST = Request("/v1/completions", "", len(IDS), IDS, (), {}, None)


class Publisher:
    """An engine's, and a number for each message."""

    def __init__(self, folder: str, name: str = "a", *, replays: bool = True, buffer: int = 1000) -> None:
        self.source = KvSource(f"ipc://{folder}/{name}", f"ipc://{folder}/{name}.again" if replays else None)
        self._own = ZmqEventPublisher(0, *self.source, buffer_steps=buffer)

    def tell(self, *events: Any) -> None:
        self._own.publish(KVEventBatch(ts=0.0, events=list(events)))

    async def told(self, count: int) -> None:
        """Wait until so many messages can be had again."""
        await until(lambda: bool(self._own._buffer) and self._own._buffer[-1][0] == count - 1)

    def end(self) -> None:
        self._own.shutdown()


@asynccontextmanager
async def following(source: KvSource, **more: Any) -> AsyncIterator[KvStreams]:
    """The index of one engine."""
    engines = ((URL, "both"),)
    settings = ProxySettings(engines=engines, kv_events=((URL, source),), **more)
    streams = KvStreams(settings, ProxyMetrics())
    streams.open()
    yield streams
    streams.check_invariants()
    await streams.close()


async def depth(streams: KvStreams) -> int | None:
    return (await streams.depths(IDS, REQUEST, [URL])).get(URL)


def count(streams: KvStreams, what: str) -> float:
    value = streams._metrics.registry.get_sample_value(
        "kv_offload_proxy_kv_event_messages_total", {"outcome": what}
    )
    return value or 0.0


async def hears(streams: KvStreams, publisher: Publisher) -> None:
    """Tell of something until it was heard: who subscribes late has missed some."""
    async with asyncio.timeout(30):
        while not count(streams, "taken"):
            publisher.tell(AllBlocksCleared())
            await asyncio.sleep(0.01)


@on_a_loop
async def test_what_was_told_before_and_after_is_known() -> None:
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder)
        for start in range(0, 6, 2):
            publisher.tell(stored(IDS[: (start + 2) * BLOCK], start * BLOCK))
        await publisher.told(3)
        async with following(publisher.source) as streams:
            await until(lambda: count(streams, "replayed") == 3)
            assert await depth(streams) == 6 * BLOCK
            assert streams.told(URL) == {"blocks": {"CPU": 6}, "is_whole": True, "left_out": 0}
            publisher.tell(removed(hashes_of(IDS)[4:6]))
            while await depth(streams) != 4 * BLOCK:
                await asyncio.sleep(0.001)
            publisher.tell(removed(hashes_of(IDS)[:4]))
            while await depth(streams) != 0:
                await asyncio.sleep(0.001)
            assert not count(streams, "unreadable")
        publisher.end()


@on_a_loop
async def test_without_a_replay_what_was_missed_is_not_known() -> None:
    """It says nothing of prompts that it knows nothing of: the engine may have them."""
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder, replays=False)
        publisher.tell(stored(IDS[: 2 * BLOCK]))
        await publisher.told(1)
        async with following(publisher.source) as streams:
            await hears(streams, publisher)
            assert await depth(streams) is None
            publisher.tell(stored(IDS[: 4 * BLOCK], 2 * BLOCK), stored(IDS[: 3 * BLOCK]))
            while await depth(streams) != 3 * BLOCK:
                await asyncio.sleep(0.001)
        publisher.end()


def frames(number: int, *events: Any) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), batch(*events)]


@on_a_loop
async def test_a_gap_is_filled_again() -> None:
    """Messages 1 to 3 are missed; the publisher has them still."""
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder)
        told = [stored(IDS[: (number + 1) * BLOCK], number * BLOCK) for number in range(5)]
        for each in told:
            publisher.tell(each)
        await publisher.told(5)
        metrics, context = ProxyMetrics(), zmq.asyncio.Context()
        stream = kv_streams._Stream(URL, publisher.source, 100, metrics)
        for number in (0, 4, 4, 2):
            if number == 2:
                stream._live = 1  # what a replay had comes again, late
            await stream.take(context, frames(number, told[number]))
            assert len(stream.index) == (5 if number else 1)
        assert stream.index.is_whole
        context.destroy(linger=0)
        publisher.end()


@on_a_loop
async def test_a_gap_that_nobody_fills_empties_the_index() -> None:
    """No replay endpoint; one at which nobody is; one that keeps too little."""
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder, buffer=1)
        for number in range(5):
            publisher.tell(stored(IDS[: (number + 1) * BLOCK], number * BLOCK))
        await publisher.told(5)
        nobody = f"ipc://{folder}/nobody"
        for replay in (None, nobody, publisher.source.replay):
            context = zmq.asyncio.Context()
            stream = kv_streams._Stream(URL, KvSource(nobody, replay), 100, ProxyMetrics())
            await stream.take(context, frames(0, stored(IDS[:BLOCK])))
            assert len(stream.index) == 1 and stream.index.is_whole
            await stream.take(context, frames(4, stored(IDS[: 2 * BLOCK], BLOCK), stored(IDS[2 * BLOCK :])))
            assert not stream.index.is_whole
            assert len(stream.index) == (38 if replay != publisher.source.replay else 0)
            await stream.take(context, frames(5, stored(IDS[: 2 * BLOCK])))
            assert len(stream.index) >= 2
            context.destroy(linger=0)
        publisher.end()


@on_a_loop
async def test_an_engine_that_begins_anew_has_nothing() -> None:
    context = zmq.asyncio.Context()
    stream = kv_streams._Stream(URL, KvSource("ipc:///nowhere"), 100, ProxyMetrics())
    for number in range(3):
        await stream.take(context, frames(number, stored(IDS[: (number + 1) * BLOCK], number * BLOCK)))
    await stream.take(context, frames(0, stored(IDS[:BLOCK])))
    assert len(stream.index) == 1 and stream.index.is_whole
    await stream.take(context, frames(1, stored(IDS[: 2 * BLOCK], BLOCK)))
    await stream.take(context, frames(1, stored(IDS[: 2 * BLOCK])))
    assert len(stream.index) == 2 and not stream.index.is_whole, "its first message was missed"
    context.destroy(linger=0)


class Engine:
    """What an engine has and has told, and how many of its messages it keeps."""

    def __init__(self, num_kept: int) -> None:
        self.told = deque[list[bytes]](maxlen=num_kept)
        self.begin()

    def begin(self) -> None:
        """It starts with nothing."""
        self.has = set[int]()  # blocks of the prompt
        self.number = 0
        self.told.clear()

    def tell(self, rng: random.Random) -> list[bytes]:
        """The next message: of blocks that it stores or lets go."""
        if self.has and rng.random() < 0.4:
            gone = rng.sample(sorted(self.has), rng.randint(1, len(self.has)))
            self.has.difference_update(gone)
            event: Any = removed([HASHES[each] for each in gone])
        else:
            start = rng.choice([0, *(each + 1 for each in self.has if each < 38)])
            stop = rng.randint(start + 1, 40)
            self.has.update(range(start, stop))
            event = stored(IDS[: stop * BLOCK], start * BLOCK)
        message = frames(self.number, event)
        self.told.append(message)
        self.number += 1
        return message


class Replayed(kv_streams._Stream):
    """It has messages again from the engine itself, not from its socket."""

    def __init__(self, engine: Engine) -> None:
        replay = "ipc:///nowhere" if engine.told.maxlen else None
        super().__init__(URL, KvSource("ipc:///nowhere", replay), 100, ProxyMetrics())
        self._engine = engine

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        for _, number, payload in list(self._engine.told):
            await self._take_again(int.from_bytes(number, "big"), payload)
        return True


@pytest.mark.parametrize("num_kept", [0, 2, 1000])
@pytest.mark.parametrize("seed", range(5))
@on_a_loop
async def test_nothing_is_believed_that_an_engine_has_not(seed: int, num_kept: int) -> None:
    """Messages are lost and engines begin anew at random. What is whole is all that the engine has."""
    rng, engine, context = random.Random(seed), Engine(num_kept), zmq.asyncio.Context()
    stream, num_whole = Replayed(engine), 0
    for _ in range(300):
        is_new = rng.random() < 0.02
        if is_new:
            engine.begin()
        message = engine.tell(rng)
        if is_new or rng.random() < 0.9:  # numbers alone do not tell of a beginning that nobody heard
            await stream.take(context, message)
            known = {each for place in stream.index._places.values() for each in place.by_hash}
            has = {HASHES[each] for each in engine.has}
            assert known <= has
            assert not stream.index.is_whole or known == has
            num_whole += stream.index.is_whole
    assert num_whole > 0
    assert num_kept < 300 or num_whole > 200
    context.destroy(linger=0)


@on_a_loop
async def test_messages_that_are_none_do_no_harm() -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PUB)
        socket.bind(f"ipc://{folder}/a")
        async with following(KvSource(f"ipc://{folder}/a")) as streams:
            async with asyncio.timeout(30):
                while not count(streams, "unreadable"):
                    await socket.send_multipart([b"", b"what?"])
                    await asyncio.sleep(0.01)
            bad = {"type": "BlockStored", "block_hashes": "no"}
            for number, payload in enumerate((b"", b"\xc1", batch(bad), batch(stored(IDS[:BLOCK]), bad))):
                await socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            while await depth(streams) != BLOCK:
                await asyncio.sleep(0.001)
            assert streams.told(URL) == {"blocks": {"CPU": 1}, "is_whole": False, "left_out": 0}
            assert count(streams, "taken") == 2
        context.destroy(linger=0)


@asynccontextmanager
async def fleet(folder: str, count: int = 3, **more: Any) -> AsyncIterator[tuple[Stand, list[Publisher]]]:
    """A proxy in front of engines that publish."""
    publishers = [Publisher(folder, str(number)) for number in range(count)]
    engines = [Upstream(f"d{number}", role="both") for number in range(count)]
    async with stand(decode=engines, both=True, policy=PrefixPolicy(), admin_port=0, **LONG, **more) as made:
        for engine, publisher in zip(engines, publishers, strict=True):
            await admin(made, "POST", "/engines/remove", url=engine.url)
            ends = list(publisher.source)
            status, _ = await admin(made, "POST", "/engines", url=engine.url, kv_events=ends)
            assert status == 200
        yield made, publishers
    for publisher in publishers:
        publisher.end()


async def goes_to(made: Stand, ids: list[int]) -> int:
    before = [len(each.of("/v1/completions")) for each in made.decode]
    told = await made.ask(max_tokens=1, prompt=ids)
    assert told.status == 200, told.body
    after = [len(each.of("/v1/completions")) for each in made.decode]
    [where] = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
    return where


@on_a_loop
async def test_a_prompt_goes_to_the_engine_that_told_of_most_of_it() -> None:
    """The GPU's cache counts as the pool does. One that is removed is heard no more."""
    with tempfile.TemporaryDirectory() as folder:
        async with fleet(folder) as (made, publishers):
            ids = encode(PROMPT)
            whole = len(ids) // BLOCK * BLOCK
            publishers[0].tell(stored(ids[: 4 * BLOCK]))
            publishers[1].tell(stored(ids[: 4 * BLOCK]), stored(ids[:whole], 4 * BLOCK, medium="GPU"))
            publishers[2].tell(stored([7, *ids]))
            events = made.proxy.core.events

            def blocks(engine: int) -> int:
                told = events.told(made.decode[engine].url)
                return 0 if told is None else sum(told["blocks"].values())

            await until(lambda: blocks(0) == 4 and blocks(1) == whole // BLOCK and blocks(2) > 0)
            assert [await goes_to(made, ids) for _ in range(3)] == [1, 1, 1]
            assert await goes_to(made, [7, *ids]) == 2
            publishers[1].tell(AllBlocksCleared(), removed(hashes_of(ids)[2:4]))
            await until(lambda: blocks(1) == 2)
            assert await goes_to(made, ids) == 0
            await admin(made, "POST", "/engines/remove", url=made.decode[0].url)
            assert events.told(made.decode[0].url) is None
            assert await goes_to(made, ids) == 1
            events.check_invariants()


@on_a_loop
async def test_what_is_forgotten_of_an_engine_that_goes_on_is_asked_for_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder)
        publisher.tell(stored(IDS[: 2 * BLOCK]))
        await publisher.told(1)
        async with following(publisher.source) as streams:
            await until(lambda: count(streams, "replayed") == 1)
            streams.forget(URL)
            streams.forget(URL)
            assert await depth(streams) is None
            await until(lambda: count(streams, "replayed") == 2)
            assert await depth(streams) == 2 * BLOCK
            streams.forget(URL)
        assert not streams._streams[URL].is_running, "it was begun after the end"
        publisher.end()


@on_a_loop
async def test_an_end_comes_through_wherever_a_replay_stands() -> None:
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(folder)
        for _ in range(20):
            publisher.tell(stored(IDS[: 2 * BLOCK]))
        await publisher.told(20)
        async with following(publisher.source) as streams:
            for number in range(0, 60, 4):
                before = count(streams, "replayed")
                streams.forget(URL)
                await until(lambda before=before: count(streams, "replayed") > before)  # type: ignore[misc]
                for _ in range(number):
                    await asyncio.sleep(0)
            streams.forget(URL)
            before = count(streams, "replayed")
            await until(lambda: count(streams, "replayed") >= before + 20)
            assert await depth(streams) == 2 * BLOCK
        publisher.end()


@pytest.mark.parametrize(
    "part", [{"medium": "x" * 2000}, {"lora_name": "x" * 2000}, {"block_hashes": [b"x" * 65]}], ids=str
)
def test_parts_of_events_that_are_too_large_are_not_kept(part: dict[str, Any]) -> None:
    event = msgspec.structs.replace(stored(IDS[:BLOCK]), **part)
    assert list(events_in(msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[event])))) == [None]


def test_a_message_of_too_many_events_is_refused_by_its_head() -> None:
    head = b"\x92\xcb" + bytes(8) + b"\xdd" + (1 << 18).to_bytes(4, "big")
    with pytest.raises(ValueError, match="262144 events in one message, and 131072 are read at most"):
        list(events_in(head + b"\xc0" * (1 << 18)))
