"""Extents of a chain by name."""

from collections.abc import Sequence
from operator import methodcaller
from typing import NamedTuple

import numpy as np

from offload.messages import NAME_BYTES, Ids, Names
from offload.naming import bag_name

_PLACE_MASK = (1 << 32) - 1


class Path(NamedTuple):
    """What it takes to go on at a depth of a chain: extents of its prefix, then those of a bag.

    Attributes:
        names: of all of them, each the parent of the next.
        stop: the depth, in positions.
        num_prefix: extents of the prefix.
        num_bag: slots of the bag.
        end: prefix hash of the last position.
    """

    names: list[bytes]
    stop: int
    num_prefix: int
    num_bag: int
    end: bytes


class Grid(NamedTuple):
    """Cuts chains into extents of the same number of positions, from the first one on.

    An extent is named by the prefix hash of its last position, so equal names are equal bytes. An extent also
    ends at a checkpoint, with fewer positions. A bag is one extent or several behind that.

    Attributes:
        positions: of a whole extent; 0: there are none, for positions have no slots.
        columns: slots of a position.
        slots: of the largest extent.
    """

    positions: int
    columns: int
    slots: int

    @classmethod
    def of(cls, slots: int, columns: int) -> "Grid":
        """For extents of so many slots at most."""
        return cls(slots // columns if columns else 0, columns, slots)

    def names(self, chain: Sequence[bytes], stop: int | None = None) -> list[bytes]:
        """Of the whole extents within the first ``stop`` positions; None: all. O(extents)."""
        if not self.positions:
            return []
        return names_of(chain[self.positions - 1 : stop : self.positions])

    def path(self, chain: Sequence[bytes], stop: int, num_bag: int = 0) -> Path:
        """To a depth, with a bag of so many slots behind it. O(extents)."""
        names, last = self.names(chain, stop), name_of(chain[stop - 1])
        if self.positions and stop % self.positions:
            names.append(last)
        num_prefix = len(names)
        names += [bag_name(last, index) for index in range(-(-num_bag // self.slots))]
        return Path(names, stop, num_prefix, num_bag, chain[stop - 1])

    def edges(self, path: Path, first: int, last: int) -> Ids:
        """Where extents ``first <= i < last`` begin and end, in slots: ``int64[last - first + 1]``."""
        at = np.arange(first, last + 1)
        prefix = np.minimum(at * self.positions, path.stop) * self.columns
        bag = np.clip((at - path.num_prefix) * self.slots, 0, path.num_bag)
        edges: Ids = prefix + bag
        return edges

    def at(self, path: Path, position: int) -> int:
        """The extent of a path that has that position, or begins the bag behind it."""
        return position // self.positions if position < path.stop and self.positions else path.num_prefix


def name_of(prefix_hash: bytes) -> bytes:
    """As long as all names are."""
    return prefix_hash.ljust(NAME_BYTES, b"\0")


def names_of(hashes: Sequence[bytes]) -> list[bytes]:
    """The same for many. Loops in C, and not at all where hashes are as long as names."""
    if hashes and len(hashes[0]) != NAME_BYTES:
        return list(map(methodcaller("ljust", NAME_BYTES, b"\0"), hashes))
    return list(hashes)


def places_of(names: Names) -> Ids:
    """Numbers by which ranks that share bytes divide extents of these names, ``int64[n]``."""
    return np.ascontiguousarray(names[:, :8]).view(np.int64).reshape(-1) & _PLACE_MASK
