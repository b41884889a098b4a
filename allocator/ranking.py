"""The tree and the policy that ranks its leaves, kept in step."""

from collections.abc import Sequence

from allocator.prefix_tree import Node, Place, PrefixTree, Removed
from allocator.slot_pool import Slots
from evictor import EvictionPolicy, HintedPolicy, KeepHints, Newcomer


class Ranking:
    """Changes the tree and tells the policy: whatever splits, grows or goes does so through here."""

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy[Node]) -> None:
        """``policy`` heeds hints if it is a ``HintedPolicy``."""
        self._tree = tree
        self._policy = policy
        self._hinted = policy if isinstance(policy, HintedPolicy) else None

    def use(self, chain: Sequence[bytes], hints: KeepHints | None) -> None:
        """A request asks for ``chain``. O(log n), O(segments) of the chain."""
        place = self._tree.find(chain, len(chain))
        path = self._tree.path(self.node_ending_at(place) if place.depth else self._tree.root)
        self._policy.used(path, chain, place.depth)
        if self._hinted is not None:
            self._hinted.ask(hints, path)

    def ask(self, node: Node, hints: KeepHints | None, num_new: int) -> None:
        """A request may store ``num_new`` positions below ``node`` and wants them kept so."""
        if self._hinted is not None:
            matters = hints is not None or self._hinted.is_in_use
            self._hinted.ask(hints, self._tree.path(node) if matters else (), num_new)

    def node_ending_at(self, place: Place) -> Node:
        """Split so that ``place`` is the end of a node; return that node."""
        node, depth = place
        if depth == node.end:
            return node
        new = self._tree.split(place)
        self._policy.leave(node)
        self._policy.inherit(new, node)
        self.refresh(node)
        self.refresh(new)
        return new if new.end == depth else node

    def refresh(self, node: Node) -> None:
        """It may have become evictable, or not evictable."""
        if node.is_evictable:
            self._policy.enter(node)
        else:
            self._policy.leave(node)

    def append(self, place: Place, hashes: list[bytes], slots: Slots, next_hash: bytes | None) -> None:
        """Hang positions below ``place``, those of equal past in one node; ``next_hash`` comes after them."""
        node, depth = place
        stop = 0
        while stop < len(hashes):
            start, stop = stop, stop + self._policy.num_alike(hashes, stop)
            part = hashes[start:stop]
            may_grow = self._policy.joins(node, part[0])
            node = self._tree.append(Place(node, depth + start), part, slots[start:stop], may_grow)
            self._policy.stored(node, part, hashes[stop] if stop < len(hashes) else next_hash)

    def evict(self, newcomer: Newcomer[Node] | None, num_positions: int) -> Removed | None:
        """Up to that many positions of the leaf that is worth least; None if nothing should go."""
        leaf = self._policy.choose(newcomer)
        if leaf is None:
            return None
        parent = leaf.parent
        assert parent is not None
        removed = self._tree.trim(leaf, num_positions)
        self._policy.evicted(leaf, removed.hashes)
        if not leaf.hashes:
            if parent is not self._tree.root:
                self._policy.inherit(parent, leaf)
            self._policy.forget(leaf)
            if newcomer is None or parent is not newcomer.parent:
                self.refresh(parent)
        return removed

    def cut(self, place: Place) -> list[Removed]:
        """Everything after ``place`` leaves the tree, but not to make room."""
        parent = place.node.parent
        removed = self._tree.cut(place)
        left = place.node if place.node.hashes else parent
        heir = left if left is not None and left.hashes else None
        for part in removed:
            self._policy.dropped(part.node, len(part.hashes))
            if not part.node.hashes:
                if heir is not None:
                    self._policy.inherit(heir, part.node)
                self._policy.forget(part.node)
        if heir is not None:
            self.refresh(heir)
        return removed
