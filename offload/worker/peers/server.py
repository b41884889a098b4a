"""Answers peers: one thread, many connections, none of which can hold up another or the engine."""

import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from offload.errors import ConfigError
from offload.fleet_config import Address
from offload.peering.talk import Buffer
from offload.worker.peers.link import behind
from offload.worker.peers.session import Session, Stage
from offload.worker.peers.shown import Shown, Standing

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
MOST_STRANGERS = 64
"""Of these, so many that have not been let in yet."""
SECONDS = {Stage.SHAKES_HANDS: 5.0, Stage.WAITS: 600.0, Stage.ANSWERS: 10.0}
"""A connection is closed that is at it for so long; of an answer, without one more byte."""

_BACKLOG = 128
_AT_ONCE = 4 << 20
"""Bytes that one connection gets before others have their turn."""
_VIEWS = 64
_SWEEP_SECONDS = 0.5
_QUIET_SECONDS = 10.0


def listen(address: Address, rank: int) -> socket.socket:
    """A socket that listens at this rank's port, and answers nobody yet.

    Raises:
        ConfigError: the address is not of this machine, or another process has the port.
    """
    port = address.port + rank
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"listen: rank {rank} cannot listen at {Address(address.host, port).shown} ({error}); give an "
            f"address of this machine, and a port that is free, as are those behind it: one for each rank"
        ) from error


class _Connection:
    """One who is connected."""

    def __init__(self, accepted: socket.socket, address: str, session: Session, now: float) -> None:
        self.socket = accepted
        self.address = address
        self.session = session
        self.talk = session.talk()
        self.since = now
        """When it began what it is at, or had its last byte of an answer."""
        self.stage = session.stage
        self.shakes_tls = isinstance(accepted, ssl.SSLSocket)
        self.room: memoryview | None = None
        """What is to be filled."""
        self.views: list[memoryview] = []
        """What is to be sent."""
        self.events = selectors.EVENT_READ
        self.gives_way = False
        """It goes on when others have had their turn."""

    def next(self) -> None:
        """What it waits for now. Raises what ends it."""
        try:
            wants: memoryview | Sequence[Buffer] = next(self.talk)
        except StopIteration:
            raise ConnectionError("the conversation is over") from None
        if isinstance(wants, memoryview):
            self.room = wants
        else:
            self.gives_way = not wants
            self.room, self.views = None, [memoryview(each).cast("B") for each in wants if len(each)]

    def move(self) -> int:
        """Send or receive what can be without waiting. Returns how many bytes. Raises BlockingIOError."""
        if self.room is not None:
            num_bytes = self.socket.recv_into(self.room)
            if not num_bytes:
                raise ConnectionError("it has been closed")
            self.room = self.room[num_bytes:]
        elif isinstance(self.socket, ssl.SSLSocket):
            num_bytes = self.socket.send(self.views[0])
            self.views = behind(self.views, num_bytes)
        else:
            num_bytes = self.socket.sendmsg(self.views[:_VIEWS])
            self.views = behind(self.views, num_bytes)
        return num_bytes

    def close(self) -> None:
        self.talk.close()
        self.room, self.views = None, []
        with suppress(OSError):
            self.socket.close()


