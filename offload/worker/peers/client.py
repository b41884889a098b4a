"""Asks a peer: one connection, for one thread at a time, and the checks of all that comes over it."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from offload.messages import Ids, Names, PeerLife
from offload.peering.frames import Message, ProtocolError, decoder
from offload.peering.talk import Talk, hear, say
from offload.worker.media.base import PoolSlots
from offload.worker.peers.handshake import call
from offload.worker.peers.landing import NixlPool
from offload.worker.peers.link import Link, fill, run
from offload.worker.peers.near import NearPool, pieces, runs
from offload.worker.peers.protocol import (
    LEAST_BYTES_PER_SECOND,
    About,
    Check,
    Get,
    Over,
    Ping,
    Probe,
    Reach,
    Reachable,
    Release,
    Rows,
    Told,
    Unchanged,
    ids_in,
    in_bytes,
    sums_in,
)
from offload.worker.pool.region_index import SlotRows
from offload.worker.seals import BROKEN, Checksums, checksums_of, num_leading, num_whole

_TOLD, _ROWS, _OVER = decoder(Told), decoder(Rows), decoder(Over)
_REACHABLE, _UNCHANGED = decoder(Reachable), decoder(Unchanged)
HANDSHAKE_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0
"""Beside that."""


class Wanted(NamedTuple):
    """Extents to get.

    Attributes:
        names: of each, ``uint8[n, 32]``.
        counts: slots of each.
        skips: leading slots of each that are left out.
        slots: of the pool, of all extents, one after the other, ``int64[slots]``.
        suffix: behind the names.
    """

    names: Names
    counts: Sequence[int]
    skips: Sequence[int]
    slots: Ids
    suffix: bytes


class Got(NamedTuple):
    """What came.

    Attributes:
        sums: what the slots of the extents that came should have, ``uint64[n]``.
        num_extents: leading ones that were there, and still there once they had come.
        num_right: of these, leading ones whose bytes are what they should be.
    """

    sums: Checksums
    num_extents: int
    num_right: int


class Client:
    """Connected, and let in. Whatever raises an OSError leaves it of no use: close it.

    Attributes:
        life: of the peer, as it was told last.
        suffix: of what it has; the same.
        reachable: where its pool is for NIXL, once it was asked.
        is_refused: by the last answer, the prompt that was asked about is not handed off.
    """

    def __init__(self, link: Link, key: bytes, about: About, pool: PoolSlots) -> None:
        """Shake hands. The link is closed if that fails.

        Args:
            link: to the peer's rank.
            key: the fleet's.
            about: what must be equal.
            pool: whose slots are filled.

        Raises:
            RefusedError: one of the two has a reason.
            OSError: it is no peer, or gone.
        """
        self._link = link
        self._pool = pool
        num_bytes = pool.num_slots * pool.slot_bytes
        self._memory = memoryview((ctypes.c_uint8 * num_bytes).from_address(pool.address)).cast("B")
        try:
            welcome = run(call(key, about), link, time.monotonic() + HANDSHAKE_SECONDS)
            if len(welcome.about.peer) == 0:
                raise ProtocolError("a peer without an id")
        except BaseException:
            link.close()
            raise
        self.about = welcome.about
        self.memory = welcome.memory
        self.life = PeerLife(welcome.about.peer.hex(), welcome.epoch.hex())
        self.suffix = welcome.suffix
        self.reachable = Reachable()
        self.is_refused = False

    def close(self) -> None:
        """Idempotent, and may be called from another thread, which ends what waits."""
        self._link.close()

    def ping(self) -> None:
        """Learn which life it is in."""
        self._ask(Ping())

    def reach(self) -> Reachable:
        """Learn where its pool is for whoever reads it by NIXL."""
        self.reachable = self._run(_asked(Reach(), _REACHABLE))
        return self.reachable

    def probe(self, names: Names, suffix: bytes, *, is_last_wanted: bool = False) -> int:
        """How many leading names it has, or up to the last that it has. Of ``MOST_NAMES`` at most."""
        num_found = self._ask(Probe(in_bytes(names), suffix, is_last_wanted)).num_found
        if num_found > len(names):
            raise ProtocolError(f"{num_found} of {len(names)} names")
        return num_found

    def release(self, tip: bytes, epoch: str) -> None:
        """What it leases of the chain that ends there is not needed any more.

        ``epoch``: of the life that it leased it in; "": whichever it is in now.
        """
        self._ask(Release(tip, bytes.fromhex(epoch or self.life.epoch)))

    def get(self, wanted: Wanted, near: NearPool | NixlPool | None = None) -> Got:
        """Have extents in the pool's slots; from ``near``, which is this peer's pool, if it is there.

        Raises NixlError: it cannot be read by NIXL; this client is of use.
        """
        get = Get(
            in_bytes(wanted.names), wanted.suffix, list(wanted.counts), list(wanted.skips), near is not None
        )
        rows: Rows = self._run(_asked(get, _ROWS))
        if rows.num_extents > len(wanted.counts):
            raise ProtocolError(f"{rows.num_extents} of {len(wanted.counts)} extents")
        ends = np.cumsum([0, *wanted.counts[: rows.num_extents]])
        num_slots = int(ends[-1])
        sums, targets = sums_in(rows.sums, num_slots), wanted.slots[:num_slots]
        self._learn(rows)
        if near is None:
            are_right = self._receive(sums, targets)
            num_extents = self._run(hear(_OVER)).num_extents
            if num_extents > rows.num_extents:
                raise ProtocolError(f"{num_extents} of {rows.num_extents} extents have not changed")
        else:
            found = SlotRows(ids_in(rows.slots, num_slots), ids_in(rows.generations, num_slots), sums)
            if isinstance(near, NearPool):
                num_extents, are_right = self._copy(near, found, targets, ends)
            else:
                num_extents, are_right = self._read(near, found, targets, ends)
        return Got(sums, num_extents, min(num_whole(ends, num_leading(are_right)), num_extents))

    def _receive(self, sums: Checksums, targets: Ids) -> Any:
        """Receive slots where they belong; which of them have the bytes that they should, ``bool[n]``."""
        size, found = self._pool.slot_bytes, np.zeros(len(sums), dtype=np.uint64)
        until = time.monotonic() + _PATIENCE_SECONDS + len(sums) * size / LEAST_BYTES_PER_SECOND
        for start, stop in runs(targets):
            for part in pieces(stop - start, size):
                here = slice(start + part.start, start + part.stop)
                first = int(targets[here.start])
                fill(self._link, self._memory[first * size : (first + here.stop - here.start) * size], until)
                found[here] = self._sums_of(targets[here])
        return found == sums

    def _copy(self, near: NearPool, found: SlotRows, targets: Ids, ends: Ids) -> tuple[int, Any]:
        """Copy slots from this machine's memory: how many extents were there all the time, and as above."""
        sums = np.zeros(len(targets), dtype=np.uint64)
        stop = ends[num_whole(ends, near.num_current(found))]
        sums[:stop] = near.copy(found.slots[:stop], self._pool, targets[:stop])
        return num_whole(ends, min(stop, near.num_current(found))), sums == found.sums

    def _read(self, far: NixlPool, found: SlotRows, targets: Ids, ends: Ids) -> tuple[int, Any]:
        """Read slots from another machine's memory; as above."""
        sums = np.zeros(len(targets), dtype=np.uint64)
        far.check(found.slots)
        if not len(targets) or found.generations.min() <= BROKEN:
            return 0, np.zeros(len(targets), dtype=np.bool_)
        epoch = bytes.fromhex(self.life.epoch)
        for part in far.copy(found.slots, self._pool, targets):
            sums[part] = self._sums_of(targets[part])
        check = Check(epoch, in_bytes(found.slots), in_bytes(found.generations))
        num_slots = self._run(_asked(check, _UNCHANGED)).num_slots
        if num_slots > len(targets):
            raise ProtocolError(f"{num_slots} of {len(targets)} slots have not changed")
        return num_whole(ends, num_slots), sums == found.sums

    def _sums_of(self, slots: Ids) -> Checksums:
        return checksums_of(self._pool.addresses(slots)[:, None], [self._pool.slot_bytes])

    def _ask(self, question: Message) -> Told:
        told: Told = self._run(_asked(question, _TOLD))
        self._learn(told)
        self.is_refused = told.is_refused
        return told

    def _learn(self, told: Told | Rows) -> None:
        self.life = PeerLife(self.life.peer, told.epoch.hex())
        self.suffix = told.suffix

    def _run(self, talk: Talk[Any]) -> Any:
        return run(talk, self._link, time.monotonic() + _PATIENCE_SECONDS)


def _asked(question: Message, of: Any) -> Talk[Any]:
    yield from say(question)
    return (yield from hear(of))


Dial = Callable[[str, int], Link]
"""Connects to a host's port. Raises OSError."""
