"""Extents of a chain by name."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from offload.messages import NAME_BYTES, Names

ROOT = bytes(NAME_BYTES)
"""The parent of the first extent of a chain."""


class Grid(NamedTuple):
    """Cuts chains into extents of the same number of positions, from the first one on.

    An extent is named by the prefix hash of its last position, so equal names are equal bytes. What is behind
    the last whole one has no extent.

    Attributes:
        positions: of an extent.
    """

    positions: int

    def names(self, chain: Sequence[bytes], stop: int | None = None) -> list[bytes]:
        """Of the extents within the first ``stop`` positions; None: all. O(extents)."""
        hashes = chain[self.positions - 1 : stop : self.positions]
        if hashes and len(hashes[0]) != NAME_BYTES:
            return [each.ljust(NAME_BYTES, b"\0") for each in hashes]
        return list(hashes)


def rows(names: Sequence[bytes]) -> Names:
    """Names as an array, ``uint8[n, 32]``."""
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, NAME_BYTES)
