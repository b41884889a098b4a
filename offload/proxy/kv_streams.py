"""KV events of engines, as vLLM's ZMQ publisher sends them, into an index of each engine."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from offload.proxy.kv_index import EngineIndex, Prompt
from offload.proxy.kv_messages import MAX_BYTES, KvEvent, Removed, Stored, events_in
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.policies import Request
from offload.proxy.settings import KvSource, ProxySettings

__all__ = ["KvStreams"]

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2.0
"""Without anything new of a replay; then it has failed."""
MOST_REPLAY_SECONDS = 30.0
PAUSE_SECONDS = 1.0
"""Before a stream that failed in a way nobody thought of begins anew."""
_LONGEST_PAUSE_MS = 5000
"""Between two tries to connect."""
_MOST_WAITING = 64
"""Messages that wait to be read: further ones are missed, and asked for again."""
_AT_ONCE = 8192
"""Tokens that are taken in before other tasks have their turn."""
_END = (-1).to_bytes(8, "big", signed=True)


class _Stream:
    """One engine's. Messages have numbers; what is missed is asked for again, or everything is forgotten.

    Attributes:
        index: what it has told.
    """

    def __init__(self, url: str, source: KvSource, max_blocks: int, metrics: ProxyMetrics) -> None:
        self.index = EngineIndex(max_blocks)
        self.source = source
        self._url = url
        self._metrics = metrics
        self._last = -1  # the number of the message that was taken in last
        self._live = -1  # the same, without replays
        self._task: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._is_wanted = False

    def start(self) -> None:
        """Follow it from now on.

        It has a context, and so a thread, of its own: there ZMQ looks names up, and waits for that.
        """
        self._is_wanted = True
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._run(self._context))

    @property
    def is_running(self) -> bool:
        """Whether it is followed."""
        return self._task is not None

    async def stop(self) -> None:
        """Idempotent."""
        self._is_wanted = False
        await self._halt()

    async def begin_anew(self) -> None:
        """Ask for all that the engine can say again, if it can: nothing is known any more of what it has."""
        if self.is_running and self.source.replay is not None:
            await self._halt()
            if self._is_wanted:
                self.start()

    def forget(self) -> None:
        """Know of nothing."""
        self._begin()

    async def take(self, context: zmq.asyncio.Context, frames: Sequence[bytes]) -> None:
        """A message has come. Never raises for what is in it."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self._count("unreadable")
            return
        number = int.from_bytes(frames[1], "big")
        if number <= self._live:
            self._begin()
        self._live = number
        if number > self._last + 1:
            await self._catch_up(context, number)
        if number > self._last:
            await self._apply(number, frames[2])

    # Private

    async def _halt(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert self._context is not None
            # It waits while a name is looked up. Nobody waits for that, the interpreter's end included.
            threading.Thread(target=self._context.term, daemon=True).start()
            self._context = None

    async def _run(self, context: zmq.asyncio.Context) -> None:
        is_said = False
        while True:
            try:
                await self._follow(context)
            except Exception as error:  # of ZMQ: what comes next is as good as missed
                if not is_said:
                    logger.exception("KV events of %s stop: %s (this is said once)", self._url, error)
                is_said = True
                self._begin()
                await asyncio.sleep(PAUSE_SECONDS)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        with _socket(context, zmq.SUB, self.source.endpoint) as socket:
            if self.source.replay is not None:
                await self._replay(context)
            while True:
                await self.take(context, await socket.recv_multipart())

    def _begin(self) -> None:
        """The engine begins anew, or as good as."""
        self._last = self._live = -1
        self.index.clear(is_whole=False)
        self._count("began")

    async def _catch_up(self, context: zmq.asyncio.Context, number: int) -> None:
        """Messages before that one were missed: they are had now, or all is forgotten."""
        self._count("missed")
        if self.source.replay is not None and await self._replay(context) and self._last >= number - 1:
            return
        self.index.clear(is_whole=False)
        self._last = max(self._last, number - 1)

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Ask for all after the last message. Returns whether the engine has said all that it had."""
        assert self.source.replay is not None
        try:
            async with asyncio.timeout(MOST_REPLAY_SECONDS):
                with _socket(context, zmq.DEALER, self.source.replay) as socket:
                    await socket.send_multipart([b"", (self._last + 1).to_bytes(8, "big")])
                    while True:
                        # Not ``wait_for``: in Python 3.11 it may swallow a cancellation, and go on.
                        async with asyncio.timeout(REPLAY_SECONDS):
                            frames = await socket.recv_multipart()
                        if len(frames) != 4 or len(frames[2]) != 8:
                            self._count("unreadable")
                            return False
                        if frames[2] == _END:
                            return True
                        await self._take_again(int.from_bytes(frames[2], "big"), frames[3])
        except TimeoutError:
            return False

    async def _take_again(self, number: int, payload: bytes) -> None:
        if number <= self._last:
            return
        if number > self._last + 1:  # it keeps so many, and no more
            self.index.clear(is_whole=False)
        await self._apply(number, payload)
        self._count("replayed")

    async def _apply(self, number: int, payload: bytes) -> None:
        """Take in the message behind the last one, bit by bit."""
        self._last = number
        if number == 0:
            self.index.clear(is_whole=True)
        num_tokens = 0
        try:
            for event in events_in(payload):
                if event is None:
                    self.index.is_whole = False
                    self._count("unreadable")
                else:
                    self.index.hear(event)
                num_tokens += _weight(event)
                if num_tokens >= _AT_ONCE:
                    num_tokens = 0
                    await asyncio.sleep(0)
        except ValueError:
            self.index.clear(is_whole=False)
            self._count("unreadable")
            return
        self._count("taken")

    def _count(self, what: str) -> None:
        self._metrics.kv_events.labels(what).inc()


class KvStreams:
    """A ``Tree``: what engines have, as they have told by events. Nobody waits for it."""

    def __init__(self, settings: ProxySettings, metrics: ProxyMetrics) -> None:
        """Connect to nobody yet."""
        self._max_blocks = settings.index_blocks
        self._metrics = metrics
        self._is_open = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams = {url: self._made(url, source) for url, source in settings.kv_events}

    def open(self) -> None:
        """Follow all engines from now on."""
        self._is_open = True
        for stream in self._streams.values():
            stream.start()

    async def close(self) -> None:
        """Let go of all. Idempotent."""
        for stream in self._streams.values():
            await stream.stop()
        self._is_open = False

    def add(self, url: str, source: KvSource) -> None:
        """An engine has come that tells there."""
        self._streams[url] = self._made(url, source)
        if self._is_open:
            self._streams[url].start()

    async def remove(self, url: str) -> None:
        """It is heard no more. Idempotent."""
        stream = self._streams.pop(url, None)
        if stream is not None:
            await stream.stop()

    def forget(self, url: str) -> None:
        """An engine has nothing any more, as far as anybody knows."""
        if url in self._streams:
            self._streams[url].forget()
            task = asyncio.create_task(self._streams[url].begin_anew())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def told(self, url: str) -> dict[str, Any] | None:
        """How the index of an engine stands; None: it has none."""
        stream = self._streams.get(url)
        if stream is None:
            return None
        index = stream.index
        return {"blocks": index.by_medium(), "is_whole": index.is_whole, "left_out": index.num_left_out}

    async def depths(
        self, token_ids: Sequence[int], request: Request, urls: Sequence[str]
    ) -> Mapping[str, int]:
        """Leading tokens that engines have. One that told of none and may have some is left out.

        O(tokens), and O(tokens that it has) for each engine.
        """
        streams = [(url, self._streams[url]) for url in dict.fromkeys(urls) if url in self._streams]
        salt = request.body.get("cache_salt")
        if not streams or not isinstance(salt, str | None):
            return {}
        try:
            prompt = Prompt(token_ids, request.model, salt or "")
        except ValueError:  # engines refuse such a request
            return {}
        found = {}
        for url, stream in streams:
            depth = stream.index.depth(prompt)
            if depth or stream.index.is_whole:
                found[url] = depth
            await asyncio.sleep(0)  # others have their turn: that took milliseconds, if much was found
        return found

    def check_invariants(self) -> None:
        """Those of all indexes, and none is followed before it is opened. For tests."""
        for url, stream in self._streams.items():
            stream.index.check_invariants()
            assert not stream.is_running or self._is_open, f"{url} is followed, and all are closed"

    def _made(self, url: str, source: KvSource) -> _Stream:
        return _Stream(url, source, self._max_blocks, self._metrics)


def _weight(event: KvEvent | None) -> int:
    """What an event costs to take in, in tokens."""
    if isinstance(event, Stored):
        return len(event.token_ids)
    return 64 * len(event.block_hashes) if isinstance(event, Removed) else 64


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    """Connected; what waits in it is bounded. Raises zmq.ZMQError."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)
    socket.setsockopt(zmq.IPV6, 1)  # and names of either kind
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    return socket
