"""Leaves by their last use."""

from collections import OrderedDict
from itertools import count
from typing import Generic

from sortedcontainers import SortedDict

from evictor.policy import L


class AgeQueue(Generic[L]):
    """The leaf used longest ago comes first, of equals the one that came first.

    Nearly all come in the order of their last use; those are in a linked list. The others are in a sorted
    dict: O(log n).
    """

    def __init__(self) -> None:
        self._in_order: OrderedDict[L, int] = OrderedDict()
        self._newest = -1  # last use of whoever came in order last
        self._late: SortedDict[tuple[int, int], L] = SortedDict()
        self._late_keys: dict[L, tuple[int, int]] = {}
        self._serial = count()

    def __len__(self) -> int:
        return len(self._in_order) + len(self._late)

    def add(self, leaf: L, last_use: int) -> bool:
        """Returns whether ``leaf``, which is not in it, is the first now."""
        if last_use >= self._newest or not self._in_order:
            self._newest = last_use
            self._in_order[leaf] = last_use
        else:
            key = self._late_keys[leaf] = last_use, next(self._serial)
            self._late[key] = leaf
        return self.first() is leaf

    def remove(self, leaf: L) -> bool:
        """Returns whether ``leaf``, which is in it, was the first."""
        was_first = self.first() is leaf
        key = self._late_keys.pop(leaf, None)
        if key is None:
            del self._in_order[leaf]
        else:
            del self._late[key]
        return was_first

    def first(self) -> L:
        """The leaf used longest ago; there must be one."""
        if not self._late:
            return next(iter(self._in_order))
        key, late = self._late.peekitem(0)
        if self._in_order:
            leaf, last_use = next(iter(self._in_order.items()))
            if last_use < key[0]:
                return leaf
        first: L = late
        return first

    def last_use(self, leaf: L) -> int:
        """Of a leaf that is in it."""
        key = self._late_keys.get(leaf)
        return self._in_order[leaf] if key is None else key[0]

    def check_invariants(self) -> None:
        """Each leaf is in one place, in order."""
        uses = list(self._in_order.values())
        assert uses == sorted(uses), f"{uses} are out of order"
        assert not uses or uses[-1] <= self._newest, f"{uses} end after {self._newest}"
        late = {leaf: key for key, leaf in self._late.items()}
        assert late == self._late_keys, f"{late} and {self._late_keys} differ"
        assert not late.keys() & self._in_order.keys(), "a leaf is in two places"
