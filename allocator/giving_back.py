"""Slots of what left the tree: free, or leaving while loads read them."""

from collections.abc import Sequence

import numpy as np

from allocator.node import Removed
from allocator.slot_pool import SlotPool, SlotState, flat


def give_back(pool: SlotPool, removed: Sequence[Removed]) -> None:
    """Resident slots of ``removed`` become free, those that loads read leaving. O(1) array work per slot.

    A load reads from the start of its pin to the end of the part. So the first of these starts says which
    slots no load reads.
    """
    unread = []
    for part in removed:
        starts = [max(0, pin.start - part.start) for pin in part.pins]
        first = min([part.resident, *starts])
        unread.append(flat(part.slots[:first]))
        if first < part.resident:
            pool.move(flat(part.slots[first : part.resident]), SlotState.RESIDENT, SlotState.LEAVING)
            for start in starts:
                pool.read(flat(part.slots[start : part.resident]))
    if unread:
        pool.move(np.concatenate(unread), SlotState.RESIDENT, SlotState.FREE)
