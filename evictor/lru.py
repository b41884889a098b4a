"""Least recently used leaf first."""

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Generic

from sortedcontainers import SortedDict

from evictor.policy import L, Newcomer


class LruPolicy(Generic[L]):
    """Leaf-LRU: the leaf whose last use is longest ago loses its tail.

    On a tree where using a node uses its ancestors this is the same order as LRU over single blocks
    (Mattson et al., 1970, "Evaluation techniques for storage hierarchies") with ties broken from the
    tail: an ancestor is never older than its descendants. Every call is O(log n) in the candidates.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._last_use: dict[L, int] = {}
        self._candidates: SortedDict[int, L] = SortedDict()

    def stored(self, node: L, keys: Sequence[Hashable]) -> None:
        self.touched(node)

    def touched(self, node: L) -> None:
        self._set_last_use(node, next(self._clock))

    def inherit(self, heir: L, source: L) -> None:
        if self._last_use.get(heir, -1) < self._last_use[source]:
            self._set_last_use(heir, self._last_use[source])

    def enter(self, leaf: L) -> None:
        self._candidates[self._last_use[leaf]] = leaf

    def leave(self, leaf: L) -> None:
        if self._is_candidate(leaf):
            del self._candidates[self._last_use[leaf]]

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self._candidates.peekitem(0)[1] if self._candidates else None

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        """LRU keeps no history."""

    def forget(self, node: L) -> None:
        self.leave(node)
        self._last_use.pop(node, None)

    def check_invariants(self) -> None:
        for tick, leaf in self._candidates.items():
            assert self._last_use.get(leaf) == tick, (
                f"{leaf!r} is filed under {tick}, used at {self._last_use}"
            )

    def _is_candidate(self, node: L) -> bool:
        return self._candidates.get(self._last_use.get(node)) is node

    def _set_last_use(self, node: L, tick: int) -> None:
        candidate = self._is_candidate(node)
        if candidate:
            del self._candidates[self._last_use[node]]
        self._last_use[node] = tick
        if candidate:
            self._candidates[tick] = node
