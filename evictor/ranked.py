"""What policies share that give every node one rank and evict the leaf of the lowest."""

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Generic

from sortedcontainers import SortedDict

from evictor.policy import L, Newcomer

Rank = tuple[int, ...]


class RankedPolicy(Generic[L]):
    """The leaf of the lowest rank goes first; a subclass says what ranks are, in ``used`` and ``stored``.

    Every call is O(log n) in the candidates, at worst: a heap with outdated entries is faster on average,
    but now and then has to clean up.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._serial = count()  # nodes have no order, and two may have the same rank
        self._ranks: dict[L, Rank] = {}
        self._keys: dict[L, tuple[Rank, int]] = {}  # of candidates: rank and serial
        self._candidates: SortedDict[tuple[Rank, int], L] = SortedDict()

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        return len(keys) - start

    def joins(self, node: L, key: Hashable) -> bool:
        return True

    def inherit(self, heir: L, source: L) -> None:
        rank = self._ranks[source]
        if heir not in self._ranks or self._ranks[heir] < rank:
            self._rank(heir, rank)

    def may_join(self, head: L, tail: L) -> bool:
        """A parent gets the rank of the child that goes, if that is higher: here it would."""
        return self._ranks[head] <= self._ranks[tail]

    def joined(self, node: L, gone: L) -> None:
        self._rank(node, max(self._ranks[node], self._ranks[gone]))
        self.forget(gone)

    def enter(self, leaf: L) -> None:
        if leaf not in self._keys:
            key = self._keys[leaf] = self._ranks[leaf], next(self._serial)
            self._candidates[key] = leaf

    def leave(self, leaf: L) -> None:
        key = self._keys.pop(leaf, None)
        if key is not None:
            del self._candidates[key]

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self._candidates.peekitem(0)[1] if self._candidates else None

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        """No history is kept."""

    def dropped(self, node: L, num_positions: int) -> None:
        """No position is counted."""

    def forget(self, node: L) -> None:
        self.leave(node)
        self._ranks.pop(node, None)

    def check_invariants(self) -> None:
        assert len(self._keys) == len(self._candidates), f"{self._keys} and {self._candidates} differ"
        for key, leaf in self._candidates.items():
            assert self._keys.get(leaf) == key, f"{leaf!r} is filed under {key}, not {self._keys.get(leaf)}"
            assert self._ranks.get(leaf) == key[0], (
                f"{leaf!r} is filed under {key}, has {self._ranks.get(leaf)}"
            )

    def _rank(self, node: L, rank: Rank) -> None:
        is_candidate = node in self._keys
        self.leave(node)
        self._ranks[node] = rank
        if is_candidate:
            self.enter(node)
