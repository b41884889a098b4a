"""Seals: what a slot was filled with must be what is taken out of it."""

import ctypes
import mmap
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from offload.config import Verify
from offload.messages import Ids
from offload.worker.layout import BlockLayout

Checksums = npt.NDArray[np.uint64]

SAMPLE_EVERY = 16
"""With ``Verify.SAMPLED`` one block in so many is checked, others in every load."""

BROKEN = -1
"""The generation of a slot without a seal. Those below are marks of jobs that have failed to fill it."""

_HELD_BYTES = 64 << 10
"""xxhash 4 keeps the interpreter lock while it takes up to that many bytes (before, ``update`` did not)."""
_YIELD_BYTES = 1 << 20
"""Give the lock up after so many bytes taken under it, 0.1 ms: a thread that asks for it would wait 5 ms."""


class SealTables(NamedTuple):
    """What is known of each slot; in memory of its own, or in one that several ranks share.

    Attributes:
        sums: checksums, ``uint64[slots]``.
        fills: generations, ``int64[slots]``.
    """

    sums: Checksums
    fills: Ids

    @classmethod
    def over(cls, memory: mmap.mmap | bytearray, num_slots: int) -> "SealTables":
        """Tables that lie in ``num_bytes`` of memory; what is there counts."""
        sums = np.frombuffer(memory, dtype=np.uint64, count=num_slots)
        return cls(sums, np.frombuffer(memory, dtype=np.int64, count=num_slots, offset=sums.nbytes))

    @classmethod
    def of_one(cls, num_slots: int) -> "SealTables":
        """Fresh ones, of one rank."""
        tables = cls(np.zeros(num_slots, dtype=np.uint64), np.empty(num_slots, dtype=np.int64))
        tables.clear()
        return tables

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Bytes for so many slots."""
        return 16 * num_slots

    def clear(self) -> None:
        """No slot has a seal."""
        self.fills[:] = BROKEN


class Seals:
    """Checksum (xxh3, 64 bits) and generation of every slot on one rank.

    A slot is sealed once a job has filled it. Its generation is that job's id, which the scheduler side knows
    too and names when the slot is read. A mismatch is found without reading the slot: another
    store has filled it, or has begun to.

    Where the engine's cache is host memory, checksums are taken of the GPU block. That is the source when it
    is stored and the target when it is loaded, so they cover both copies as well. Otherwise they are taken of
    the slot after the store and before the load has ended, and cover the time between.

    ``seal`` and ``num_intact`` read bytes and run on other threads, each for slots of its own. Where ranks
    share the pool, they share this too: a slot is sealed by the rank that fills it, and read by all.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_slots: int,
        verify: Verify = Verify.ALWAYS,
        *,
        of_blocks: bool = False,
        tables: SealTables | None = None,
        for_others: bool = False,
        unproven: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Make seals for so many slots.

        Args:
            layout: where the bytes of slots and blocks lie.
            num_slots: slots of the pool.
            verify: which blocks are looked at.
            of_blocks: GPU blocks are host memory, take the checksums there.
            tables: those of all ranks that share the pool; None: of this one.
            for_others: make checksums in any case: for what is below the pool, or comes after this engine.
            unproven: slots that earlier engines have filled, ``bool[slots]``: looked at whatever ``verify``
                says, until they are found intact. None: there are none.
        """
        self.verify = verify
        self.has_sums = for_others or verify is not Verify.NEVER
        """Whether slots have checksums."""
        self.of_blocks = of_blocks
        self._layout = layout
        self._sums, self._fills = tables or SealTables.of_one(num_slots)
        self._unproven = unproven if unproven is not None and unproven.any() else None
        self._num_samples = 0

    def relocate(self, layout: BlockLayout) -> None:
        """The cache lies elsewhere now; slots hold what they held."""
        self._layout = layout

    def unseal(self, slots: Ids) -> None:
        """Other bytes are about to come into these slots."""
        self._fills[slots] = BROKEN
        if self._unproven is not None:
            self._unproven[slots] = False

    def seal(self, fill: int, block_ids: Ids | None, slots: Ids) -> int:
        """Job ``fill`` has filled these slots, from these GPU blocks or from another place.

        Returns how many.
        """
        if self.has_sums:
            self._sums[slots] = self._checksums(block_ids, slots)
        self._fills[slots] = fill
        return len(slots)

    def adopt(self, fill: int, slots: Ids, sums: Checksums) -> None:
        """Job ``fill`` has filled these slots with bytes of these checksums, which were checked."""
        self._sums[slots] = sums
        self._fills[slots] = fill

    def sums(self, slots: Ids) -> Checksums:
        """Checksums of these slots, which are sealed: ``uint64[len(slots)]``, a copy."""
        found: Checksums = self._sums[slots]
        return found

    def fail(self, fill: int, slots: Ids) -> None:
        """Job ``fill`` was to fill these slots, and will not fill those that are without a seal."""
        lacking = slots[self._fills[slots] == BROKEN]
        self._fills[lacking] = _failed(fill)

    def has_failed(self, fill: int, slot: int) -> bool:
        """Whether job ``fill`` was to fill that slot and has not, and no other job since."""
        return bool(self._fills[slot] == _failed(fill))

    def coming(self, slots: Ids, fills: Ids) -> npt.NDArray[np.bool_]:
        """Which of these slots the jobs have neither filled nor failed to fill, and no later one either."""
        found = self._fills[slots]
        newest = np.where(found > BROKEN, found, _failed(found))
        are_coming: npt.NDArray[np.bool_] = newest < fills
        return are_coming

    def num_current(self, slots: Ids, fills: Ids) -> int:
        """How many leading ones of these slots still hold what those store jobs put there."""
        return num_leading(self._fills[slots] == fills)

    def are_checked(self, slots: Ids) -> bool:
        """Whether some of these slots are looked at when they are loaded."""
        return self.verify is not Verify.NEVER or self._are_unproven(slots)

    def num_intact(self, block_ids: Ids | None, slots: Ids) -> int:
        """How many leading ones of these blocks and slots are not known to have changed.

        A sample begins with another block each time. One wrong block makes it look at all. So does one that
        an earlier engine has filled and nobody has looked at yet.
        """
        if self._are_unproven(slots):
            num_intact = num_leading(self._intact(block_ids, slots))
            assert self._unproven is not None
            self._unproven[slots[:num_intact]] = False
            return num_intact
        if self.verify is Verify.SAMPLED:
            self._num_samples += 1
            sample = slice(self._num_samples % SAMPLE_EVERY % max(len(slots), 1), None, SAMPLE_EVERY)
            if self._intact(None if block_ids is None else block_ids[sample], slots[sample]).all():
                return len(slots)
        return num_leading(self._intact(block_ids, slots))

    def check_invariants(self) -> None:
        """A slot has a checksum and a generation."""
        assert len(self._sums) == len(self._fills), f"{len(self._sums)} sums of {len(self._fills)} slots"

    def _are_unproven(self, slots: Ids) -> bool:
        return self._unproven is not None and bool(self._unproven[slots].any())

    def _intact(self, block_ids: Ids | None, slots: Ids) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = self._checksums(block_ids, slots) == self._sums[slots]
        return same

    def _checksums(self, block_ids: Ids | None, slots: Ids) -> Checksums:
        if self.of_blocks and block_ids is not None:
            addresses, sizes = self._layout.block_pieces(block_ids)
        else:
            addresses, sizes = self._layout.slot_pieces(slots)
        return checksums_of(addresses, sizes)


def checksums_of(addresses: Ids, sizes: Sequence[int]) -> Checksums:
    """The xxh3-64 of each row's pieces, one after the other: ``uint64[n]``. Reads bytes: not for a step.

    Args:
        addresses: of pieces in host memory, ``int64[n, pieces]``.
        sizes: of the pieces, in bytes.
    """
    pieces = [ctypes.c_char * size for size in sizes]
    sums = np.empty(len(addresses), dtype=np.uint64)
    held_sizes, num_held = [size if size <= _HELD_BYTES else 0 for size in sizes], 0
    for index, row in enumerate(addresses.tolist()):
        checksum = xxhash.xxh3_64()
        for address, piece, held in zip(row, pieces, held_sizes, strict=True):
            checksum.update(piece.from_address(address))
            num_held += held
            if num_held >= _YIELD_BYTES:
                num_held = 0
                time.sleep(0)
        sums[index] = checksum.intdigest()
    return sums


def num_leading(good: npt.NDArray[np.bool_]) -> int:
    """How many there are before the first that is not."""
    return len(good) if good.all() else int(good.argmin())


def num_whole(ends: Ids, num_slots: int) -> int:
    """How many extents so many leading slots fill; ``ends``: 0, and where each ends, ``int64[n + 1]``."""
    return int(np.searchsorted(ends, num_slots, side="right")) - 1


T = TypeVar("T", int, Ids)


def _failed(fill: T) -> T:
    """The mark of that job, and the job of that mark. That of a broken seal is below all jobs."""
    return BROKEN - 1 - fill
