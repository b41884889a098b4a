"""The pool of a peer on the same machine: mapped, and copied from while its owner goes on."""

import ctypes
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import xxhash

from offload.messages import Ids
from offload.peering.frames import ProtocolError
from offload.worker.media.base import PoolSlots
from offload.worker.peers.protocol import Memory
from offload.worker.pool.region import RegionShape
from offload.worker.pool.region_index import SlotRows
from offload.worker.pool.segment import Segment, SegmentName, machine
from offload.worker.seals import BROKEN, Checksums, SealTables, checksums_of, num_leading

PIECE_BYTES = 512 << 10
"""What is copied at once. It and its source fit into the cache of one core."""


class NearPool:
    """Slots and seals of a peer's pool, for reading. Unmapped when nobody has it any more.

    A nameless segment cannot be shortened, so no page of it is ever gone. Its bytes stay as long as this is
    mapped, whatever becomes of the peer.
    """

    def __init__(self, memory: Memory, slot_bytes: int) -> None:
        """Map it. Raises OSError: it is not on this machine, or not to be had, or not as it is said to be."""
        shape = RegionShape(memory.num_slots, slot_bytes)
        nbytes = shape.slots_bytes + SealTables.num_bytes(memory.num_slots)
        if memory.num_slots < 1 or nbytes > memory.nbytes:
            raise ProtocolError(f"{memory.num_slots} slots in {memory.nbytes:,} bytes")
        name = SegmentName(machine(), memory.pid, memory.fd, memory.label, memory.nbytes)
        segment = Segment.look_into(name)
        try:
            self._map = segment.map(0, memory.nbytes, is_read_only=True)
        except (ValueError, OverflowError) as error:
            raise OSError(str(error)) from error
        finally:
            segment.close()
        self.slots = PoolSlots(
            int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data), memory.num_slots, slot_bytes
        )
        self._fills: Ids = np.frombuffer(
            self._map, dtype=np.int64, count=memory.num_slots, offset=shape.slots_bytes + 8 * memory.num_slots
        )

    def num_current(self, rows: SlotRows) -> int:
        """How many leading ones of these slots hold what they are said to hold. Raises ProtocolError."""
        if not len(rows.slots):
            return 0
        if not 0 <= rows.slots.min() <= rows.slots.max() < self.slots.num_slots:
            raise ProtocolError(f"slots to {rows.slots.max()}: it has {self.slots.num_slots}")
        return num_leading((self._fills[rows.slots] == rows.generations) & (rows.generations > BROKEN))

    def copy(self, sources: Ids, pool: PoolSlots, targets: Ids) -> Checksums:
        """Copy slots into some of another pool; returns checksums of what arrived there.

        Bytes are summed while they are in the processor's cache. The interpreter is free meanwhile.
        """
        size, there, here = pool.slot_bytes, self.slots.address, pool.address
        sums = np.empty(len(targets), dtype=np.uint64)
        for start, stop in runs(sources, targets):
            at, to = there + int(sources[start]) * size, here + int(targets[start]) * size
            for part in pieces(stop - start, size):
                offset = part.start * size
                found = slice(start + part.start, start + part.stop)
                if size > PIECE_BYTES:
                    sums[found] = _copied(at + offset, to + offset, size)
                    continue
                ctypes.memmove(to + offset, at + offset, (part.stop - part.start) * size)
                sums[found] = checksums_of(pool.addresses(targets[found])[:, None], [size])
        return sums


def _copied(at: int, to: int, num_bytes: int) -> int:
    """Copy one large slot; returns its checksum."""
    checksum = xxhash.xxh3_64()
    for start in range(0, num_bytes, PIECE_BYTES):
        count = min(PIECE_BYTES, num_bytes - start)
        ctypes.memmove(to + start, at + start, count)
        checksum.update((ctypes.c_char * count).from_address(to + start))
    return checksum.intdigest()


def runs(*places: Ids) -> Iterator[tuple[int, int]]:
    """Parts of arrays of slots in which each slot is the neighbour of the one before it, in all of them."""
    if len(places[0]):
        is_break = np.zeros(len(places[0]) - 1, dtype=np.bool_)
        for each in places:
            is_break |= np.diff(each) != 1
        yield from pairwise([0, *(np.flatnonzero(is_break) + 1).tolist(), len(places[0])])


def pieces(count: int, slot_bytes: int) -> Iterator[slice]:
    """So many slots in parts of 512 KiB, or one slot: what was just copied is in the processor's cache."""
    step = max(1, PIECE_BYTES // slot_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
