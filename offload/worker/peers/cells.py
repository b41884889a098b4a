"""A hash table of slots by name, in whole arrays: for many names at a time, and kept up as they come."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from offload.messages import Ids, Names
from offload.naming import keys_of

Words = npt.NDArray[np.uint64]

_EMPTY = -1
_CROWDED = 0.7
_PART = 8


class Cells:
    """Cells in a row, each with a slot or empty. A name begins at the cell that its hash says, and goes on.

    The names lie outside, one for each slot. A slot that is called otherwise by now leaves its cell to
    others. Cells are never emptied, so once most are taken they are made anew: see ``is_crowded``.
    """

    def __init__(self, names: Words, salt: int) -> None:
        """All empty.

        Args:
            names: of each slot, ``uint64[slots, 4]``, as they are at any time.
            salt: nobody who chooses names knows it, or all of them might be put into one place.
        """
        self._names = names
        self._salt = np.uint64(salt)
        num_cells = 1 << max(4, (2 * len(names) - 1).bit_length())
        self._mask = np.uint64(num_cells - 1)
        self._slots = np.full(num_cells, _EMPTY, dtype=np.int32)
        self._keys = np.zeros(num_cells, dtype=np.uint64)
        self._num_taken = 0

    @property
    def is_crowded(self) -> bool:
        """Whether so many are taken that searches get long."""
        return self._num_taken > _CROWDED * len(self._slots)

    @property
    def most_at_once(self) -> int:
        """Slots that may be added at once while it is not crowded. A search ends at an empty cell."""
        return len(self._slots) // _PART

    def add(self, slots: Ids) -> None:
        """These slots can be found by their names from now on: ``most_at_once``, or all that there are."""
        keys = self._hashed(self._names[slots])
        cells = (keys & self._mask).astype(np.int64)
        left = np.arange(len(slots))
        while len(left):
            at = cells[left]
            there = self._slots[at]
            is_free = there == _EMPTY
            may = is_free | (there == slots[left])
            others = np.flatnonzero(~may)
            if len(others):  # called otherwise by now?
                called = self._hashed(self._names[there[others]])
                may[others] = called != self._keys[at[others]]
            takers = left[may]
            places = cells[takers]
            self._num_taken += len(np.unique(places[is_free[may]]))
            self._slots[places] = slots[takers]
            self._keys[places] = keys[takers]
            has_won = self._slots[places] == slots[takers]
            stays = np.ones(len(left), dtype=np.bool_)
            stays[np.flatnonzero(may)[has_won]] = False
            left = left[stays]
            cells[left] = (cells[left] + 1) & int(self._mask)

    def find(self, names: Names, counts: Callable[[Ids], npt.NDArray[np.bool_]]) -> Ids:
        """Slots of these names, ``int64[n]``, of those that count; -1 for a name that has none."""
        words = np.ascontiguousarray(names).view(np.uint64)
        keys = self._hashed(words)
        cells = (keys & self._mask).astype(np.int64)
        found: Ids = np.full(len(names), _EMPTY, dtype=np.int64)
        left = np.arange(len(names))
        while len(left):
            slots = self._slots[cells[left]].astype(np.int64)
            is_over = slots == _EMPTY
            same = np.flatnonzero(~is_over & (self._keys[cells[left]] == keys[left]))
            good = same[(self._names[slots[same]] == words[left[same]]).all(axis=1) & counts(slots[same])]
            found[left[good]] = slots[good]
            is_over[good] = True
            left = left[~is_over]
            cells[left] = (cells[left] + 1) & int(self._mask)
        return found

    def check_invariants(self) -> None:
        """As many cells are taken as were counted, and not all."""
        num_taken = int((self._slots != _EMPTY).sum())
        assert num_taken == self._num_taken < len(self._slots), f"{num_taken} cells, {self._num_taken} known"

    def _hashed(self, words: Words) -> Words:
        return keys_of((words ^ self._salt).view(np.uint8))
