"""Least recently used leaf first."""

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic

from evictor.policy import L, Newcomer

_FEW = 64
"""Outdated entries that are not worth a clean-up."""


class LruPolicy(Generic[L]):
    """Leaf-LRU: the leaf whose last use is longest ago loses its tail.

    On a tree where using a node uses its ancestors this is the same order as LRU over single blocks
    (Mattson et al., 1970, "Evaluation techniques for storage hierarchies") with ties broken from the
    tail: an ancestor is never older than its descendants.

    Candidates lie in a heap by last use. One that is used again, or is no candidate any longer, leaves an
    outdated entry behind, which is dropped when it comes up, or when a new one finds more of them than
    candidates. Every call is O(log n) in the candidates, amortized.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._serial = count()  # nodes have no order, and two may have the same last use
        self._last_use: dict[L, int] = {}
        self._candidates: dict[L, int] = {}  # the serial of the entry that counts
        self._heap: list[tuple[int, int, L]] = []

    def stored(self, node: L, keys: Sequence[Hashable]) -> None:
        self.touched(node)

    def touched(self, node: L) -> None:
        self._set_last_use(node, next(self._clock))

    def inherit(self, heir: L, source: L) -> None:
        if self._last_use.get(heir, -1) < self._last_use[source]:
            self._set_last_use(heir, self._last_use[source])

    def enter(self, leaf: L) -> None:
        if leaf not in self._candidates:
            self._push(leaf)

    def leave(self, leaf: L) -> None:
        self._candidates.pop(leaf, None)

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        while self._heap:
            _, serial, leaf = self._heap[0]
            if self._candidates.get(leaf) == serial:
                return leaf
            heappop(self._heap)
        return None

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        """LRU keeps no history."""

    def forget(self, node: L) -> None:
        self.leave(node)
        self._last_use.pop(node, None)

    def check_invariants(self) -> None:
        entries = {serial: (tick, leaf) for tick, serial, leaf in self._heap}
        for leaf, serial in self._candidates.items():
            assert entries.get(serial) == (self._last_use.get(leaf), leaf), (
                f"{leaf!r} is filed under {entries.get(serial)}, used at {self._last_use.get(leaf)}"
            )

    def _push(self, leaf: L) -> None:
        serial = self._candidates[leaf] = next(self._serial)
        heappush(self._heap, (self._last_use[leaf], serial, leaf))
        if len(self._heap) > 2 * len(self._candidates) + _FEW:
            self._heap = [entry for entry in self._heap if self._candidates.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def _set_last_use(self, node: L, tick: int) -> None:
        self._last_use[node] = tick
        if node in self._candidates:
            self._push(node)
