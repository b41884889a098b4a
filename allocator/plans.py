"""What crosses the allocator's border: hits, plans and events. Immutable, plain data."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from allocator.node import Pin
from allocator.slot_pool import Slots, flat


class Hit(NamedTuple):
    """The resident part of a chain.

    Attributes:
        depth: number of leading chain positions that are resident.
        slots: ``int64[depth, columns]``, read-only; -1 where a column is absent.
    """

    depth: int
    slots: Slots


class StorePlan(NamedTuple):
    """Chain positions that were given slots and wait for their bytes, and the bag of a checkpoint after them.

    Attributes:
        plan_id: unique within one allocator.
        start: chain position of the first hash.
        hashes: prefix hashes of positions ``start, start + 1, ...``; none where only a bag is to be stored.
        slots: where each goes, ``int64[len(hashes), columns]``.
        lead: prefix hashes of a few positions right before ``start``; none only at the start of a chain.
        bag: where the bag of the checkpoint at ``stop`` goes, ``int64[num_bag]``; None without one.
        note: what the caller wants to be told with the events ``Stored`` and ``BagStored``.
        claim: keeps its positions, which are in the tree and hollow until then; None: they are filling.
    """

    plan_id: int
    start: int
    hashes: list[bytes]
    slots: Slots
    lead: list[bytes]
    bag: Slots | None = None
    note: object = None
    claim: Pin | None = None

    @property
    def stop(self) -> int:
        """The chain position after the last hash, where the checkpoint is."""
        return self.start + len(self.hashes)

    @property
    def all_slots(self) -> Slots:
        """Slots of its positions, then those of its bag, absent columns left out."""
        slots = flat(self.slots)
        return slots if self.bag is None else np.concatenate([slots, self.bag])

    @property
    def parent_hash(self) -> bytes | None:
        """Prefix hash of position ``start - 1``, None at the start of a chain."""
        return self.lead[-1] if self.lead else None


Note = Callable[[int, int], object]
"""Called with the position where a plan starts and the one where it stops: makes its note."""


class UncachedRun(NamedTuple):
    """Full GPU blocks of one owner that have no copy below, in chain order.

    Attributes:
        owner: who holds the blocks (a request id).
        chain: the owner's prefix hashes.
        start: first chain position without a copy; everything before it is resident or filling.
        stop: the position after the last full block.
    """

    owner: Hashable
    chain: Sequence[bytes]
    start: int
    stop: int


class Stored(NamedTuple):
    """Event: positions became resident.

    Attributes:
        hashes: of each, in chain order.
        parent_hash: the hash before the first of them.
        note: of their plan.
        num_behind: how many positions of that plan come after them, which the note is of, too.
    """

    hashes: list[bytes]
    parent_hash: bytes | None
    note: object = None
    num_behind: int = 0


class Evicted(NamedTuple):
    """Event: positions are no longer resident, by eviction, failure or reset."""

    hashes: Sequence[bytes]


class BagStored(NamedTuple):
    """Event: the bag of a checkpoint is complete.

    Attributes:
        depth: of the checkpoint, in positions.
        hashes: of the last positions before it, as many as the allocator was told to name.
        note: of its plan.
    """

    depth: int
    hashes: list[bytes]
    note: object = None


class BagEvicted(NamedTuple):
    """Event: the bag of the checkpoint right behind the position with that hash is no longer there."""

    prefix_hash: bytes


Event = Stored | Evicted | BagStored | BagEvicted
