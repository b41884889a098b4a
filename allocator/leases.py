"""Leases: leading positions of a chain that stay in the pool until whoever has promised them says so."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from allocator.bags import Checkpoint
from allocator.covered import Covered
from allocator.errors import ChainError, StalePlanError
from allocator.node import NO_PINS, Claim, Node, Pin, Place
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.room import Room
from evictor import EvictionPolicy

Lease = Pin
"""A pin of no slots: nothing before it is evicted. What a cut takes away it does not keep."""


class Leases:
    """Makes and ends leases, and knows how many slots they keep together, those that several keep once.

    Filling positions can be leased, too. A lease whose positions are cut off keeps what is left of them.
    """

    def __init__(self, tree: PrefixTree, ranking: Ranking, policy: EvictionPolicy[Node], room: Room) -> None:
        """Nothing is leased."""
        self._tree = tree
        self._ranking = ranking
        self._policy = policy
        self._room = room
        self._covered: Covered = ranking.covered
        self._leases: dict[Lease, Checkpoint | None] = {}
        self._bags: Counter[Checkpoint] = Counter()  # how many leases end there
        self._num_bag_slots = 0

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._leases)

    @property
    def num_slots(self) -> int:
        """Slots of positions that they keep, filling ones too, and of bags that they were made for."""
        return self._covered.num_slots + self._num_bag_slots

    def depth(self, chain: Sequence[bytes], stop: int) -> int:
        """How many of the first ``stop`` positions of ``chain`` could be leased now. O(log n), O(segments).

        With windows or states that is where the last checkpoint among them is, complete or filling.
        """
        node, depth = self._tree.find(chain, stop)
        if not self._tree.has_checkpoints:
            return depth
        while node.parent is not None:
            found = None if node.bags is None else node.bags.last(depth)
            if found is not None:
                return found.depth
            node, depth = node.parent, node.start
        return 0

    def begin(self, chain: Sequence[bytes], stop: int) -> Lease:
        """The first ``stop`` positions of ``chain``, at least one, stay in the pool. O(log n), O(segments).

        Raises:
            ChainError: not all of them are resident or filling, or there is no checkpoint at their end.
        """
        if stop < 1 or self.depth(chain, stop) != stop:
            raise ChainError(f"cannot lease {stop} positions: {self.depth(chain, stop)} are known")
        place = self._tree.find(chain, stop)
        node = self._ranking.node_ending_at(Place(place.node, stop))
        lease = Lease(node, np.empty((0, self._tree.columns), dtype=np.int64))
        checkpoint = None if node.bags is None else node.bags.at(stop)
        self._leases[lease] = checkpoint
        self._covered.add(node)
        if checkpoint is not None:
            self._bags[checkpoint] += 1
            self._num_bag_slots += len(checkpoint.slots) * (self._bags[checkpoint] == 1)
        self._policy.leave(node)
        if self._ranking.loose:
            self._room.trim_loose()
        return lease

    def end(self, lease: Lease) -> None:
        """What it has kept is ordinary from now on. O(log n), O(segments).

        Raises:
            StalePlanError: it was ended before.
        """
        if lease not in self._leases:
            raise StalePlanError("this lease was ended before, or belongs to another allocator")
        checkpoint = self._leases.pop(lease)
        if checkpoint is not None:
            self._bags[checkpoint] -= 1
            if not self._bags[checkpoint]:
                del self._bags[checkpoint]
                self._num_bag_slots -= len(checkpoint.slots)
        node = lease.node
        if node is not None:
            self._covered.remove(node)
            node.pins = node.pins - {lease} or NO_PINS
            self._ranking.refresh(node)
        if self._ranking.loose:
            self._room.trim_loose()

    def check_invariants(self) -> None:
        """Each hangs where it says, or on nothing that is left, and what they keep is counted."""
        nodes = [*self._tree.nodes(), *self._tree.dead_nodes()]
        hanging = {
            pin for node in nodes for pin in node.pins if not (len(pin.slots) or isinstance(pin, Claim))
        }
        assert hanging == {lease for lease in self._leases if lease.node is not None}, (
            f"{len(hanging)} leases hang in the tree, {len(self._leases)} are known"
        )
        self._covered.check_invariants(nodes, hanging)
        bags = Counter(each for each in self._leases.values() if each is not None)
        assert bags == self._bags, f"leases end at {bags}, counted are {self._bags}"
        num_slots = sum(len(each.slots) for each in bags)
        assert num_slots == self._num_bag_slots, f"their bags have {num_slots} slots"
