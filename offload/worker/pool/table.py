"""What the slots of a pool hold, in memory that outlives the engine: seals and names, each row checked."""

import mmap

import numpy as np
import xxhash

from offload.files.checksums import xxh64_rows
from offload.messages import EPOCH_SHIFT, NAME_BYTES, Ids, Kept, Names
from offload.worker.seals import BROKEN, Checksums, SealTables

_NAME_WORDS = NAME_BYTES // 8
_BESIDE_SEALS = 2 + 2 * _NAME_WORDS
"""Words of a slot: checksum of the row, mark, name and parent."""
_WORDS = 4 + 2 * _NAME_WORDS
"""Of a row: generation, checksum, mark, slot, name and parent."""


class SlotTable:
    """An array for each thing that is known of a slot, one after the other.

    The seals come first, as ``SealTables`` has them: they are right while the engine runs. A row counts for
    later lives once ``keep`` has written its names and a checksum over all of it, the number of the slot and
    whose table it is included. So after a kill at any moment a row says what its slot holds, or says nothing:
    other bytes take the generation away first, and the checksum is of the one that was there.
    """

    def __init__(self, memory: mmap.mmap | bytearray, num_slots: int, identity: str) -> None:
        """What is there counts.

        Args:
            memory: ``num_bytes`` of it.
            num_slots: slots of the pool.
            identity: whose it is; rows of another one say nothing.
        """
        self.seals = SealTables.over(memory, num_slots)
        self._seed = xxhash.xxh64_intdigest(identity.encode())
        rest = np.frombuffer(memory, dtype=np.uint64, offset=SealTables.num_bytes(num_slots))
        words = rest[: _BESIDE_SEALS * num_slots].reshape(_BESIDE_SEALS, num_slots)
        names, parents = words[2:].reshape(2, num_slots, _NAME_WORDS)
        self._checks: Checksums = words[0]
        self._marks: Ids = words[1].view(np.int64)
        self._names: Checksums = names
        self._parents: Checksums = parents

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Bytes for so many slots."""
        return SealTables.num_bytes(num_slots) + 8 * _BESIDE_SEALS * num_slots

    @staticmethod
    def stamped(num_slots: int) -> tuple[int, int]:
        """Where generations begin, and where checksums of rows, which follow them, end: a row has both."""
        return 8 * num_slots, 24 * num_slots

    @property
    def newest_epoch(self) -> int:
        """Of any generation; 0 if there is none."""
        return max(int(self.seals.fills.max(initial=0)), 0) >> EPOCH_SHIFT

    def keep(self, kept: Kept) -> None:
        """These slots hold that, for later lives too. The checksum is the last that is written of a row."""
        is_there = self.seals.fills[kept.slots] == kept.generations
        if not is_there.all():
            kept = kept.rows(is_there)
        slots = kept.slots
        self._names[slots] = _words(kept.names)
        self._parents[slots] = _words(kept.parents)
        self._marks[slots] = kept.marks
        self._checks[slots] = self._checks_of(kept, self.seals.sums[slots])

    def kept(self) -> Kept:
        """What all rows say that say something. O(slots)."""
        slots = np.flatnonzero(self.seals.fills > BROKEN)
        found = self._rows(slots)
        return found.rows(self._checks_of(found, self.seals.sums[slots]) == self._checks[slots])

    def recover(self) -> Kept:
        """The same; slots whose rows say nothing have no seal from now on."""
        found = self.kept()
        is_kept = np.zeros(len(self._marks), dtype=np.bool_)
        is_kept[found.slots] = True
        self.seals.fills[~is_kept] = BROKEN
        return found

    def _rows(self, slots: Ids) -> Kept:
        fills = self.seals.fills[slots]
        names, parents = (words[slots].view(np.uint8) for words in (self._names, self._parents))
        return Kept(slots, fills, names, parents, self._marks[slots])

    def _checks_of(self, rows: Kept, sums: Checksums) -> Checksums:
        words = np.empty((len(rows.slots), _WORDS), dtype=np.uint64)
        for column, values in enumerate((rows.generations, sums, rows.marks, rows.slots)):
            words[:, column] = values.view(np.uint64)
        words[:, 4 : 4 + _NAME_WORDS] = _words(rows.names)
        words[:, 4 + _NAME_WORDS :] = _words(rows.parents)
        return xxh64_rows(words, self._seed)


def _words(names: Names) -> Checksums:
    return np.ascontiguousarray(names).view(np.uint64)