class PeerServer:
    """Serves a rank's pool. Its thread is the only one that touches connections.

    An answer costs the engine nothing but memory bandwidth and the interpreter: no step, no lock, no pin.
    Whoever is slow, wrong or silent is cut off after a while. What goes wrong here ends connections, and
    never the worker.
    """

    def __init__(
        self,
        listening: socket.socket,
        shown: Shown,
        key: bytes,
        context: ssl.SSLContext | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        most_connections: int = MOST_CONNECTIONS,
        most_strangers: int = MOST_STRANGERS,
    ) -> None:
        """Answer from now on.

        Args:
            listening: as ``listen`` makes it; closed with this.
            shown: what is served.
            key: the fleet's; empty: there is none, and only this machine can connect.
            context: of TLS; None: in clear.
            clock: in seconds.
            most_connections: at once.
            most_strangers: of these, that have not been let in.
        """
        self.shown = shown
        self._listening = listening
        self._key = key
        self._context = context
        self._clock = clock
        self._most = most_connections
        self._most_strangers = most_strangers
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._swept = clock()
        self._deaf_until = 0.0  # to those that call
        self._quiet_until = 0.0
        listening.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-offload-peers", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    def standings(self) -> list[Standing]:
        """Who is connected."""
        return [
            Standing(
                each.address,
                "" if each.session.other is None else each.session.other.peer.hex(),
                each.session.stage.value,
                each.session.num_questions,
                each.session.bytes_sent,
            )
            for each in list(self._connections.values())
        ]

    def close(self, seconds: float) -> bool:
        """Cut all off and let go of the pool. Returns whether the thread has ended. Idempotent."""
        self._is_closing = True
        with suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._waker.close()
        return not self._thread.is_alive()

    def check_invariants(self) -> None:
        """No more are connected than may be."""
        assert len(self._connections) <= self._most, f"{len(self._connections)} connections"
        for each in list(self._connections.values()):
            each.session.check_invariants()
        self.shown.check_invariants()

    # On the thread

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception as error:  # a fault of ours: whoever is connected calls again
                self._warn("peers are cut off, as serving them has failed: %s", error or type(error).__name__)
                for connection in list(self._connections.values()):
                    self._drop(connection)
                time.sleep(0.1)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listening.close()
        self._woken.close()

    def _turn(self) -> None:
        """Serve all who can be, once."""
        for key, _ in self._selector.select(_SWEEP_SECONDS):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._serve(key.data)
        now = self._clock()
        if now >= self._swept + _SWEEP_SECONDS:
            self._swept = now
            self._sweep(now)

    def _accept(self) -> None:
        try:
            accepted, address = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # such as no more descriptors
            self._warn("no peer can connect for a moment: %s", error)
            self._selector.unregister(self._listening)
            self._deaf_until = self._clock() + 1.0
            return
        strangers = sum(each.session.other is None for each in self._connections.values())
        if len(self._connections) >= self._most or strangers >= self._most_strangers:
            self.shown.count.refused += 1
            accepted.close()
            return
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                accepted = self._context.wrap_socket(
                    accepted, server_side=True, do_handshake_on_connect=False
                )
            host, port = str(address[0]), int(address[1])
            session = Session(self.shown, self._key, host, self._clock)
            connection = _Connection(accepted, Address(host, port).shown, session, self._clock())
            connection.next()
        except OSError:
            accepted.close()
            return
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._connections[accepted.fileno()] = connection

    def _serve(self, connection: _Connection) -> None:
        try:
            events = self._move(connection)
        except (OSError, ssl.SSLError) as error:
            self._end(connection, error)
            return
        except Exception as error:  # a fault of ours in one conversation
            self._warn("a peer is cut off, as answering it has failed: %s", repr(error))
            self._end(connection, error)
            return
        now = self._clock()
        if connection.session.stage is not connection.stage or connection.stage is Stage.ANSWERS:
            connection.stage, connection.since = connection.session.stage, now
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _move(self, connection: _Connection) -> int:
        """Go on as far as possible; what it waits for then."""
        left = _AT_ONCE
        try:
            if connection.shakes_tls:
                assert isinstance(connection.socket, ssl.SSLSocket)
                connection.socket.do_handshake()
                connection.shakes_tls = False
            while left > 0:
                if not connection.gives_way:
                    left -= connection.move()
                connection.gives_way = False
                while not (connection.views or connection.room or connection.gives_way):
                    connection.next()
                if connection.gives_way:
                    return selectors.EVENT_WRITE
        except (BlockingIOError, ssl.SSLWantReadError):
            return selectors.EVENT_READ if connection.room is not None else selectors.EVENT_WRITE
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return selectors.EVENT_WRITE if connection.room is None else selectors.EVENT_READ

    def _sweep(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if now > connection.since + SECONDS[connection.stage]:
                self._end(connection, TimeoutError(f"{connection.stage.value} for too long"))
        if self._deaf_until and now >= self._deaf_until:
            self._deaf_until = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ)

    def _end(self, connection: _Connection, error: Exception) -> None:
        if connection.session.other is None:
            self.shown.count.refused += 1
            if self._clock() >= self._quiet_until and not isinstance(error, ConnectionError):
                self._warn("%s was not let in: %s", connection.address, error)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.socket)
        self._connections.pop(fd, None)
        connection.close()

    def _warn(self, text: str, *about: object) -> None:
        """One line in so many seconds."""
        now = self._clock()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            logger.warning(text, *about)
