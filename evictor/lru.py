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
    tail: an ancestor is never older than its descendants. Every call is O(log n) in the candidates, at
    worst: a heap with outdated entries is faster on average, but now and then has to clean up.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._serial = count()  # nodes have no order, and two may have the same last use
        self._last_use: dict[L, int] = {}
        self._keys: dict[L, tuple[int, int]] = {}  # of candidates: last use and serial
        self._candidates: SortedDict[tuple[int, int], L] = SortedDict()

    def stored(self, node: L, keys: Sequence[Hashable]) -> None:
        self.touched(node)

    def touched(self, node: L) -> None:
        self._set_last_use(node, next(self._clock))

    def inherit(self, heir: L, source: L) -> None:
        if self._last_use.get(heir, -1) < self._last_use[source]:
            self._set_last_use(heir, self._last_use[source])

    def enter(self, leaf: L) -> None:
        if leaf not in self._keys:
            key = self._keys[leaf] = self._last_use[leaf], next(self._serial)
            self._candidates[key] = leaf

    def leave(self, leaf: L) -> None:
        key = self._keys.pop(leaf, None)
        if key is not None:
            del self._candidates[key]

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self._candidates.peekitem(0)[1] if self._candidates else None

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        """LRU keeps no history."""

    def forget(self, node: L) -> None:
        self.leave(node)
        self._last_use.pop(node, None)

    def check_invariants(self) -> None:
        assert len(self._keys) == len(self._candidates), f"{self._keys} and {self._candidates} differ"
        for (tick, serial), leaf in self._candidates.items():
            assert (self._last_use.get(leaf), self._keys.get(leaf)) == (tick, (tick, serial)), (
                f"{leaf!r} is filed under {tick}, used at {self._last_use.get(leaf)}"
            )

    def _set_last_use(self, node: L, tick: int) -> None:
        is_candidate = node in self._keys
        self.leave(node)
        self._last_use[node] = tick
        if is_candidate:
            self.enter(node)
