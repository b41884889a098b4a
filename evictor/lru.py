"""Least recently used leaf first."""

from collections.abc import Hashable, Sequence

from evictor.policy import L
from evictor.ranked import RankedPolicy


class LruPolicy(RankedPolicy[L]):
    """Leaf-LRU: the leaf whose last use is longest ago loses its tail.

    On a tree where using a node uses its ancestors this is the same order as LRU over single blocks. See
    Mattson et al., 1970, "Evaluation techniques for storage hierarchies". Ties are broken from the tail. An
    ancestor is never older than its descendants. Only the deepest node of a path is ranked anew. It hands its
    rank up when it is gone, so a use costs O(log n) however long the path.
    """

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        if path:
            self._rank(path[0], (next(self._clock),))

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._rank(node, (next(self._clock),))
