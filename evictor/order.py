"""Leaves in an order, where the garbage collector does not see them."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Generic

from evictor.policy import L
from evictor.untracked import untrack

Key = tuple[Any, ...]
"""A tuple of numbers. No two leaves have the same."""

_CHUNK = 512
"""Leaves in a list."""


class Order(Generic[L]):
    """Leaves by their keys, the lowest first.

    They are in lists of at most 1,024, which the collector does not visit; most are added at the end. Every
    call is O(log n), and moves part of one list.
    """

    def __init__(self) -> None:
        self._highest: list[Key] = []  # key of each chunk
        self._keys: list[list[Key]] = []  # of chunks, ascending
        self._leaves: list[list[L]] = []  # the same places
        self._size = 0
        self.first: L | None = None
        """The leaf of the lowest key."""
        self.first_key: Key | None = None
        """Its key."""

    def __len__(self) -> int:
        return self._size

    def add(self, key: Key, leaf: L) -> bool:
        """``key`` is not in it. Returns whether ``leaf`` is the first now."""
        self._size += 1
        if is_first := self.first_key is None or key < self.first_key:
            self.first, self.first_key = leaf, key
        if not self._highest or key > self._highest[-1]:
            if not self._highest or len(self._keys[-1]) >= _CHUNK:
                self._insert_chunk(len(self._highest), [], [], key)
            self._keys[-1].append(key)
            self._leaves[-1].append(leaf)
            self._highest[-1] = key
            return is_first
        at = bisect_left(self._highest, key)
        keys, leaves = self._keys[at], self._leaves[at]
        place = bisect_left(keys, key)
        keys.insert(place, key)
        leaves.insert(place, leaf)
        if len(keys) > 2 * _CHUNK:
            self._insert_chunk(at, keys[:_CHUNK], leaves[:_CHUNK], keys[_CHUNK - 1])
            del keys[:_CHUNK], leaves[:_CHUNK]
        return is_first

    def remove(self, key: Key) -> bool:
        """``key`` is in it. Returns whether it was the first."""
        self._size -= 1
        at = bisect_left(self._highest, key)
        keys, leaves = self._keys[at], self._leaves[at]
        place = bisect_left(keys, key)
        assert keys[place] == key, f"{key} is not in it"
        del keys[place], leaves[place]
        if not keys:
            del self._highest[at], self._keys[at], self._leaves[at]
        elif place == len(keys):
            self._highest[at] = keys[-1]
        if 0 < len(keys) < _CHUNK // 4:
            self._join_next(at)
            self._join_next(at - 1)
        if was_first := key == self.first_key:
            self.first_key, self.first = (
                (self._keys[0][0], self._leaves[0][0]) if self._size else (None, None)
            )
        return was_first

    def first_from(self, low: Key) -> L | None:
        """The leaf of the lowest key that is not below ``low``."""
        return next((leaf for _, leaf in self.items_from(low)), None)

    def items_from(self, low: Key) -> Iterator[tuple[Key, L]]:
        """Keys not below ``low``, and their leaves, in order. Nothing may be added or removed meanwhile."""
        at = bisect_left(self._highest, low)
        place = bisect_left(self._keys[at], low) if at < len(self._keys) else 0
        while at < len(self._keys):
            yield from zip(self._keys[at][place:], self._leaves[at][place:], strict=True)
            at, place = at + 1, 0

    def items(self) -> Iterator[tuple[Key, L]]:
        """All keys and their leaves, in order. O(n)."""
        return self.items_from(())

    def check_invariants(self) -> None:
        """All is in order, and chunks are neither empty nor too long."""
        if not self._size:  # as most of a policy's, most of the time
            assert not self._highest and not self._keys and not self._leaves, "it is not empty"
            assert self.first_key is self.first is None, f"{self.first!r} is the first of none"
            return
        keys = [key for key, _ in self.items()]
        assert all(before < after for before, after in pairwise(keys)), f"{keys} are out of order"
        first = next(self.items(), (None, None))
        assert (self.first_key, self.first) == first, f"{self.first!r} is not the first, {first}"
        assert len(keys) == self._size, f"{len(keys)} leaves, not {self._size}"
        assert self._highest == [chunk[-1] for chunk in self._keys], f"{self._highest} are not the last keys"
        sizes = [(len(chunk), len(leaves)) for chunk, leaves in zip(self._keys, self._leaves, strict=True)]
        assert all(0 < size == other <= 2 * _CHUNK for size, other in sizes), f"chunks of {sizes} leaves"

    def _insert_chunk(self, at: int, keys: list[Key], leaves: list[L], highest: Key) -> None:
        untrack(keys)
        untrack(leaves)
        self._keys.insert(at, keys)
        self._leaves.insert(at, leaves)
        self._highest.insert(at, highest)

    def _join_next(self, at: int) -> None:
        """Make one chunk of two short neighbours, so that there are not many chunks of few leaves."""
        if not 0 <= at < len(self._keys) - 1:
            return
        keys, leaves = self._keys[at], self._leaves[at]
        if len(keys) + len(self._keys[at + 1]) <= _CHUNK:
            keys += self._keys[at + 1]
            leaves += self._leaves[at + 1]
            del self._highest[at], self._keys[at + 1], self._leaves[at + 1]
