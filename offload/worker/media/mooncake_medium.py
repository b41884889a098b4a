"""A Mooncake Store below the pool."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.errors import TierError
from offload.mooncake_config import MooncakeConfig
from offload.worker.media.base import (
    AbsentError,
    BadExtentError,
    Extent,
    MediumJob,
    PoolSlots,
    Verb,
    check_seals,
)
from offload.worker.media.mooncake import (
    MooncakeClient,
    MooncakeGoneError,
    explained,
    is_absent,
    is_gone,
    is_kept,
    reach,
)
from offload.worker.media.mooncake_check import try_to_connect
from offload.worker.media.mooncake_keeper import MooncakeKeeper
from offload.worker.media.named import NamedMedium
from offload.worker.media.store_names import Whose, namespace_key
from offload.worker.seals import Checksums

_KEEPER_SECONDS = 1.0
_still_in_use: list[object] = []
"""What a call that has not ended may touch, to the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """How a store is worked with.

    Attributes:
        name_key: see ``StoreNames``.
        get_threads: that read extents.
        put_threads: that write them.
        most_extents: in one call.
        hang_seconds: a thread that is in a call for longer hangs.
    """

    name_key: bytes | None = None
    get_threads: int = 2
    put_threads: int = 2
    most_extents: int = 8
    hang_seconds: float = 10.0


class _Piece(NamedTuple):
    """An extent of a call.

    Attributes:
        name: as the store has it.
        key: the same, with namespace and rank.
        extent: its slots.
        header: where its header lies meanwhile.
    """

    name: bytes
    key: str
    extent: Extent
    header: NDArray[np.uint8]


