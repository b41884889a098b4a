"""The seam below the protocol: bytes to and from a peer, over TCP with or without TLS."""

import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from offload.peering.talk import Buffer, Talk

CONNECT_SECONDS = 2.0
IO_SECONDS = 5.0
_MOST_VIEWS = 512
"""Pieces of one ``sendmsg``; Linux takes 1,024."""

Of = TypeVar("Of")


class Link(Protocol):
    """A connection to a peer, for one thread. Whatever goes wrong is an OSError; then it is closed."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all of these, one after the other."""

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes, and put them to the beginning of ``view``, which has room. 0: no more will come."""

    def close(self) -> None:
        """Idempotent, and may be called from another thread, which ends what waits."""


class LostError(ConnectionError):
    """The connection has ended."""


class SocketLink:
    """Over TCP, with TLS if the socket has it."""

    def __init__(self, connected: socket.socket, io_seconds: float = IO_SECONDS) -> None:
        """Over a socket that is connected. ``io_seconds``: nothing may come, or go, for that long at most."""
        self._socket = connected
        self.is_tls = isinstance(connected, ssl.SSLSocket)
        connected.settimeout(io_seconds)

    def send(self, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(each).cast("B") for each in buffers if len(each)]
        if self.is_tls:
            for view in views:
                self._socket.sendall(view)
            return
        while views:
            num_sent = self._socket.sendmsg(views[:_MOST_VIEWS])
            views = behind(views, num_sent)

    def recv_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial(
    host: str,
    port: int,
    context: ssl.SSLContext | None = None,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    io_seconds: float = IO_SECONDS,
) -> SocketLink:
    """Connect to a peer's rank. Raises OSError: nobody listens there, or not in time, or TLS fails."""
    plain = socket.create_connection((host, port), connect_seconds)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if context is not None:
            return SocketLink(context.wrap_socket(plain), io_seconds)
        return SocketLink(plain, io_seconds)
    except BaseException:
        plain.close()
        raise


def behind(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of pieces when so many bytes of them have gone."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    left = views[index:]
    if num_bytes:
        left[0] = left[0][num_bytes:]
    return left


def fill(link: Link, view: memoryview, until: float = float("inf")) -> None:
    """Receive as much as fits. Raises OSError: less came, or not ``until`` then, by the monotonic clock."""
    while len(view):
        num_bytes = link.recv_into(view)
        if not num_bytes:
            raise LostError("the peer has closed the connection")
        view = view[num_bytes:]
        if time.monotonic() > until:
            raise TimeoutError("the peer sends too slowly")


def run(talk: Talk[Of], link: Link, until: float = float("inf")) -> Of:
    """Carry one side of a conversation, waiting where it waits. Raises OSError, and what ``talk`` raises."""
    try:
        while True:
            wants = next(talk)
            if isinstance(wants, memoryview):
                fill(link, wants, until)
            else:
                link.send(wants)
    except StopIteration as end:
        found: Of = end.value
        return found
    finally:
        talk.close()
