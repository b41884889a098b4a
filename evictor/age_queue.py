"""Leaves by their last use."""

from collections import OrderedDict
from itertools import count
from typing import Generic

from sortedcontainers import SortedDict

from evictor.policy import L


class AgeQueue(Generic[L]):
    """The leaf used longest ago comes first.

    Nearly all come in the order of their last use; those are in a linked list. The others are in a sorted
    dict: O(log n).
    """

    def __init__(self) -> None:
        self.first: L | None = None
        """The leaf used longest ago."""
        self.first_use = -1
        """Its last use."""
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
        if is_first := self.first is None or last_use < self.first_use:
            self.first, self.first_use = leaf, last_use
        return is_first

    def remove(self, leaf: L) -> bool:
        """Returns whether ``leaf``, which is in it, was the first."""
        if self._late and (key := self._late_keys.pop(leaf, None)) is not None:
            del self._late[key]
        else:
            del self._in_order[leaf]
        if was_first := self.first is leaf:
            self._find_first()
        return was_first

    def last_use(self, leaf: L) -> int:
        """Of a leaf that is in it."""
        key = self._late_keys.get(leaf)
        return self._in_order[leaf] if key is None else key[0]

    def check_invariants(self) -> None:
        """Each leaf is in one place, in order."""
        if not self._in_order and not self._late:  # most of a policy's, most of the time
            assert not self._late_keys and self.first is None and self.first_use == -1, "it is not empty"
            return
        uses = list(self._in_order.values())
        assert uses == sorted(uses), f"{uses} are out of order"
        assert not uses or uses[-1] <= self._newest, f"{uses} end after {self._newest}"
        late = {leaf: key for key, leaf in self._late.items()}
        assert late == self._late_keys, f"{late} and {self._late_keys} differ"
        assert not late.keys() & self._in_order.keys(), "a leaf is in two places"
        oldest = min([*uses, *(key[0] for key in self._late)], default=-1)
        assert self.first_use == oldest, f"the first was used at {self.first_use}, the oldest at {oldest}"
        assert (self.first is None) == (not len(self)), f"{self.first!r} is the first of {len(self)}"
        assert self.first is None or self.last_use(self.first) == oldest, f"{self.first!r} is not the oldest"

    def _find_first(self) -> None:
        self.first, self.first_use = next(iter(self._in_order.items()), (None, -1))
        if self._late:
            key, leaf = self._late.peekitem(0)
            if self.first is None or key[0] < self.first_use:
                self.first, self.first_use = leaf, key[0]
