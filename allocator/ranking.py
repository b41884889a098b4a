"""The tree and the policy that ranks its leaves, kept in step."""

from collections.abc import Sequence

from allocator.bags import Checkpoint
from allocator.covered import Covered
from allocator.events import EventLog
from allocator.node import Node, Place, Removed
from allocator.prefix_tree import PrefixTree
from allocator.slot_pool import Slots
from evictor import Admission, EvictionPolicy, KeepHints, Newcomer
from evictor.caller import Caller

_NODE_WORK = 256
"""Positions that can be taken away in the time it takes to remove a node."""

_MAX_JOINED = 512
"""Nodes that become one with others in one call."""


class Ranking(Caller[Node]):
    """Changes the tree and tells the policy: whatever splits, grows or goes does so through here.

    What is cut off goes into the log of events as it is taken away.
    """

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy[Node], log: EventLog) -> None:
        super().__init__(policy)
        self._tree = tree
        self._log = log
        self._max_joined = _MAX_JOINED
        self.covered = Covered()  # by leases
        self.claimed = Covered()
        self._to_join: Node | None = None  # where a path ends that one call could not join whole
        self.loose: list[Node] = []
        """Leaves that are to be trimmed back to their last checkpoints; see ``trim_loose``."""

    def refresh(self, node: Node) -> None:
        """It may have become evictable, or not evictable, or loose."""
        if self._tree.has_checkpoints and node.is_loose:
            self._policy.leave(node)
            self.loose.append(node)
        elif node.is_evictable:
            self._policy.enter(node)
        else:
            self._policy.leave(node)

    def use(self, chain: Sequence[bytes], hints: KeepHints | None) -> None:
        """A request asks for ``chain``. O(log n), O(segments) of the chain."""
        place = self._tree.find(chain, len(chain))
        if self._tree.has_checkpoints and (checkpoint := self._tree.last_checkpoint(place)) is not None:
            self._tree.checkpoints.use(checkpoint)
        path = self._tree.path(self.node_ending_at(place) if place.depth else self._tree.root)
        self._policy.used(path, chain, place.depth)
        self._policy.heed(hints, path)
        self._join(path)

    def ended(self, chain: Sequence[bytes], turn: int, ending: int) -> None:
        """The answer to the request with that number has ended so."""
        node, depth = self._tree.find(chain, len(chain))
        if depth == node.end:
            self._policy.ended(self._tree.path(node), chain, depth, turn, ending)

    def heed(self, node: Node, hints: KeepHints | None, num_slots: int) -> Admission[Node]:
        """A request may fill so many slots below ``node`` and wants them kept so."""
        return self._policy.heed(hints, self._tree.path(node), num_slots)

    def node_ending_at(self, place: Place) -> Node:
        """Split so that ``place`` is the end of a node; return that node."""
        node, depth = place
        if depth == node.end:
            return node
        new = self._tree.split(place)
        self.covered.split(node, new)
        self.claimed.split(node, new)
        self.after_split(node, new)
        return new if new.end == depth else node

    def append(
        self,
        place: Place,
        hashes: list[bytes],
        data: bytes,
        slots: Slots,
        next_hash: bytes | None,
        admission: Admission[Node],
    ) -> Node:
        """Hang positions below ``place``, those of equal past in one node; ``next_hash`` comes after them.

        ``data``: their ``hashes``, one after the other. Returns the node of the last one.
        """
        width = len(data) // len(hashes)
        node, depth = place
        for start, stop in self.stretches(hashes):
            part = hashes[start:stop]
            may_grow = admission.joins(node, part[0])
            bytes_of_part = data[start * width : stop * width]
            place = Place(node, depth + start)
            node = self._tree.append(place, part, bytes_of_part, slots[start:stop], may_grow)
            admission.stored(node, part, hashes[stop] if stop < len(hashes) else next_hash)
        return node

    def begin_bag(self, node: Node, depth: int, slots: Slots) -> None:
        """The bag of a checkpoint in ``node`` is on its way. It keeps ``node`` from eviction."""
        self._tree.checkpoints.begin(node, depth, slots)
        self._policy.leave(node)
        self._policy.resized(node)

    def remove_bag(self, checkpoint: Checkpoint) -> Node:
        """Take a bag out of the tree, and nothing else. Returns the node that had it."""
        node = self._tree.checkpoints.remove(checkpoint)
        self._policy.resized(node)
        return node

    def evict(
        self,
        num_slots: int,
        slack: int,
        newcomer: Newcomer[Node] | None,
        admission: Admission[Node],
        growing: Node | None,
    ) -> Removed | None:
        """The tail of the leaf that is worth least; None if nothing should go.

        As much of it as gives so many slots, or less. ``slack``: of ``PrefixTree.bite``. ``growing``: of
        ``take_away``.
        """
        leaf = admission.choose(newcomer)
        return None if leaf is None else self._bite(leaf, self._tree.bite(leaf, num_slots, slack), growing)

    def shed(self, leaf: Node, num_positions: int) -> Removed:
        """Its last so many positions go, whatever they are worth."""
        return self._bite(leaf, num_positions, None)

    def coldest(self, num_slots: int, most: int) -> list[Node]:
        """See ``CpuOffloadingBlockAllocator.coldest``."""
        found: list[Node] = []
        while num_slots > 0 and len(found) < most and (leaf := self._policy.choose()) is not None:
            self._policy.leave(leaf)
            found.append(leaf)
            num_slots -= leaf.weight
        for leaf in found:
            self._policy.enter(leaf)
        return found

    def trim_loose(self, growing: Node | None = None) -> Removed | None:
        """What is behind the last checkpoint of a leaf, where nobody goes on; None if there is no more.

        ``growing``: of ``take_away``.
        """
        while self.loose:
            node = self.loose.pop()
            if node.parent is not None and node.is_loose:
                removed = self._bite(node, self._tree.num_loose(node), growing)
                if len(node):
                    self.refresh(node)
                return removed
        return None

    def cut(self, place: Place) -> None:
        """Nobody finds what comes after ``place`` from now on; ``take_away`` removes it.

        ``place`` is within its node, or right before it. O(log n).
        """
        node, depth = place
        if depth > node.start:
            head = self.node_ending_at(place)
            [node] = (child for child in self._tree.children(head) if not child.is_dead)
        self._tree.kill(node)
        self._log.begin_cut()

    def take_away(self, work: int, growing: Node | None = None) -> tuple[list[Removed], int]:
        """Remove what was cut off from the tree, as far as ``work`` goes.

        That counts positions, and ``_NODE_WORK`` per node and pin. ``growing``, at whose end something
        is about to be stored, does not become evictable. Returns what was removed, and what is left of
        ``work``.
        """
        removed = []
        while work > 0 and (node := self._tree.next_dead()) is not None:
            heir = self._heir_of(node)
            num_cuts = self._tree.num_cuts
            part = self._tree.trim(node, work)
            self.covered.resized(node)
            self.claimed.resized(node)
            removed.append(part)
            self._log.take_away(part, num_cuts)
            work -= len(part.slots) + _NODE_WORK * (1 + len(part.pins))
            self.after_drop(node, len(part.slots), heir, growing)
        self._log.end_cuts(self._tree.num_cuts)
        return removed, work

    def join_more(self) -> None:
        """Go on with what the last use had to leave apart, because it was too much for one call."""
        node, self._to_join = self._to_join, None
        if node is not None and node.parent is not None and not self._tree.is_dead(node):
            self._join(self._tree.path(node))

    # Private

    def _bite(self, leaf: Node, num_positions: int, growing: Node | None) -> Removed:
        heir = self._heir_of(leaf)
        removed = self._tree.trim(leaf, num_positions)
        weight = removed.slots.size + (0 if removed.bags is None else removed.bags.num_slots)
        self.after_eviction(leaf, removed.hashes, weight, heir, growing)
        return removed

    def _join(self, path: Sequence[Node]) -> None:
        """Make one node of neighbours on ``path``, the last first, that nothing keeps apart any more.

        They were apart because something hung between them, or because one was used more often. A use of all
        makes them alike. O(1) per node of the path, which the use cost anyway, and O(1) array work per
        position where nodes are joined. One call joins ``_MAX_JOINED``, then ``join_more`` goes on.
        """
        start, left = 0, self._max_joined
        for stop in range(1, len(path) + 1):
            if stop < len(path) and stop - start <= left and self._may_join(path, start, stop):
                continue
            if stop - start > 1:
                joined = self._join_all(path[start:stop])
                left -= stop - start - 1
                if left <= 0:
                    self._to_join = joined
                    return
            start = stop

    def _may_join(self, path: Sequence[Node], start: int, stop: int) -> bool:
        """Whether ``path[stop]`` may be one with ``path[start:stop]``, which may be."""
        is_alone = self._tree.is_only_child(path[stop - 1]) and not path[stop].pins
        return is_alone and self._policy.may_join(path[stop], path[start])

    def _join_all(self, parts: Sequence[Node]) -> Node:
        self._policy.leave(parts[0])
        joined = self._tree.join(parts)
        self.covered.joined(joined, parts)
        self.claimed.joined(joined, parts)
        self.after_join(joined, [part for part in parts if part is not joined])
        return joined

    def _heir_of(self, node: Node) -> Node | None:
        parent = node.parent
        return None if parent is self._tree.root else parent
