"""The slots of the CPU pool: which are free, and in what state the others are."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from allocator.errors import CapacityError

Slots = npt.NDArray[np.int64]


class SlotState(IntEnum):
    """What a slot is doing. A slot has exactly one state and, unless free, exactly one owner."""

    FREE = 0
    FILLING = 1
    """Bytes are on their way; the store job owns it."""
    RESIDENT = 2
    """Bytes are complete; a position of the tree owns it."""
    LEAVING = 3
    """Its position, or bag, left the tree while a job still reads it; free when the last such job ends."""
    BAGGED = 4
    """Bytes are complete; a checkpoint of the tree owns it."""
    WITHDRAWN = 5
    """It is no part of the pool now: nobody owns it, and it may have no memory."""


class SlotPool:
    """Hands out slots and counts their states. Whole-array operations, no loop over slots.

    ``free + filling + resident + bagged + leaving + withdrawn == capacity`` at all times. ``take`` prefers
    the slots given back last. A fresh pool hands them out in ascending order, so neighbours on the GPU become
    neighbours in the pool. It remembers only which of the slots in use are leaving: the owners of the others
    know theirs.

    Slots can be *closed*: those that are free are withdrawn at once, the others as they become free.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: number of slots, at least 1. Raises CapacityError otherwise."""
        if capacity < 1:
            raise CapacityError(f"a pool of {capacity} slots cannot hold one block; it needs at least 1")
        self.capacity = capacity
        """All slots, those withdrawn included."""
        self.num_open = capacity
        """Slots that are not closed."""
        self.num_free = capacity
        """Slots that ``take`` can hand out now."""
        self._stack: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._is_leaving = np.zeros(capacity, dtype=np.bool_)
        self._is_closed = np.zeros(capacity, dtype=np.bool_)
        self._is_withdrawn = np.zeros(capacity, dtype=np.bool_)
        self._num_readers = np.zeros(capacity, dtype=np.int32)  # loads that read a slot that is leaving
        self._count: dict[SlotState, int] = {state: 0 for state in SlotState if state is not SlotState.FREE}

    def num_in(self, state: SlotState) -> int:
        """How many slots are in ``state``."""
        return self.num_free if state is SlotState.FREE else self._count[state]

    def take(self, num_slots: int) -> Slots:
        """Turn ``num_slots`` free slots into filling ones and return them. Needs that many free ones."""
        assert 0 <= num_slots <= self.num_free, f"asked for {num_slots} of {self.num_free} free slots"
        slots = self._pop(num_slots)
        self.num_free -= num_slots
        self._count[SlotState.FILLING] += num_slots
        return slots

    def move(self, slots: Slots, source: SlotState, target: SlotState) -> None:
        """Take ``slots`` in use from one state to another; to FREE makes them available again."""
        num_slots = len(slots)
        self._count[source] -= num_slots
        if source is SlotState.LEAVING or target is SlotState.LEAVING:
            self._is_leaving[slots] = target is SlotState.LEAVING
        if target is SlotState.FREE:
            if self.num_open < self.capacity:
                is_closed = self._is_closed[slots]
                self._withdraw(slots[is_closed])
                slots = slots[~is_closed]
            self._push(slots)
            self.num_free += len(slots)
        else:
            self._count[target] += num_slots

    def read(self, slots: Slots) -> None:
        """One load more reads each of ``slots``, which are all different and leaving."""
        self._num_readers[slots] += 1

    def end_read(self, slots: Slots) -> None:
        """One load less reads them; those that were leaving for the last one become free."""
        self._num_readers[slots] -= 1
        self.move(slots[self._num_readers[slots] == 0], SlotState.LEAVING, SlotState.FREE)

    def close(self, slots: Slots) -> None:
        """``slots``, all different, are withdrawn: those that are free now, others when they become free.

        O(pool) array work.
        """
        self._is_closed[slots] = True
        self.num_open = self.capacity - int(np.count_nonzero(self._is_closed))
        free = self.free()
        is_closed = self._is_closed[free]
        self._withdraw(free[is_closed])
        self._refill(free[~is_closed])

    def open(self, slots: Slots) -> None:
        """``slots``, all different and closed, are of the pool again. Those withdrawn become free."""
        self._is_closed[slots] = False
        self.num_open += len(slots)
        back = slots[self._is_withdrawn[slots]]
        self._is_withdrawn[back] = False
        self._count[SlotState.WITHDRAWN] -= len(back)
        self._push(back)
        self.num_free += len(back)

    def is_closed(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are."""
        closed: npt.NDArray[np.bool_] = self._is_closed[slots]
        return closed

    def num_used(self, starts: Slots) -> Slots:
        """Slots in use between each of ``starts`` and the next one, neither free nor withdrawn. O(pool)."""
        in_use = ~self._is_withdrawn
        in_use[self.free()] = False
        used: Slots = np.add.reduceat(in_use.astype(np.int64), starts)
        return used

    def free(self) -> Slots:
        """Slots that are free."""
        return self._stack[: self.num_free]

    def last_free(self, num_slots: int) -> Slots:
        """So many of those that are free, or all: those that would be handed out last."""
        slots: Slots = self.free()[:num_slots].copy()
        return slots

    def leaving(self, slots: Slots | None = None) -> Slots:
        """Those of ``slots`` that are leaving, in the same order; without ``slots`` all that are."""
        if slots is None:
            return np.flatnonzero(self._is_leaving)
        leaving: Slots = slots[self._is_leaving[slots]]
        return leaving

    def check_invariants(self) -> None:
        """Every slot is counted once, and no free one is in use."""
        counted = self.num_free + sum(self._count.values())
        assert counted == self.capacity, f"{self.num_free} free, {self._count}: not {self.capacity} in all"
        assert min(self._count.values()) >= 0, f"{self._count}"
        free = self.free()
        assert len(np.unique(free)) == len(free), "a slot is in the free list twice"
        leaving = self.leaving()
        assert len(leaving) == self._count[SlotState.LEAVING], f"{leaving} are leaving, {self._count} counted"
        assert not np.isin(leaving, free).any(), "a slot that is leaving is in the free list"
        withdrawn = np.flatnonzero(self._is_withdrawn)
        assert len(withdrawn) == self._count[SlotState.WITHDRAWN], f"{withdrawn}, {self._count} counted"
        assert self._is_closed[withdrawn].all(), f"{withdrawn} are withdrawn, and not all are closed"
        assert not self._is_closed[free].any(), f"of {free}, which are free, some are closed"
        assert self.num_open == self.capacity - np.count_nonzero(self._is_closed), f"{self.num_open} open"
        assert not self._is_withdrawn[leaving].any(), "a slot that is leaving is withdrawn"
        read = np.flatnonzero(self._num_readers)
        assert np.array_equal(read, leaving), f"{leaving} are leaving, {read} are read"

    def _withdraw(self, slots: Slots) -> None:
        self._is_withdrawn[slots] = True
        self._count[SlotState.WITHDRAWN] += len(slots)

    def _refill(self, free: Slots) -> None:
        """Only these are free, in the order of ``free``."""
        self._stack[: len(free)] = free
        self.num_free = len(free)

    def _pop(self, num_slots: int) -> Slots:
        """Those that are to be handed out next, of as many as are free."""
        slots: Slots = self._stack[self.num_free - num_slots : self.num_free][::-1].copy()
        return slots

    def _push(self, slots: Slots) -> None:
        """These are free, beside those that are."""
        self._stack[self.num_free : self.num_free + len(slots)] = slots[::-1]


