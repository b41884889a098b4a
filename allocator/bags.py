"""Checkpoints, and the bags of slots that belong to them.

A *checkpoint* is a depth of a chain at which a model with windows or states can go on. Its *bag* holds what
each of their cache groups needs for that. A bag belongs to one checkpoint alone: what two windows have in
common is stored twice. So there are no shares to count, and a bag goes as a whole.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from enum import IntEnum
from operator import attrgetter

from allocator.slot_pool import Slots
from evictor.order import Key
from evictor.untracked import untrack

_depth = attrgetter("depth")


class BagState(IntEnum):
    """What has become of a bag."""

    FILLING = 0
    """Bytes are on their way, or a position before it has none yet. The store owns the slots."""
    COMPLETE = 1
    """It can serve a load."""
    GONE = 2
    """It has left the tree. Loads that read it keep its slots."""


class Checkpoint:
    """The first ``depth`` positions of a chain, together with a bag. Compared by identity.

    It refers to its node by id, so no cycle holds it. Like nodes it is out of the garbage collector's sight.
    """

    __slots__ = ("depth", "key", "last_use", "node_id", "slots", "state")

    def __init__(self, depth: int, slots: Slots, node_id: int) -> None:
        """A bag that is filling; ``slots``: as many as this checkpoint needs, perhaps none."""
        untrack(self)
        self.depth = depth
        self.slots = slots
        self.node_id = node_id
        self.state = BagState.FILLING
        self.last_use = 0
        self.key: Key | None = None  # of those that are evicted before leaves; see Checkpoints

    def __repr__(self) -> str:
        return f"<Checkpoint {self.depth} {self.state.name} slots={self.slots.tolist()}>"


class Bags:
    """The checkpoints of one node, by depth.

    Attributes:
        num_slots: of all their bags.
        num_filling: how many of the bags are filling.
        is_open: the node's last positions were stored without a checkpoint, and there is more to come.
    """

    __slots__ = ("_checkpoints", "is_open", "num_filling", "num_slots")

    def __init__(self, checkpoints: list[Checkpoint] | None = None) -> None:
        untrack(self)
        self._checkpoints = checkpoints or []
        untrack(self._checkpoints)
        self.is_open = False
        self.num_slots = sum(len(each.slots) for each in self._checkpoints)
        self.num_filling = sum(each.state is BagState.FILLING for each in self._checkpoints)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._checkpoints)

    def __reversed__(self) -> Iterator[Checkpoint]:
        return reversed(self._checkpoints)

    def __bool__(self) -> bool:
        """Whether it says more than no bags at all."""
        return bool(self._checkpoints) or self.is_open

    def at(self, depth: int) -> Checkpoint | None:
        """The checkpoint at ``depth``, complete or filling. O(log n)."""
        index = bisect_left(self._checkpoints, depth, key=_depth)
        found = self._checkpoints[index] if index < len(self._checkpoints) else None
        return found if found is not None and found.depth == depth else None

    def last_complete(self, depth: int) -> Checkpoint | None:
        """The deepest complete one that is no deeper than ``depth``. O(log n), O(those filling)."""
        for index in range(bisect_right(self._checkpoints, depth, key=_depth) - 1, -1, -1):
            if self._checkpoints[index].state is BagState.COMPLETE:
                return self._checkpoints[index]
        return None

    def last(self, depth: int) -> Checkpoint | None:
        """The deepest one that is no deeper than ``depth``, complete or filling. O(log n)."""
        index = bisect_right(self._checkpoints, depth, key=_depth)
        return self._checkpoints[index - 1] if index else None

    def is_complete_at(self, depth: int) -> bool:
        """Whether there is a complete one at just that depth."""
        found = self.at(depth)
        return found is not None and found.state is BagState.COMPLETE

    def add(self, checkpoint: Checkpoint) -> None:
        """There is none at its depth. O(n)."""
        insort(self._checkpoints, checkpoint, key=_depth)
        self._count(checkpoint, 1)

    def complete(self, checkpoint: Checkpoint) -> None:
        """Its bag is whole."""
        checkpoint.state = BagState.COMPLETE
        self.num_filling -= 1

    def remove(self, checkpoint: Checkpoint) -> None:
        """It does not belong to them any more. O(n)."""
        self._count(checkpoint, -1)
        del self._checkpoints[bisect_left(self._checkpoints, checkpoint.depth, key=_depth)]

    def take_behind(self, depth: int) -> "Bags":
        """Give up those deeper than ``depth``, and what is to come; return them. O(those)."""
        index = bisect_right(self._checkpoints, depth, key=_depth)
        taken = Bags(self._checkpoints[index:])
        taken.is_open, self.is_open = self.is_open, False
        del self._checkpoints[index:]
        self.num_slots -= taken.num_slots
        self.num_filling -= taken.num_filling
        return taken

    def take_over(self, later: "Bags") -> None:
        """Get those of ``later``, which are deeper. O(those)."""
        self._checkpoints += later._checkpoints
        self.is_open = later.is_open
        self.num_slots += later.num_slots
        self.num_filling += later.num_filling

    def belong_to(self, node_id: int) -> None:
        """They hang on that node from now on. O(n)."""
        for checkpoint in self._checkpoints:
            checkpoint.node_id = node_id

    def check_invariants(self) -> None:
        """They are in order, and counted."""
        depths = [each.depth for each in self]
        assert depths == sorted(set(depths)), f"checkpoints are out of order: {depths}"
        assert self.num_slots == sum(len(each.slots) for each in self), f"{self.num_slots} slots counted"
        states = [each.state for each in self]
        assert BagState.GONE not in states, f"a bag that is gone hangs at {depths}: {states}"
        assert self.num_filling == states.count(BagState.FILLING), f"{self.num_filling} counted, {states}"

    def _count(self, checkpoint: Checkpoint, one: int) -> None:
        self.num_slots += one * len(checkpoint.slots)
        self.num_filling += one * (checkpoint.state is BagState.FILLING)
