"""What a region has, by name: slots of positions whose beginning is there, too, and of bags."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload.messages import Ids, Kept, Names
from offload.naming import BAG, NO_PARENT, NameIndex, bag_names, keys_of, slot_names
from offload.worker.seals import Checksums

_NUMBER = BAG - 1
_NONE: Ids = np.empty(0, dtype=np.int64)


class SlotRows(NamedTuple):
    """Slots of a region, and what is known of them.

    Attributes:
        slots: there, ``int64[n]``.
        generations: of what they held, ``int64[n]``.
        sums: checksums of that, ``uint64[n]``.
    """

    slots: Ids
    generations: Ids
    sums: Checksums


class RegionIndex:
    """Made of a table as it was at one moment. It does not change.

    A position counts if all of its slots are there, and all positions before it. So a name that is found
    stands for all of its chain. A bag counts behind such a position; a pool of bags has no positions.
    """

    def __init__(self, kept: Kept, sums: Checksums, columns: int) -> None:
        """Of several slots of one name the newest counts. O(slots log slots), in whole arrays.

        Args:
            kept: what rows say.
            sums: checksums of these slots, ``uint64[n]``.
            columns: slots of a position.
        """
        numbers = kept.marks & _NUMBER
        is_bag = (kept.marks & BAG) != 0
        called = np.array(kept.names)
        called[is_bag] = bag_names(called[is_bag])
        called = slot_names(called, numbers)
        newest = np.argsort(-kept.generations, kind="stable")
        chosen = newest[np.unique(keys_of(called[newest]), return_index=True)[1]]
        kept, numbers, is_bag = kept.rows(chosen), numbers[chosen], is_bag[chosen]
        self._rows = SlotRows(kept.slots, kept.generations, sums[chosen])
        self._index = NameIndex(called[chosen])
        self._columns = columns
        self._position_at: Ids = np.full(len(chosen), -1, dtype=np.int64)  # by row
        self._table: Ids = np.empty((0, columns), dtype=np.int64)  # rows of each position
        self._parents = _NONE
        self._counts = self._count_positions(kept, np.flatnonzero(~is_bag & (numbers == 0)))
        heads = np.flatnonzero(is_bag & (numbers == 0))
        if columns:
            heads = heads[self._has_rows(self._index.find(kept.names[heads]))]
        self._counts[heads] = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be found."""
        return not self._counts.any()

    def has(self, names: Names) -> npt.NDArray[np.bool_]:
        """Which of these are there: names of positions, and of bags; ``bool[n]``."""
        return self._has_rows(self._index.find(names))

    def find(self, name: Names, num_slots: int, skip: int) -> SlotRows | None:
        """``num_slots`` behind the first ``skip`` of an extent, or bag, of that name; None: it lacks some.

        Args:
            name: ``uint8[32]``.
            num_slots: at least 1.
            skip: leading slots that are left out.
        """
        (row,) = self._index.find(name[None]).tolist()
        if row < 0 or not self._counts[row]:
            return None
        if self._position_at[row] < 0:
            wanted = np.arange(skip, skip + num_slots)
            found = self._index.find(slot_names(np.repeat(name[None], num_slots, axis=0), wanted))
        else:
            found = self._behind(int(self._position_at[row]), num_slots + skip)[skip:]
        if len(found) != num_slots or found.min() < 0:
            return None
        slots, generations, sums = self._rows
        return SlotRows(slots[found], generations[found], sums[found])

    # Private

    def _has_rows(self, rows: Ids) -> npt.NDArray[np.bool_]:
        found = rows >= 0
        found[found] = self._counts[rows[found]]
        return found

    def _behind(self, position: int, num_slots: int) -> Ids:
        """Rows of the last so many slots of the chain that ends with a position; none: it is shorter."""
        path = []
        for _ in range(num_slots // self._columns):
            if position < 0:
                return _NONE
            path.append(position)
            position = int(self._parents[position])
        return self._table[path[::-1]].reshape(-1)

    def _count_positions(self, kept: Kept, first_slots: Ids) -> npt.NDArray[np.bool_]:
        """Put slots together to positions, and positions to chains; which rows begin one that counts."""
        counts = np.zeros(len(kept.slots), dtype=np.bool_)
        if not self._columns or not len(first_slots):
            return counts
        num_positions = len(first_slots)
        self._position_at[first_slots] = np.arange(num_positions)
        names = kept.names[first_slots]
        self._table = np.stack(
            [
                self._index.find(slot_names(names, np.full(num_positions, column)))
                for column in range(self._columns)
            ],
            axis=1,
        )
        before = self._index.find(kept.parents[first_slots])
        self._parents = np.where(before >= 0, self._position_at[np.maximum(before, 0)], before)
        own, lost = np.arange(num_positions + 1), num_positions
        leads = np.where(self._parents == NO_PARENT, own[:-1], np.where(before >= 0, self._parents, lost))
        leads[(self._table < 0).any(axis=1)] = lost
        leads = np.append(leads, lost)
        for _ in range(num_positions.bit_length() + 1):  # each round goes twice as far back
            leads = leads[leads]
        is_first = np.append(self._parents == NO_PARENT, False)
        counts[first_slots] = is_first[leads[:-1]]
        return counts
