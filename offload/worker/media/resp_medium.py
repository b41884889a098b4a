"""A store that speaks RESP, as Valkey and Redis do, below the pool."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from offload.store_config import StoreAddress
from offload.worker.media.base import (
    AbsentError,
    BadExtentError,
    Extent,
    Label,
    MediumJob,
    PoolSlots,
    Verb,
    check_seals,
)
from offload.worker.media.named import NamedMedium
from offload.worker.media.resp import CONNECT_SECONDS, IO_SECONDS, Connection, StoreError
from offload.worker.media.store_keeper import StoreKeeper
from offload.worker.media.store_names import Whose
from offload.worker.media.store_value import HEAD_BYTES, seals_in
from offload.worker.seals import Checksums

T = TypeVar("T")

_STEP_MS = 10
"""An extent lives that much shorter than the one before it, so that a store which evicts what expires next
evicts the ends of chains."""
_REFRESH_SECONDS = 60.0
_MOST_REFRESHED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RespOptions:
    """How a store is worked with.

    Attributes:
        ca_file: certificates that the store's is checked against, with TLS; None: the system's.
        ttl_seconds: an extent that nobody uses is kept for that long.
        name_key: names are keyed with it, so that nobody who lists the store can confirm a guess of a prompt;
            None: they are not.
        get_threads: that read extents, each with a connection of its own.
        put_threads: that write them.
        connect_seconds: a connection takes that long at most.
        io_seconds: nothing comes, or goes, for that long at most.
        hang_seconds: a thread that is at an extent for longer hangs.
    """

    ca_file: str | None = None
    ttl_seconds: float = 86_400.0
    name_key: bytes | None = None
    get_threads: int = 2
    put_threads: int = 2
    connect_seconds: float = CONNECT_SECONDS
    io_seconds: float = IO_SECONDS
    hang_seconds: float = 10.0


class RespMedium(NamedMedium):
    """A ``Medium`` over a store that other engines use, too. The store evicts, and may lose anything.

    A value has a header that says what it is, with a checksum of each slot. A GET receives slots where they
    belong and checks all of it. What is wrong is deleted there. A PUT of what is there moves no bytes; it
    makes it live longer, as a use does, once a minute at most.

    What the store does not answer in time is a failed end. A connection that is lost is made anew, with
    growing pauses, and one line is logged. Nothing is ever scanned or flushed. What is of another namespace
    with the same short name turns it off.
    """

    def __init__(
        self,
        address: StoreAddress,
        pool: PoolSlots,
        *,
        whose: Whose,
        extent_slots: int,
        options: RespOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. They connect when there is something to do.

        Args:
            address: of the store.
            pool: whose slots are moved.
            whose: of whom the bytes are.
            extent_slots: slots of the largest extent.
            options: how to work.
            clock: in seconds.
        """
        self._options = options or RespOptions()
        super().__init__(
            str(address),
            pool,
            whose=whose,
            extent_slots=extent_slots,
            name_key=self._options.name_key,
            num_threads={
                Verb.GET: self._options.get_threads,
                Verb.PUT: self._options.put_threads,
                Verb.PROBE: 1,
            },
            hang_seconds=self._options.hang_seconds,
            clock=clock,
        )
        self._address = address
        num_bytes = pool.num_slots * pool.slot_bytes
        self._memory = memoryview((ctypes.c_uint8 * num_bytes).from_address(pool.address)).cast("B")
        self._connections: dict[tuple[Verb, int], Connection] = {}
        self._lock = threading.Lock()
        self._refreshed: dict[bytes, float] = {}  # keys, and when they were made to live longer
        self._keeper = StoreKeeper(self._dial, whose, int(self._options.ttl_seconds * 1000))

    def check_invariants(self) -> None:
        """Not too much is remembered, too."""
        super().check_invariants()
        self._keeper.check_invariants()
        assert len(self._refreshed) <= _MOST_REFRESHED, f"{len(self._refreshed)} keys are remembered"

    def _release(self) -> None:
        """Whoever waits for an answer gets none."""
        self._keeper.close()
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    # On the threads

    def _move(
        self, verb: Verb, number: int, job: MediumJob, indices: range
    ) -> Sequence[Checksums | Exception]:
        [index] = indices
        extent, label = job.extent(index), job.label(index)
        assert label.name is not None
        name = self._names.name(label.name)
        move = self._get if verb is Verb.GET else self._put
        return [self._with(verb, number, lambda connection: move(connection, name, extent, label))]

    def _probe(self, number: int, job: MediumJob) -> int:
        assert job.names is not None
        names, suffix, is_last = job.names, job.suffix, job.is_last_wanted

        def search(connection: Connection) -> int:
            return self._names.find(names, suffix, partial(_exist, connection), is_last_wanted=is_last)

        return self._with(Verb.PROBE, number, search)

    def _with(self, verb: Verb, number: int, work: Callable[[Connection], T]) -> T:
        """Work with this thread's connection; once more if it was lost since it was used last."""
        connection = self._connections.get((verb, number))
        is_new = connection is None
        while True:
            try:
                if connection is None:
                    connection = self._connect(verb, number)
                return work(connection)
            except (OSError, StoreError) as error:
                if isinstance(error, StoreError) and connection is not None:
                    raise BadExtentError(f"{self._address}: {error}") from error
                self._drop(verb, number)
                if is_new or isinstance(error, TimeoutError):
                    self._outage.begins(error)
                    raise BadExtentError(f"{self._address}: {error or type(error).__name__}") from error
                connection, is_new = None, True
            except BadExtentError:
                raise
            except Exception:  # who knows what is still to be read
                self._drop(verb, number)
                raise

    def _connect(self, verb: Verb, number: int) -> Connection:
        self._outage.check()
        connection = self._dial()
        try:
            self._keeper.check(connection)
        except BadExtentError as error:
            connection.close()
            self._turn_off(error)
            raise
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connections[verb, number] = connection
        self._outage.ends()
        return connection

    def _dial(self) -> Connection:
        options = self._options
        return Connection(
            self._address,
            ca_file=options.ca_file,
            connect_seconds=options.connect_seconds,
            io_seconds=options.io_seconds,
        )

    def _drop(self, verb: Verb, number: int) -> None:
        with self._lock:
            connection = self._connections.pop((verb, number), None)
        if connection is not None:
            connection.close()

    def _put(self, connection: Connection, name: bytes, extent: Extent, label: Label) -> Checksums:
        seals = extent.seals
        assert seals is not None
        key, life = self._names.key(name, label.suffix), self._life(label.depth)
        check_seals(self._pool, extent, seals, "the pool's bytes have changed since they were sealed")
        if self._is_refreshed(key):
            is_there = connection.call(b"EXISTS", key) == 1
        else:
            is_there = connection.call(b"PEXPIRE", key, life) == 1
        if not is_there:
            self._keeper.note(connection, key, label.suffix)
            header = self._format.header(name, seals)
            slots = [self._slot(slot) for slot in extent.slots.tolist()]
            num_bytes = len(header) + len(slots) * self._pool.slot_bytes
            begin = b"*6\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (len(key), key, num_bytes, header)
            end = b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)
            connection.send_raw([begin, *slots, end])
            connection.reply()
        self._note_refreshed(key)
        return seals

    def _get(self, connection: Connection, name: bytes, extent: Extent, label: Label) -> Checksums:
        key = self._names.key(name, label.suffix)
        if self._is_refreshed(key):
            connection.send([(b"GET", key)])
        else:
            connection.send([(b"GETEX", key, b"PX", self._life(label.depth))])
        length = connection.bulk()
        if length is None:
            raise AbsentError("it is not there")
        try:
            seals = self._receive(connection, length, name, extent)
            check_seals(self._pool, extent, seals, "a checksum differs")
        except BadExtentError:
            connection.call(b"DEL", key)
            raise
        self._note_refreshed(key)
        return seals

    def _receive(self, connection: Connection, length: int, name: bytes, extent: Extent) -> Checksums:
        """Read a value into its slots. Whatever is wrong with it, all of it is read."""
        left = length
        try:
            head = bytearray(min(length, HEAD_BYTES))
            connection.receive_into(memoryview(head))
            left -= len(head)
            num_slots = self._format.num_slots(bytes(head), length, name)
            rest = bytearray(8 * num_slots + 8)  # seals, and a checksum
            connection.receive_into(memoryview(rest))
            left -= len(rest)
            seals = seals_in(bytes(head), bytes(rest))[extent.skip :][: len(extent.slots)]
            if len(seals) < len(extent.slots):
                raise BadExtentError(
                    f"it has {num_slots} slots, {len(extent.slots)} behind {extent.skip} asked"
                )
            if extent.seals is not None and not np.array_equal(seals, extent.seals):
                raise BadExtentError("it has other bytes")
        except BadExtentError:
            connection.discard(left)
            connection.end_bulk()
            raise
        slot_bytes = self._pool.slot_bytes
        connection.discard(extent.skip * slot_bytes)
        for slot in extent.slots.tolist():
            connection.receive_into(self._slot(slot))
        connection.discard(left - (extent.skip + len(extent.slots)) * slot_bytes)
        connection.end_bulk()
        return seals

    def _slot(self, slot: int) -> memoryview:
        start = slot * self._pool.slot_bytes
        return self._memory[start : start + self._pool.slot_bytes]

    def _life(self, depth: int) -> bytes:
        """Milliseconds that an extent is to live."""
        most = int(self._options.ttl_seconds * 1000)
        return b"%d" % max(most - _STEP_MS * depth, most // 2, 1)

    def _is_refreshed(self, key: bytes) -> bool:
        return self._clock() < self._refreshed.get(key, float("-inf")) + _REFRESH_SECONDS

    def _note_refreshed(self, key: bytes) -> None:
        if self._is_refreshed(key):
            return
        if len(self._refreshed) >= _MOST_REFRESHED - len(self._connections):
            self._refreshed = {}
        self._refreshed[key] = self._clock()


def _exist(connection: Connection, keys: Sequence[bytes]) -> list[bool]:
    connection.send([(b"EXISTS", key) for key in keys])
    found, refusal = [], None
    for _ in keys:  # all answers: the next question must not get them
        try:
            found.append(connection.reply() == 1)
        except StoreError as error:
            refusal = error
    if refusal is not None:
        raise refusal
    return found
