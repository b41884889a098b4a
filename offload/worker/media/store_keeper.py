"""Whose a store's extents are, in clear; and an end of those that an engine has left behind after a reset."""

import threading
from collections.abc import Callable
from contextlib import suppress

from offload.messages import is_private
from offload.worker.media.base import BadExtentError
from offload.worker.media.resp import Connection, StoreError
from offload.worker.media.store_names import KEY_PREFIX, NAMESPACE, Whose, namespace_key

ALIVE_SECONDS = 60.0
"""An engine that has said nothing for that long is over, and what only it could find is deleted."""

PRIVATE_LIST, _KEYS, ALIVE = (KEY_PREFIX + each for each in (b"private-", b"keys-", b"alive-"))
ABOUT = (NAMESPACE, PRIVATE_LIST, _KEYS, ALIVE)
"""How keys begin that are no extents."""

_EVERY_SECONDS = 20.0
_BATCH = b"200"
_MOST_MS = 1 << 40


class StoreKeeper:
    """Compares namespaces in full, and keeps a list of private extents, for one rank.

    Nothing is scanned for that: each private extent is in a set of its engine's, and each such set in one of
    the rank's. A user that may not write sets is not helped: then private extents expire.
    """

    def __init__(
        self, connect: Callable[[], Connection], whose: Whose, life_ms: int, *, every: float = _EVERY_SECONDS
    ) -> None:
        """Begin to delete what others have left, on a thread.

        Args:
            connect: makes a connection.
            whose: of whom the extents are.
            life_ms: that they live at most.
            every: seconds between two looks.
        """
        self._connect = connect
        self._namespace = whose.namespace.encode()
        self._life = b"%d" % min(2 * life_ms, _MOST_MS)
        self._about = namespace_key(whose.prefix.split(b":")[1])
        self._listed = PRIVATE_LIST + whose.digest.hex().encode()
        self._every = every
        self._own: bytes | None = None  # the suffix of what is private of this engine
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-offload-store-keeper", daemon=True)
        self._thread.start()

    def check(self, connection: Connection) -> None:
        """Compare the namespace, in full, with the one that is there under the same name.

        Raises:
            BadExtentError: it is another one.
            OSError, StoreError: the store cannot be asked.
        """
        claim = (b"SET", self._about, self._namespace, b"NX", b"PX", self._life)
        connection.send([claim, (b"GETEX", self._about, b"PX", self._life)])
        replies: list[object] = []
        for _ in range(2):
            with suppress(StoreError):  # whoever may not ask is told so by what it asks for
                replies.append(connection.reply())
        found = replies[-1] if len(replies) == 2 else None
        if found is not None and found != self._namespace:
            raise BadExtentError(
                f"its key {self._about.decode()} names another namespace than this engine's; delete it with "
                f"kv-offload tier drop, or give the engine another database"
            )

    def note(self, connection: Connection, key: bytes, suffix: bytes) -> None:
        """That key is about to be written. Raises OSError."""
        if not is_private(suffix):
            return
        own = suffix.hex().encode()
        commands: list[tuple[bytes, ...]] = []
        if own != self._own:
            self._own = own  # before anybody can see it in the list
            commands += [
                self._live(own),
                (b"SADD", self._listed, own),
                (b"PEXPIRE", self._listed, self._life),
            ]
        commands += [(b"SADD", self._keys(own), key), (b"PEXPIRE", self._keys(own), self._life)]
        try:
            connection.send(commands)
            for _ in commands:
                with suppress(StoreError):
                    connection.reply()
        except OSError:
            self._own = None
            raise

    def close(self) -> None:
        """This engine is over; idempotent."""
        self._is_closed.set()

    def check_invariants(self) -> None:
        """What is its own is private."""
        assert self._own is None or is_private(bytes.fromhex(self._own.decode())), f"{self._own!r} is its own"

    # On its thread

    def _run(self) -> None:
        while True:
            is_over = self._is_closed.is_set()
            with suppress(OSError, StoreError):
                connection = self._connect()
                try:
                    self._look(connection, is_over=is_over)
                finally:
                    connection.close()
            if is_over:
                return
            self._is_closed.wait(self._every)

    def _look(self, connection: Connection, *, is_over: bool) -> None:
        """Say that this engine lives, or does no more, and end what others have left."""
        own = self._own
        if is_over:
            if own is not None:
                connection.call(b"DEL", self._alive(own))
            return
        if own is not None:
            connection.call(*self._live(own))
        listed = connection.call(b"SMEMBERS", self._listed)
        for suffix in listed if isinstance(listed, list) else []:
            assert isinstance(suffix, bytes)
            if suffix != self._own and connection.call(b"EXISTS", self._alive(suffix)) == 0:
                self._end(connection, suffix)

    def _end(self, connection: Connection, suffix: bytes) -> None:
        while not self._is_closed.is_set():
            keys = connection.call(b"SPOP", self._keys(suffix), _BATCH)
            if not isinstance(keys, list) or not keys:
                connection.call(b"SREM", self._listed, suffix)
                return
            connection.call(b"DEL", *(key for key in keys if isinstance(key, bytes)))

    def _live(self, suffix: bytes) -> tuple[bytes, ...]:
        return b"SET", self._alive(suffix), b"1", b"PX", b"%d" % int(ALIVE_SECONDS * 1000)

    def _alive(self, suffix: bytes) -> bytes:
        return ALIVE + suffix

    def _keys(self, suffix: bytes) -> bytes:
        return _KEYS + suffix
