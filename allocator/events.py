"""What became resident and what left, in order, until somebody asks."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from allocator.bags import BagState, Checkpoint
from allocator.node import Node, Place, Removed
from allocator.plans import BagEvicted, BagStored, Event, Evicted, Stored, StorePlan
from allocator.prefix_tree import PrefixTree


class EventLog:
    """Events of the pool, oldest first.

    A cut may take away hundreds of thousands of segments, and a step no more than so many of them. Each is
    listed when it is taken away. What happens after a cut may be about the same positions. So it waits until
    the cut is listed whole. A bag is listed after the positions before it become resident, and leaves before
    they do.
    """

    def __init__(self, is_on: bool, tree: PrefixTree, bag_reach: int = 1) -> None:
        """Nothing has happened; nothing is kept unless ``is_on``.

        ``bag_reach``: positions before a checkpoint whose hashes ``BagStored`` has.
        """
        self.is_on = is_on
        self._tree = tree
        self._bag_reach = bag_reach
        self._events: list[Event] = []
        self._after_cuts: deque[list[Event]] = deque()  # what came after each that is not listed

    @property
    def is_listing(self) -> bool:
        """Whether something was cut off that is yet to be listed."""
        return bool(self._after_cuts)

    def record(self, event: Event) -> None:
        """It happened now; events are on."""
        (self._after_cuts[-1] if self._after_cuts else self._events).append(event)

    def settled(self, plans: Sequence[StorePlan]) -> None:
        """Their positions became resident, and their bags complete. For each O(log n), O(bag reach)."""
        for plan in plans if self.is_on else ():
            if plan.hashes:
                self.record(Stored(plan.hashes, plan.parent_hash, plan.note))
            if plan.bag is not None:
                self.record(BagStored(plan.stop, self._hashes_of_bag(plan), plan.note))

    def filled(self, plan: StorePlan, is_new: npt.NDArray[np.bool_]) -> None:
        """Of the positions of ``plan`` these became resident; the others were. O(1) array work for each."""
        if not self.is_on:
            return
        edges = np.flatnonzero(np.diff(is_new, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            parent = plan.hashes[first - 1] if first else plan.parent_hash
            self.record(Stored(plan.hashes[first:last], parent, plan.note, len(plan.hashes) - last))

    def evicted(self, removed: Removed) -> None:
        """These left, all of them resident, and their bags with them."""
        if self.is_on and len(removed.slots):
            for event in _of_bags(removed):
                self.record(event)
            self.emptied(self._told(removed))

    def emptied(self, hashes: Sequence[bytes]) -> None:
        """Positions with these hashes have no slots any more."""
        if self.is_on and len(hashes):
            self.record(Evicted(hashes))

    def bag_removed(self, node: Node, checkpoint: Checkpoint) -> None:
        """A bag of ``node`` leaves alone."""
        if self.is_on and checkpoint.state is BagState.COMPLETE:
            self.record(BagEvicted(node.hash_at(checkpoint.depth - 1 - node.start)))

    def begin_cut(self) -> None:
        """Something was cut off."""
        if self.is_on:
            self._after_cuts.append([])

    def take_away(self, removed: Removed, num_cuts: int) -> None:
        """``removed`` is of the first of ``num_cuts`` cuts that are yet to be taken away."""
        self.end_cuts(num_cuts)
        if self.is_on and removed.resident:
            self._events += _of_bags(removed)
            if len(hashes := self._told(removed)):
                self._events.append(Evicted(hashes))

    def end_cuts(self, num_left: int) -> None:
        """All cuts but the last so many have been taken away."""
        while len(self._after_cuts) > num_left:
            self._events += self._after_cuts.popleft()

    def take(self) -> list[Event]:
        """Events since the last call, but those that wait for a cut."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def check_invariants(self, num_cuts: int) -> None:
        """``num_cuts`` are yet to be taken away."""
        num_listed = len(self._after_cuts)
        assert num_listed == num_cuts or not self.is_on, (
            f"{num_listed} cuts are yet to be listed, {num_cuts} to be taken away"
        )

    # Private

    def _told(self, removed: Removed) -> Sequence[bytes]:
        """Hashes of what was resident and had a slot."""
        hashes, slots = removed.resident_hashes, removed.slots[: removed.resident]
        if not self._tree.is_gapped or slots.min() >= 0:
            return hashes
        return [each for each, slot in zip(hashes, slots[:, 0].tolist(), strict=True) if slot >= 0]

    def _hashes_of_bag(self, plan: StorePlan) -> list[bytes]:
        last = self._tree.node_at(plan.hashes, plan.start, plan.stop - 1, plan.lead)
        assert last is not None, f"store plan {plan.plan_id} is resident but not in the tree"
        return self._tree.hashes_before(Place(last, plan.stop), self._bag_reach)


def _of_bags(removed: Removed) -> list[Event]:
    """The complete bags that left with these positions."""
    hashes = removed.hashes
    return [
        BagEvicted(hashes[each.depth - 1 - removed.start])
        for each in removed.bags or ()
        if each.state is BagState.COMPLETE
    ]
