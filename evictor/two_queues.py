"""What policies share that keep nodes in one of two queues: those new to them, and those that proved good."""

from collections.abc import Collection

from evictor.policy import L
from evictor.ranked import Rank, Ranked, RankedPolicy

NEW, PROVEN = 0, 1


class TwoQueues(RankedPolicy[L]):
    """The first number of a rank is the queue; how many slots are in NEW is counted.

    Nodes that are no candidates keep their place in their queue, and are counted. Rank order is queue
    order. When a node in PROVEN is removed, its parent moves to PROVEN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_new = 0

    def inherit(self, heir: L, source: L) -> None:
        super().inherit(heir, source)
        self._count(source)

    def may_join(self, head: L, tail: L) -> bool:
        """Those in the same queue where the prefix is not younger."""
        are_alike: bool = head.rank.rank[0] == tail.rank.rank[0]
        return are_alike and super().may_join(head, tail)

    def resized(self, node: L) -> None:
        self._count(node)

    def dropped(self, node: L, num_positions: int) -> None:
        super().dropped(node, num_positions)
        self._count(node)

    def forget(self, node: L) -> None:
        self.leave(node)
        if node.rank is not None:
            self._num_new -= node.rank.size
            node.rank = None

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        super().check_invariants(nodes)
        if nodes is None:
            return
        for node in nodes:
            size = node.weight if node.rank.rank[0] == NEW else 0
            assert node.rank.size == size, f"{node!r} counts as {node.rank.size} new slots, not {size}"
        num_new = sum(node.rank.size for node in nodes)
        assert num_new == self._num_new, f"{num_new} new slots, not {self._num_new}"

    def _first(self, queue: int) -> L | None:
        """The candidate whose turn it is, from ``queue`` if it has one, else from the other."""
        leaf = self._candidates.first_from((queue,)) if queue else None
        return self._candidates.first if leaf is None else leaf

    def _rank(self, node: L, rank: Rank) -> None:
        super()._rank(node, rank)
        self._count(node)

    def _count(self, node: L) -> None:
        """Note the size of ``node``, in every call that tells of a change of it."""
        known: Ranked | None = node.rank
        if known is not None:
            size = node.weight if known.rank[0] == NEW else 0
            self._num_new += size - known.size
            known.size = size
