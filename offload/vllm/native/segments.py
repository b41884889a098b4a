"""Runs of keys: the nodes of ``offload.vllm.native.ranked_segments``."""

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from operator import ne
from typing import Any, NamedTuple

Key = Hashable


class Segment:
    """Consecutive keys. Compared by identity."""

    __slots__ = ("children", "keys", "mark", "num_busy", "parent", "rank")

    def __init__(self, parent: "Segment | None", keys: list[Key]) -> None:
        self.parent = parent
        self.keys = keys
        self.children: set[Segment] = set()
        self.num_busy = 0
        self.rank: Any = None  # what policies keep; see evictor.policy
        self.mark: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def weight(self) -> int:
        """Blocks that it takes."""
        return len(self.keys)

    @property
    def is_evictable(self) -> bool:
        """Whether its tail may go: a leaf with no key in use."""
        return not self.children and not self.num_busy

    def split(self, size: int) -> "Segment":
        """Give the first ``size`` keys to a new segment, or the others if they are fewer; return it.

        Who is in use is not known here: ``num_busy`` of both is for the caller to set right.
        """
        if size <= len(self) - size:
            new = Segment(self.parent, self.keys[:size])
            del self.keys[:size]
            if new.parent is not None:
                new.parent.children.remove(self)
                new.parent.children.add(new)
            new.children = {self}
            self.parent = new
        else:
            new = Segment(self, self.keys[size:])
            del self.keys[size:]
            new.children, self.children = self.children, {new}
            for child in new.children:
                child.parent = new
        return new

    def unlink(self) -> None:
        """Leave the tree, and the children to the parent."""
        for child in self.children:
            child.parent = self.parent
        if self.parent is not None:
            self.parent.children.remove(self)
            self.parent.children |= self.children


class Arrival(NamedTuple):
    """``keys`` are about to come; in their chain they follow ``before``, None if nothing here."""

    before: Key
    keys: Sequence[Key]


class Evicted(NamedTuple):
    """``keys`` left; ``for_guests``: the policy would rather have rejected what they were evicted for."""

    keys: list[Key]
    for_guests: bool


def num_common(keys: Sequence[Key], chain: Sequence[Key], start: int) -> int:
    """With how many keys ``keys`` and ``chain[start:]`` both begin."""
    rest = chain[start : start + len(keys)]
    if rest == keys:
        return len(keys)
    differences = (place for place, differs in enumerate(map(ne, keys, rest)) if differs)
    return next(differences, len(rest))


def num_free(keys: list[Key], limit: int, protected: AbstractSet[Key]) -> int:
    """How many of the last keys, up to ``limit``, are not protected."""
    tail = keys[-limit:]
    if protected.isdisjoint(tail):
        return len(tail)
    return next(number for number, key in enumerate(reversed(tail)) if key in protected)
