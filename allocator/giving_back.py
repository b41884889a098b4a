"""Slots of what left the tree: free, or leaving while loads read them."""

from collections.abc import Collection, Sequence

import numpy as np

from allocator.bags import BagState, Checkpoint
from allocator.node import Pin, Removed
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
        for checkpoint in part.bags or ():
            give_back_bag(pool, checkpoint, part.pins)
    if unread:
        pool.move(np.concatenate(unread), SlotState.RESIDENT, SlotState.FREE)


def give_back_bag(pool: SlotPool, checkpoint: Checkpoint, pins: Collection[Pin] = ()) -> None:
    """Slots of a bag that left the tree become free, or leaving while loads with some of ``pins`` read them.

    Those of a bag that was filling are its store's to give back.
    """
    if checkpoint.state is BagState.COMPLETE:
        num_readers = sum(pin.checkpoint is checkpoint for pin in pins)
        pool.move(checkpoint.slots, SlotState.BAGGED, SlotState.LEAVING if num_readers else SlotState.FREE)
        for _ in range(num_readers):
            pool.read(checkpoint.slots)
    checkpoint.state = BagState.GONE
