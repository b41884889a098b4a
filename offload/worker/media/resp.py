"""Valkey and Redis, spoken by hand: what is received goes straight to where it belongs.

A client library would make an object of each value first, which takes two to nine times the processor time.
"""

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

from offload.store_config import StoreAddress

CONNECT_SECONDS = 1.0
IO_SECONDS = 2.0

_LINE_BYTES = 1 << 16
"""No line of a reply is longer, nor is what is read at once beside bytes of a value."""
_MOST_VIEWS = 512
"""Pieces of one ``sendmsg``; Linux takes 1,024."""

Buffer = bytes | memoryview

Reply = bytes | int | list["Reply"] | None


class StoreError(Exception):
    """The store has answered with an error; the connection is as good as before."""


class LostError(OSError):
    """The connection is lost, or what came over it is not of the protocol."""


class Connection:
    """One connection, for one thread. What is asked is answered in order.

    ``StoreError`` leaves it as it is. After ``OSError`` it must be closed.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        ca_file: str | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        io_seconds: float = IO_SECONDS,
    ) -> None:
        """Connect, and say who we are.

        Args:
            address: of the store.
            ca_file: certificates that its own is checked against, with TLS; None: the system's.
            connect_seconds: it may take that long.
            io_seconds: nothing may come, or go, for that long at most.

        Raises:
            OSError: nobody listens there, or not in time, or its certificate is not good.
            StoreError: the user or the password is wrong.
        """
        self._socket = _connect(address, ca_file, connect_seconds)
        self._socket.settimeout(io_seconds)
        self._is_tls = address.is_tls
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # of what has come and was not taken
        try:
            if address.password:
                who = (address.user, address.password) if address.user else (address.password,)
                self.call(b"AUTH", *(each.encode() for each in who))
            if address.database:
                self.call(b"SELECT", b"%d" % address.database)
        except BaseException:
            self.close()
            raise

    def call(self, *command: bytes) -> Reply:
        """Ask one thing, and wait for the answer. Raises StoreError if it is an error."""
        self.send([command])
        return self.reply()

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        """Ask; the answers are yet to be read, one for each."""
        pieces: list[bytes] = []
        for command in commands:
            pieces.append(b"*%d\r\n" % len(command))
            for each in command:
                pieces += [b"$%d\r\n" % len(each), each, b"\r\n"]
        self.send_raw([b"".join(pieces)])

    def send_raw(self, pieces: Sequence[Buffer]) -> None:
        """Send these bytes, one piece after the other, without a copy where there is no TLS."""
        if self._is_tls:
            for piece in pieces:
                self._socket.sendall(piece)
            return
        views = [memoryview(piece).cast("B") for piece in pieces]
        while views:
            num_sent = self._socket.sendmsg(views[:_MOST_VIEWS])
            while views and num_sent >= len(views[0]):
                num_sent -= len(views.pop(0))
            if num_sent:
                views[0] = views[0][num_sent:]

    def reply(self) -> Reply:
        """Read one answer.

        Raises:
            StoreError: it is an error.
            LostError: it is none at all.
        """
        kind, rest = self._line()
        if kind == b"+":
            return rest
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            length = _number(rest)
            if length < 0:
                return None
            if length > 1 << 26:
                raise LostError(f"an answer of {length} bytes")
            content = bytearray(length)
            self.receive_into(memoryview(content))
            self.end_bulk()
            return bytes(content)
        if kind == b"*":
            return [self.reply() for _ in range(_number(rest))]
        if kind == b"-":
            raise StoreError(rest.decode(errors="replace"))
        raise LostError(f"an answer that begins with {kind!r}")

    def bulk(self) -> int | None:
        """Read the beginning of an answer that is a value: how many bytes follow; None: there is none."""
        kind, rest = self._line()
        if kind == b"-":
            raise StoreError(rest.decode(errors="replace"))
        if kind != b"$":
            raise LostError(f"{kind!r} where a value should begin")
        length = _number(rest)
        return None if length < 0 else length

    def receive_into(self, target: memoryview) -> None:
        """Fill that with the next bytes of a value."""
        taken = min(self._stop - self._start, len(target))
        target[:taken] = self._view[self._start : self._start + taken]
        self._start += taken
        while taken < len(target):
            num_bytes = self._socket.recv_into(target[taken:])
            if not num_bytes:
                raise LostError("the store has closed the connection")
            taken += num_bytes

    def discard(self, num_bytes: int) -> None:
        """Let so many bytes of a value go by."""
        scratch = memoryview(bytearray(min(num_bytes, 1 << 18)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self.receive_into(part)
            num_bytes -= len(part)

    def end_bulk(self) -> None:
        """Read what follows a value."""
        end = bytearray(2)
        self.receive_into(memoryview(end))
        if end != b"\r\n":
            raise LostError("a value has another length than was said")

    def close(self) -> None:
        """Idempotent, and may be called from another thread, which ends what waits."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _line(self) -> tuple[bytes, bytes]:
        """The first byte of the next line, and what follows."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line[:1], line[1:]
            if self._start:
                self._view[: self._stop - self._start] = bytes(self._view[self._start : self._stop])
                self._start, self._stop = 0, self._stop - self._start
            if self._stop == len(self._buffer):
                raise LostError("a line without an end")
            num_bytes = self._socket.recv_into(self._view[self._stop :])
            if not num_bytes:
                raise LostError("the store has closed the connection")
            self._stop += num_bytes


def _connect(address: StoreAddress, ca_file: str | None, seconds: float) -> socket.socket:
    if address.path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
        return connection
    plain = socket.create_connection((address.host, address.port), seconds)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.is_tls:
        return plain
    try:
        context = ssl.create_default_context(cafile=ca_file)
        return context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise LostError(f"{text[:20]!r} is no number") from error
