"""What policies share that keep nodes in one of two queues: those new to them, and those that proved good."""

from evictor.policy import L
from evictor.ranked import Rank, RankedPolicy

NEW, PROVEN = 0, 1


class TwoQueues(RankedPolicy[L]):
    """The first number of a rank is the queue; how many positions are in NEW is counted.

    Nodes that are no candidates keep their place in their queue, and are counted. Rank order is queue
    order. A prefix is in PROVEN if anything was that went from behind it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[L, int] = {}  # positions of nodes in NEW
        self._num_new = 0

    def inherit(self, heir: L, source: L) -> None:
        super().inherit(heir, source)
        self._count(source)

    def may_join(self, head: L, tail: L) -> bool:
        return self._ranks[head] == self._ranks[tail]

    def enter(self, leaf: L) -> None:
        super().enter(leaf)
        self._count(leaf)

    def leave(self, leaf: L) -> None:
        super().leave(leaf)
        self._count(leaf)

    def dropped(self, node: L, num_positions: int) -> None:
        super().dropped(node, num_positions)
        self._count(node)

    def forget(self, node: L) -> None:
        super().forget(node)
        self._count(node)

    def check_invariants(self) -> None:
        super().check_invariants()
        sizes = {node: len(node) for node, rank in self._ranks.items() if rank[0] == NEW and len(node)}
        assert sizes == self._sizes, f"nodes that are new: {sizes}, counted: {self._sizes}"
        assert sum(sizes.values()) == self._num_new, f"{sizes} are not {self._num_new} positions"

    def _first(self, queue: int) -> L | None:
        """The candidate whose turn it is, from ``queue`` if it has one, else from the other."""
        if not self._candidates:
            return None
        at = self._candidates.bisect_left(((queue,),)) if queue else 0
        leaf: L = self._candidates.peekitem(at if at < len(self._candidates) else 0)[1]
        return leaf

    def _rank(self, node: L, rank: Rank) -> None:
        super()._rank(node, rank)
        self._count(node)

    def _count(self, node: L) -> None:
        """Note the size of ``node``: cuts and splits change it, and each is followed by a call here."""
        rank = self._ranks.get(node)
        size = len(node) if rank is not None and rank[0] == NEW else 0
        self._num_new += size - self._sizes.pop(node, 0)
        if size:
            self._sizes[node] = size
