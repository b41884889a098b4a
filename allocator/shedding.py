"""Tails of chains that somebody else has too, and that leave the pool for that reason."""

from collections.abc import Sequence

from allocator.node import Node
from allocator.prefix_tree import PrefixTree
from allocator.room import Room
from evictor import EvictionPolicy, HintedPolicy


class Shedding:
    """Takes tails of chains out of the pool that need not be there. It has no state of its own."""

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy[Node], room: Room) -> None:
        self._tree = tree
        self._policy = policy
        self._room = room

    def shed(self, chain: Sequence[bytes], start: int, stop: int, most: int) -> int:
        """Evict the last known positions of ``chain[start:stop]``, ``most`` at most.

        They go from the end on, as long as nothing hangs behind them, nobody fills or reads them, and no hint
        pins them. Returns how many went. The policy remembers them as evicted. O(log n) and O(1) array work
        per position, and that for each segment. Models with windows or states have checkpoints, where this
        does nothing.
        """
        num_shed = 0
        if self._tree.has_checkpoints:
            return 0
        while num_shed < most:
            node, depth = self._tree.find(chain, stop)
            if depth <= start or depth != node.end or not node.is_evictable or self._pins(node):
                break
            num_positions = min(depth - max(start, node.start), most - num_shed)
            self._room.shed(node, num_positions)
            num_shed += num_positions
        return num_shed

    def _pins(self, node: Node) -> bool:
        return isinstance(self._policy, HintedPolicy) and self._policy.pins(node)