class SlotQueue(SlotPool):
    """Prefers the slots given back longest ago: what they held can be found again for as long as possible.

    That is of use where memory outlives the engine. Of slots given back together the last ones go first, as
    ends of chains are worth less than their beginnings.
    """

    def __init__(self, capacity: int, order: Slots) -> None:
        """``order``: all slots, in which they are handed out at first. Raises CapacityError without any."""
        super().__init__(capacity)
        self._stack = order.copy()
        self._first = 0

    def free(self) -> Slots:
        slots: Slots = self._stack[self._at(0, self.num_free)]
        return slots

    def last_free(self, num_slots: int) -> Slots:
        slots: Slots = self.free()[max(0, self.num_free - num_slots) :]
        return slots

    def _pop(self, num_slots: int) -> Slots:
        slots: Slots = self._stack[self._at(0, num_slots)]
        self._first = (self._first + num_slots) % self.capacity
        return slots

    def _push(self, slots: Slots) -> None:
        self._stack[self._at(self.num_free, len(slots))] = slots[::-1]

    def _refill(self, free: Slots) -> None:
        super()._refill(free)
        self._first = 0

    def _at(self, start: int, count: int) -> Slots:
        """Where so many lie, from that place in the queue on."""
        at: Slots = (self._first + start + np.arange(count)) % self.capacity
        return at


def flat(slots: Slots) -> Slots:
    """All slots of an array of rows, without the absent columns."""
    row = slots.reshape(-1)
    return row if slots.ndim == 1 or not len(row) or row.min() >= 0 else row[row >= 0]


def check_sizes(capacity: int, columns: int, bag_slots: int) -> None:
    """Refuse a pool that holds nothing. Raises CapacityError."""
    if columns < 1 and bag_slots < 1:
        raise CapacityError(f"{columns} columns and bags of {bag_slots} slots: nothing is ever stored")
    if 0 < capacity < columns + bag_slots and bag_slots:
        raise CapacityError(
            f"a pool of {capacity} slots cannot hold a position of {columns} and a bag of {bag_slots}"
        )