class MooncakeMedium(NamedMedium):
    """A ``Medium`` over a Mooncake Store that other engines use, too. The store may lose anything.

    The pool is registered once. Values go from its slots to whoever brings memory to the store, and back, a
    few extents in one call. They are those of any other store: a header that says what it is, with a checksum
    of each slot, and all of it is checked. What is wrong is deleted there. A PUT of what is there moves no
    bytes.

    Calls block for seconds where the master or an owner is gone. They do so on these threads, and only those
    that were begun before it was noticed: while it is gone, no call is made before somebody listens again. A
    client is made at once, or once there is a master, which is tried in a process of its own first.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        pool: PoolSlots,
        *,
        whose: Whose,
        extent_slots: int,
        options: MooncakeOptions | None = None,
        connect: Callable[[MooncakeConfig], MooncakeClient] = MooncakeClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads, and connect if the master is there.

        Args:
            config: which store.
            pool: whose slots are moved.
            whose: of whom the bytes are.
            extent_slots: slots of the largest extent.
            options: how to work.
            connect: makes a client.
            clock: in seconds.

        Raises:
            TierError: Mooncake is not installed here.
        """
        options = options or MooncakeOptions()
        num_threads = {Verb.GET: options.get_threads, Verb.PUT: options.put_threads, Verb.PROBE: 1}
        super().__init__(
            config.shown,
            pool,
            whose=whose,
            extent_slots=extent_slots,
            name_key=options.name_key,
            num_threads=num_threads,
            hang_seconds=options.hang_seconds,
            most_extents=options.most_extents,
            clock=clock,
        )
        self._config = config
        self._whose = whose
        self._connect = connect
        self._client: MooncakeClient | None = None
        self._connecting = threading.Lock()
        # Of each thread: headers of a call, and one slot for what nobody wants.
        num_movers = options.get_threads + options.put_threads
        self._get_threads, self._most_extents = options.get_threads, options.most_extents
        self._headers = np.zeros(
            (num_movers, options.most_extents, self._format.most_header_bytes), dtype=np.uint8
        )
        self._unwanted = np.zeros((num_movers, pool.slot_bytes), dtype=np.uint8)
        self._keeper = MooncakeKeeper(lambda: None if self._outage.is_on else self._client, whose)
        try:
            self._client = self._connected()
        except OSError as error:
            self._outage.begins(error)
        self._keeper.start()

    def check_invariants(self) -> None:
        """Also of its list of private extents."""
        super().check_invariants()
        self._keeper.check_invariants()

    def _release(self) -> None:
        is_kept_no_more = self._keeper.close(_KEEPER_SECONDS)
        client, self._client = self._client, None
        if client is None:
            return
        if self.runner.is_over.is_set() and not self._outage.is_on and is_kept_no_more:
            client.close()
        else:  # the process ends without it
            _still_in_use.append((client, self._headers, self._unwanted, self._keeper))

    # On the threads

    def _move(
        self, verb: Verb, number: int, job: MediumJob, indices: range
    ) -> Sequence[Checksums | Exception]:
        mover = number if verb is Verb.GET else self._get_threads + number
        assert job.names is not None
        names = [self._names.name(job.names[index]) for index in indices]
        keys = [self._names.key(name, job.suffix).decode() for name in names]
        pieces = [
            _Piece(name, key, job.extent(index), self._headers[mover, at])
            for at, (index, name, key) in enumerate(zip(indices, names, keys, strict=True))
        ]
        client = self._reached()
        if verb is Verb.PUT:
            self._keeper.note(job.suffix)
            return self._put(client, pieces)
        found: list[Checksums | Exception] = []
        while len(found) < len(pieces) and not any(isinstance(each, Exception) for each in found):
            found += self._get(client, _different(pieces[len(found) :]), self._unwanted[mover])
        return found

    def _probe(self, number: int, job: MediumJob) -> int:
        assert job.names is not None
        exist = partial(self._exist, self._reached())
        return self._names.find(job.names, job.suffix, exist, is_last_wanted=job.is_last_wanted)

    def _reached(self) -> MooncakeClient:
        """The client, unless the master is gone."""
        client = self._client
        if client is not None and not self._outage.is_on:
            return client
        self._outage.check()
        if not self._connecting.acquire(blocking=False):
            raise BadExtentError(f"{self._config.shown} is tried by another thread")
        try:
            reach(self._config)
            if self._client is None and not self._is_closed:
                try_to_connect(self._config)
                self._client = self._connected()
            client = self._client
        except (OSError, TierError) as error:
            self._outage.begins(error)
            raise BadExtentError(f"{self._config.shown}: {error}") from error
        finally:
            self._connecting.release()
        if client is None:
            raise BadExtentError(f"{self._config.shown} is closed")
        return client

    def _connected(self) -> MooncakeClient:
        client = self._connect(self._config)
        client.register(self._pool.address, self._pool.num_slots * self._pool.slot_bytes)
        for scratch in (self._headers, self._unwanted, self._keeper.scratch):
            client.register(scratch.ctypes.data, scratch.nbytes)
        self._compare(client)
        return client

    def _compare(self, client: MooncakeClient) -> None:
        """See that the namespace which the store knows by that name is ours. Nobody's becomes ours."""
        ours = np.frombuffer(self._whose.namespace.encode(), dtype=np.uint8)
        both = np.concatenate([ours, np.zeros_like(ours)])
        address, size = both.ctypes.data, len(ours)
        key = namespace_key(self._whose.prefix.split(b":")[1]).decode()
        client.register(address, both.nbytes)
        try:
            client.put([key], [[address]], [[size]])
            [length] = client.sizes([key])
            if length == size:
                [length] = client.get([key], [[address + size]], [[size]])
        finally:
            client.unregister(address)
        if length < 0:  # there is no room, or no master; values say their namespace, too
            return
        if length != size or not np.array_equal(both[size:], ours):
            self._turn_off(
                BadExtentError(
                    f"its key {key} names another namespace than this engine's; delete it with kv-offload "
                    f"tier drop, or give the engine another store"
                )
            )

    def _put(self, client: MooncakeClient, pieces: Sequence[_Piece]) -> list[Checksums | Exception]:
        found: list[Checksums | Exception] = []
        for piece in pieces:
            assert piece.extent.seals is not None
            try:
                check_seals(
                    self._pool,
                    piece.extent,
                    piece.extent.seals,
                    "the pool's bytes have changed since they were sealed",
                )
            except BadExtentError as error:  # what is behind it does not count
                found.append(error)
                break
            found.append(piece.extent.seals)
        sound = [piece for piece, each in zip(pieces, found, strict=False) if not isinstance(each, Exception)]
        are_there = self._exist(client, [piece.key.encode() for piece in sound]) if sound else []
        missing = [at for at, is_there in enumerate(are_there) if not is_there]
        if not missing:
            return found
        addresses, sizes = [], []
        for piece in (sound[at] for at in missing):
            assert piece.extent.seals is not None
            header = self._format.header(piece.name, piece.extent.seals)
            piece.header[: len(header)] = np.frombuffer(header, dtype=np.uint8)
            slots = self._pool.addresses(piece.extent.slots).tolist()
            addresses.append([piece.header.ctypes.data, *slots])
            sizes.append([len(header), *[self._pool.slot_bytes] * len(slots)])
        codes = self._heard(client.put([sound[at].key for at in missing], addresses, sizes))
        for at, code in zip(missing, codes, strict=True):
            if not is_kept(code):
                found[at] = BadExtentError(explained(code))
        return found

    def _get(
        self, client: MooncakeClient, pieces: Sequence[_Piece], unwanted: NDArray[np.uint8]
    ) -> list[Checksums | Exception]:
        lengths = self._heard(client.sizes([piece.key for piece in pieces]))
        found: list[Checksums | Exception] = []
        wrong: list[str] = []
        addresses, sizes = [], []
        for piece, length in zip(pieces, lengths, strict=True):
            try:
                where = self._targets(piece, length, unwanted)
            except BadExtentError as error:
                found.append(error)
                if length >= 0:
                    wrong.append(piece.key)
                break
            addresses.append([address for address, _ in where])
            sizes.append([num_bytes for _, num_bytes in where])
        wanted = pieces[: len(addresses)]
        codes = client.get([piece.key for piece in wanted], addresses, sizes) if wanted else []
        got: list[Checksums | Exception] = []
        for piece, length, code in zip(wanted, lengths, self._heard(codes), strict=False):
            try:
                got.append(self._seals(piece, length, code))
            except BadExtentError as error:
                got.append(error)
                if code == length:
                    wrong.append(piece.key)
        if wrong:
            client.remove(wrong)
        return got + found

    def _targets(self, piece: _Piece, length: int, unwanted: NDArray[np.uint8]) -> list[tuple[int, int]]:
        """Where the bytes of a value go: addresses and sizes. What nobody wants goes where nobody reads."""
        if length < 0:
            raise (AbsentError if is_absent(length) else BadExtentError)(explained(length))
        extent, slot_bytes = piece.extent, self._pool.slot_bytes
        num_slots = self._format.count(length)
        num_behind = num_slots - extent.skip - len(extent.slots)
        if num_behind < 0:
            raise BadExtentError(f"it has {num_slots} slots, {len(extent.slots)} behind {extent.skip} asked")
        nobody = unwanted.ctypes.data
        slots = self._pool.addresses(extent.slots).tolist()
        slots = [*[nobody] * extent.skip, *slots, *[nobody] * num_behind]
        header_bytes = length - num_slots * slot_bytes
        return [(piece.header.ctypes.data, header_bytes), *((slot, slot_bytes) for slot in slots)]

    def _seals(self, piece: _Piece, length: int, code: int) -> Checksums:
        """Those of the slots that were got, which hold what was put."""
        if code != length:
            raise (AbsentError if is_absent(code) else BadExtentError)(explained(code))
        extent = piece.extent
        seals = self._format.seals(piece.header.tobytes(), length, piece.name)
        seals = seals[extent.skip : extent.skip + len(extent.slots)]
        if extent.seals is not None and not np.array_equal(seals, extent.seals):
            raise BadExtentError("it has other bytes")
        check_seals(self._pool, extent, seals, "a checksum differs")
        return seals

    def _exist(self, client: MooncakeClient, keys: Sequence[bytes]) -> list[bool]:
        return [code == 1 for code in self._heard(client.exist([key.decode() for key in keys]))]

    def _heard(self, codes: Sequence[int]) -> Sequence[int]:
        """The same, if the master has answered."""
        gone = next((code for code in codes if is_gone(code)), None)
        if gone is None:
            self._outage.ends()
            return codes
        error = MooncakeGoneError(explained(gone))
        self._outage.begins(error)
        raise BadExtentError(f"{self._config.shown}: {error}") from error


def _different(pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Leading ones of different keys."""
    seen = set[str]()
    for count, piece in enumerate(pieces):
        if piece.key in seen:
            return pieces[:count]
        seen.add(piece.key)
    return pieces
