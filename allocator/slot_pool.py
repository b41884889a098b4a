"""The slots of the CPU pool: which are free, and in what state the others are."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from allocator.errors import CapacityError

Slots = npt.NDArray[np.int32]


class SlotState(IntEnum):
    """What a slot is doing. A slot has exactly one state and, unless free, exactly one owner."""

    FREE = 0
    FILLING = 1
    """Bytes are on their way; the store job owns it."""
    RESIDENT = 2
    """Bytes are complete; a position of the tree owns it."""
    LEAVING = 3
    """Its position left the tree while a job still reads it; free when the last such job ends."""


class SlotPool:
    """Hands out slots and counts their states. Whole-array operations, no loop over slots.

    ``free + filling + resident + leaving == capacity`` at all times. ``take`` prefers the slots given
    back last; a fresh pool hands them out in ascending order, so neighbours on the GPU become
    neighbours in the pool.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: number of slots, at least 1. Raises CapacityError otherwise."""
        if capacity < 1:
            raise CapacityError(f"a pool of {capacity} slots cannot hold one block; it needs at least 1")
        self._stack: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._state = np.zeros(capacity, dtype=np.int8)
        self._count = [capacity, 0, 0, 0]

    @property
    def capacity(self) -> int:
        """All slots."""
        return len(self._stack)

    @property
    def num_free(self) -> int:
        """Slots that ``take`` can hand out now."""
        return self._num_free

    def num_in(self, state: SlotState) -> int:
        """How many slots are in ``state``."""
        return self._count[state]

    def take(self, num_slots: int) -> Slots:
        """Turn ``num_slots`` free slots into filling ones and return them. Needs that many free ones."""
        assert 0 <= num_slots <= self._num_free, f"asked for {num_slots} of {self._num_free} free slots"
        rest = self._num_free - num_slots
        slots: Slots = self._stack[rest : self._num_free][::-1].copy()
        self._num_free = rest
        self._state[slots] = SlotState.FILLING
        self._count[SlotState.FREE] -= num_slots
        self._count[SlotState.FILLING] += num_slots
        return slots

    def move(self, slots: Slots, source: SlotState, target: SlotState) -> None:
        """Take ``slots`` from one state to another; to FREE makes them available again."""
        num_slots = len(slots)
        self._state[slots] = target
        self._count[source] -= num_slots
        self._count[target] += num_slots
        if target is SlotState.FREE:
            self._stack[self._num_free : self._num_free + num_slots] = slots[::-1]
            self._num_free += num_slots

    def select(self, slots: Slots, state: SlotState) -> Slots:
        """The members of ``slots`` that are in ``state``, in the same order."""
        selected: Slots = slots[self._state[slots] == state]
        return selected

    def check_invariants(self) -> None:
        """Every slot is counted once, in the state it is in."""
        counted = np.bincount(self._state, minlength=len(SlotState)).tolist()
        assert counted == self._count, f"states say {counted}, counters say {self._count}"
        assert sum(self._count) == self.capacity, f"{self._count} do not add up to {self.capacity}"
        free = self._stack[: self._num_free]
        assert self._num_free == self._count[SlotState.FREE]
        assert len(np.unique(free)) == len(free), "a slot is in the free list twice"
        assert (self._state[free] == SlotState.FREE).all(), (
            f"free list holds slots in states {self._state[free]}"
        )


def flat(slots: Slots) -> Slots:
    """All slots of an array of rows, without the absent columns."""
    row = slots.reshape(-1)
    return row if slots.ndim == 1 or slots.shape[1] == 1 else row[row >= 0]
