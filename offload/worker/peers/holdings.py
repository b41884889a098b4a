"""What the pool of this rank holds, by name, while it changes: an index that peers are answered from."""

import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload.messages import NAME_BYTES, Ids, Kept, Names
from offload.naming import BAG, bag_names, slot_names
from offload.worker.peers.cells import Cells
from offload.worker.pool.region_index import SlotRows
from offload.worker.seals import BROKEN, Checksums, SealTables, num_leading, num_whole

_NUMBER = BAG - 1
_AT_ONCE = 1 << 14
"""Rows that are taken in before others get a turn: a millisecond or two."""
_WORDS = NAME_BYTES // 8
_UNKNOWN = -1


class Held(NamedTuple):
    """Leading extents of a question that are here.

    Attributes:
        num_extents: so many.
        rows: of all their slots, one extent after the other.
    """

    num_extents: int
    rows: SlotRows


class Holdings:
    """Names of slots, in this process's memory. A row counts while its slot has the generation that it says.

    Nothing is taken out when the pool evicts: a slot that is filled anew loses its generation, and with it
    its row. So an answer costs a few lookups for each name, and the engine's thread does nothing.

    Of several slots of one name any that holds it may be found. For several threads, of which one writes.
    """

    def __init__(self, tables: SealTables, columns: int) -> None:
        """Hold nothing.

        Args:
            tables: seals of the pool's slots.
            columns: slots of a position.
        """
        num_slots = len(tables.fills)
        self._tables = tables
        self._columns = columns
        self._lock = threading.Lock()
        self._names = np.zeros((num_slots, _WORDS), dtype=np.uint64)  # of slots; see ``slot_names``
        self._parents = np.zeros((num_slots, _WORDS), dtype=np.uint64)
        self._before: Ids = np.full(num_slots, _UNKNOWN, dtype=np.int64)  # slots of parents, as known last
        self._is_bag = np.zeros(num_slots, dtype=np.bool_)
        self._generations: Ids = np.full(num_slots, BROKEN, dtype=np.int64)
        self._cells = Cells(self._names, secrets.randbits(64))

    def keep(self, kept: Kept) -> None:
        """Slots hold that, as far as they still do. O(rows), and at times O(slots)."""
        step = min(_AT_ONCE, self._cells.most_at_once)
        for start in range(0, len(kept.slots), step):
            rows = kept.rows(np.arange(start, min(start + step, len(kept.slots))))
            with self._lock:
                self._take(rows)
            while self._cells.is_crowded:
                self._tidy()

    def clear(self) -> None:
        """Nothing of what is held may be told any more. O(slots)."""
        with self._lock:
            self._generations[:] = BROKEN
            self._cells = Cells(self._names, secrets.randbits(64))

    def has(self, names: Names) -> npt.NDArray[np.bool_]:
        """Which of these are here: names of positions, and of bags; ``bool[n]``.

        A bag counts behind a position that is here, too. Those before a position are here as a rule: ends of
        chains are evicted first.
        """
        with self._lock:
            first = self._find(names)
            found = first >= 0
            is_bag = found & self._is_bag[np.maximum(first, 0)]
            positions = np.array(names)
            positions[is_bag] = bag_names(names[is_bag])
            for column in range(self._columns):
                asked = np.flatnonzero(found)
                called = slot_names(positions[asked], np.full(len(asked), column, dtype=np.int64))
                found[asked] = self._find(called) >= 0
        return found

    def find(self, names: Names, counts: Sequence[int], skips: Sequence[int]) -> Held:
        """Slots of extents, or bags, of these names, up to the first that lacks one.

        Args:
            names: ``uint8[n, 32]``.
            counts: slots that are wanted of each, at least 1.
            skips: leading slots of each that are left out.
        """
        with self._lock:
            slots = self._wanted(names, np.array(counts), np.array(skips))
            generations = self._generations[slots]
            sums: Checksums = self._tables.sums[slots]
            is_there = (slots >= 0) & (self._tables.fills[slots] == generations)
        ends = np.cumsum([0, *counts])
        num_extents = num_whole(ends, num_leading(is_there))
        part = slice(0, int(ends[num_extents]))
        return Held(num_extents, SlotRows(slots[part], generations[part], sums[part]))

    def are_current(self, rows: SlotRows) -> npt.NDArray[np.bool_]:
        """Which of these slots still hold what they held when they were found."""
        are: npt.NDArray[np.bool_] = self._tables.fills[rows.slots] == rows.generations
        return are

    def check_invariants(self) -> None:
        """What has a row that counts is found by its name."""
        with self._lock:
            slots = np.flatnonzero(self._live())
            found = self._find(self._names[slots].view(np.uint8))
            same = (self._names[found] == self._names[slots]).all(axis=1)
            assert (found >= 0).all() and same.all(), f"{len(slots)} rows, {int((found < 0).sum())} are lost"
            self._cells.check_invariants()

    # Private. The lock is held

    def _live(self) -> npt.NDArray[np.bool_]:
        is_live: npt.NDArray[np.bool_] = self._generations > BROKEN
        is_live &= self._tables.fills == self._generations
        return is_live

    def _take(self, kept: Kept) -> None:
        kept = kept.rows(self._tables.fills[kept.slots] == kept.generations)
        numbers, is_bag = kept.marks & _NUMBER, (kept.marks & BAG) != 0
        called = np.array(kept.names)
        called[is_bag] = bag_names(called[is_bag])
        slots = kept.slots
        self._names[slots] = slot_names(called, numbers).view(np.uint64)
        self._parents[slots] = np.ascontiguousarray(kept.parents).view(np.uint64)
        self._is_bag[slots] = is_bag
        self._generations[slots] = kept.generations
        self._cells.add(slots)
        self._before[slots] = self._find(np.ascontiguousarray(kept.parents))

    def _tidy(self) -> None:
        """Leave out what does not count any more, a part at a time. Only the thread that writes is here."""
        fresh = Cells(self._names, secrets.randbits(64))
        live = np.flatnonzero(self._live())
        for start in range(0, len(live), _AT_ONCE):
            with self._lock:
                fresh.add(live[start : start + _AT_ONCE])
        with self._lock:
            self._cells = fresh

    def _find(self, names: Names) -> Ids:
        """Slots of these names that hold what their rows say, ``int64[n]``; -1: there is none."""
        return self._cells.find(names, lambda slots: self._tables.fills[slots] == self._generations[slots])

    def _wanted(self, names: Names, counts: Ids, skips: Ids) -> Ids:
        """All slots that are asked for, one extent after the other; -1 where one is not known.

        Those before a position's are known by its parents. An extent whose own name is not here has none.
        """
        first = self._find(names)
        is_bag = self._is_bag[first] & (first >= 0)
        ends = np.cumsum(counts)
        owners = np.arange(len(names)).repeat(counts)
        numbers = np.arange(len(owners)) - np.repeat(ends - counts - skips, counts)
        found = np.full(len(owners), _UNKNOWN, dtype=np.int64)
        is_of_bag = (is_bag[owners] | (not self._columns)) & (first >= 0)[owners]
        if is_of_bag.any():
            called = slot_names(names[owners[is_of_bag]], numbers[is_of_bag])
            found[is_of_bag] = self._find(called)
        if not self._columns or is_of_bag.all():
            return found
        # Of extents of positions: how many positions before the last one a slot's is.
        depths = -(-(counts + skips) // self._columns)
        behind = depths[owners] - 1 - numbers // self._columns
        num_deep = int((depths - skips // self._columns)[~is_bag].max(initial=0))
        paths = self._paths(np.where(is_bag, _UNKNOWN, first), np.where(is_bag, 0, depths), num_deep)
        at = np.flatnonzero(~is_of_bag)
        found[at] = paths[behind[at], owners[at]]
        if self._columns > 1:  # these are the first slots of positions so far
            others = np.flatnonzero(~is_of_bag & (found >= 0) & (numbers % self._columns > 0))
            positions = self._names[found[others]].view(np.uint8)
            found[others] = self._find(slot_names(positions, numbers[others] % self._columns))
        return found

    def _paths(self, lasts: Ids, depths: Ids, num_deep: int) -> Ids:
        """First slots of positions and of those before them, ``int64[num_deep, n]``; -1: none is known.

        Args:
            lasts: first slots of positions; -1: none.
            depths: positions that are wanted of each; what is behind them in the answer means nothing.
            num_deep: of each at most.
        """
        paths = np.empty((max(1, num_deep), len(lasts)), dtype=np.int64)
        paths[0] = lasts
        for back in range(1, num_deep):
            paths[back] = self._before[paths[back - 1]]
        after, before = paths[:-1], paths[1:]
        is_right = (before >= 0) & (self._tables.fills[before] == self._generations[before])
        is_right &= (self._names[before] == self._parents[after]).all(axis=-1)
        is_right |= np.arange(1, len(paths))[:, None] >= depths
        if not is_right[:, lasts >= 0].all():  # some have come later, or moved
            for back in range(1, num_deep):
                paths[back] = self._parents_of(paths[back - 1])
        paths[:, lasts < 0] = _UNKNOWN
        return paths

    def _parents_of(self, slots: Ids) -> Ids:
        """First slots of the positions before these; -1 where there is none, or it is not known."""
        before: Ids = self._before[slots]
        is_other = (before < 0) | (self._names[before] != self._parents[slots]).any(axis=1)
        is_other |= self._tables.fills[before] != self._generations[before]
        is_other &= slots >= 0
        if is_other.any():  # it has come later, or moved
            before[is_other] = self._find(self._parents[slots[is_other]].view(np.uint8))
            self._before[slots[is_other]] = before[is_other]
        before[slots < 0] = _UNKNOWN
        return before
