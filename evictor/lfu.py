"""Least frequently used leaf first."""

from collections.abc import Hashable, Sequence

from evictor.policy import L
from evictor.ranked import RankedPolicy


class LfuPolicy(RankedPolicy[L]):
    """The leaf that was asked for least often loses its tail; of equals, the one used longest ago.

    The In-Cache-LFU of Breslau, Cao, Fan, Phillips and Shenker (INFOCOM 1999, "Web caching and Zipf-like
    distributions"). To be stored is to be used once, and counts are forgotten with what they counted. A use
    counts for every node of the path, so nothing is counted less often than what continues it. Leaves are
    evicted in the order of LFU over single blocks. No other deviation. A use costs O(nodes of the path).
    """

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        now = next(self._clock)
        for node in path:
            self._rank(node, (node.rank.rank[0] + 1, now))

    def joins(self, node: L, key: Hashable) -> bool:
        """Only what was not used since it was stored has the count of what is stored now."""
        return node.rank is not None and node.rank.rank[0] == 1

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._rank(node, (1, next(self._clock)))
