"""Places that hold what was written under a name of weights: found again when that name comes again."""

import numpy as np

from offload.messages import NAME_BYTES, SUFFIX_BYTES, Ids, Names
from offload.scheduler.tiers.recovery import Agreed


class NamedPlaces:
    """Names and parents of extents that have a suffix, by place. Takes no memory before there is one."""

    def __init__(self, num_places: int) -> None:
        """None of so many places has any."""
        self._num_places = num_places
        self._suffixes: Names | None = None
        self._names = self._parents = np.zeros((0, NAME_BYTES), dtype=np.uint8)

    def forget(self, places: Ids) -> None:
        """They are about to hold something else."""
        if self._suffixes is not None:
            self._suffixes[places] = 0

    def note(self, places: Ids, names: Names, parents: Names, suffixes: Names) -> None:
        """They hold these; ``suffixes``: ``uint8[n, 16]`` or one for all, none of them zeros. O(places)."""
        if self._suffixes is None:
            self._suffixes = np.zeros((self._num_places, SUFFIX_BYTES), dtype=np.uint8)
            self._names = np.zeros((self._num_places, NAME_BYTES), dtype=np.uint8)
            self._parents = np.zeros_like(self._names)
        self._suffixes[places], self._names[places], self._parents[places] = suffixes, names, parents

    def of(self, suffix: bytes, generations: Ids) -> Agreed:
        """What has that suffix, the oldest first; ``generations``: of all places. O(places)."""
        if self._suffixes is None:
            found = np.empty(0, dtype=np.int64)
        else:
            found = np.flatnonzero((self._suffixes == as_row(suffix)).all(axis=1))
            found = found[np.argsort(generations[found], kind="stable")]
        names, parents = self._names[found], self._parents[found]
        suffixes = np.tile(as_row(suffix), (len(found), 1))
        return Agreed(found, generations[found], names, parents, suffixes)

    def check_invariants(self) -> None:
        """What has a suffix has a name."""
        if self._suffixes is not None:
            named = self._suffixes.any(axis=1)
            assert self._names[named].any(axis=1).all(), f"{np.flatnonzero(named)} lack names"


def as_row(suffix: bytes) -> Names:
    """``uint8[16]``, with zeros behind."""
    return np.frombuffer(suffix.ljust(SUFFIX_BYTES, b"\0"), dtype=np.uint8)
