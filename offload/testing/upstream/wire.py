"""What lies between a proxy and an engine: connections that are slow, stop, break off or come in crumbs.

It knows nothing of HTTP. Where it breaks off is a number of bytes: between events, inside one, or inside a
character, as it happens.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

__all__ = ["Wire", "WireFault"]

_CHUNK = 1 << 16
_MOST_CRUMBS = 1000
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class WireFault:
    """What happens to one connection.

    Attributes:
        kind: ``close``: it ends in order; ``reset``: it is reset; ``hang``: nothing more comes, and it stays;
            ``crumbs``: the next 1,000 pieces have ``size`` bytes; ``noise``: bytes come in between.
        after: bytes of the engine that come through before.
        size, noise: as above.
    """

    kind: Literal["close", "reset", "hang", "crumbs", "noise"]
    after: int = 0
    size: int = 1
    noise: bytes = b""


class Wire:
    """Relays connections to a port of this machine. A context manager: it listens from entry to exit.

    Args:
        port: the engine's.
        draw: the fault of a new connection, or None.
    """

    def __init__(self, port: int, draw: Callable[[], WireFault | None] = lambda: None) -> None:
        self.port = 0
        self.num_faults = 0
        self._engine = port
        self._draw = draw
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            # A task that a stream's server has made may not end as cancelled: asyncio would call it an error.
            with contextlib.suppress(asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._relays.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._draw()
        try:
            there = await asyncio.open_connection("127.0.0.1", self._engine)
        except OSError:
            _reset(writer)
            return
        up = asyncio.create_task(_copy(reader, there[1]))
        down = asyncio.create_task(self._down(there[0], writer, fault))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        finally:
            there[1].close()  # before this waits: it may be cancelled once more
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: WireFault | None
    ) -> None:
        """What the engine says, up to the fault, and then the fault."""
        with contextlib.suppress(ConnectionError):
            if fault is None:
                await _copy(reader, writer)
                return
            if not await _copy(reader, writer, fault.after):
                return  # the engine ended first
            self.num_faults += 1
            if fault.kind == "reset":
                _reset(writer)
            elif fault.kind == "hang":
                await asyncio.Event().wait()
            elif fault.kind == "noise":
                writer.write(fault.noise)
                await _copy(reader, writer)
            elif fault.kind == "crumbs":
                await _copy(reader, writer, _MOST_CRUMBS * fault.size, fault.size)
                await _copy(reader, writer)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None = None, size: int = _CHUNK
) -> bool:
    """Copy until there is an end, or ``most`` bytes are copied, which returns True."""
    left = most
    while left is None or left > 0:
        data = await reader.read(size if left is None else min(size, left))
        if not data:
            return False
        writer.write(data)
        await writer.drain()
        if size < _CHUNK:
            await asyncio.sleep(0)
        left = None if left is None else left - len(data)
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Let the other side see that the connection is reset."""
    held = writer.get_extra_info("socket")
    if held is not None:
        with contextlib.suppress(OSError):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    writer.transport.abort()
