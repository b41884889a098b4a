"""What a store is believed to have, that others write and evict, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat, takewhile
from math import inf
from typing import Any

FRESH_SECONDS = 5.0
"""What was seen is not asked for again for that long."""

KEEP_SECONDS = 60.0
"""What was seen is believed for that long, and what was missed is believed to be gone."""

_MOST_NAMES = 1 << 17
_NONE: Mapping[bytes, float] = {}


class Beliefs:
    """Names that were seen in a store, each with its age, and names that were not there.

    They may be wrong at any time. Names lie in two dicts. When the younger one is full, or old, it takes the
    place of the older one, whose names are forgotten.
    """

    def __init__(self, clock: Callable[[], float], *, most_names: int = _MOST_NAMES) -> None:
        """Begin with none. ``clock`` in seconds; ``most_names`` are believed to be there."""
        self._clock = clock
        self._most = most_names
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}
        self._gone: dict[bytes, float] = {}  # until when nobody asks for them
        self._since = clock()  # the younger names are not older

    def __len__(self) -> int:
        """Names that were seen and are not forgotten, some of them twice."""
        return len(self._young) + len(self._old)

    def depth(
        self,
        names: Sequence[bytes],
        seconds: float = KEEP_SECONDS,
        also: Mapping[bytes, float] = _NONE,
    ) -> int:
        """How many leading ones were seen within so many seconds, or have ``inf`` in ``also``.

        O(extents), in C. Where the last one is young, mostly all are: one look at each tells.
        """
        since = self._clock() - seconds
        if names and names[-1] in self._young and min(map(self._young.get, names, repeat(-inf))) >= since:
            return len(names)
        seen: Iterator[Any] = map(self._young.get, names, map(self._old.get, names, repeat(-inf)))
        if also:
            seen = map(also.get, names, seen)
        return len(list(takewhile(since.__le__, seen)))

    def is_open(self, names: Sequence[bytes], depth: int) -> bool:
        """Whether nobody knows if the name behind the first ``depth`` is there."""
        return depth < len(names) and self._gone.get(names[depth], -inf) <= self._clock()

    def are_gone(self, names: Sequence[bytes]) -> bool:
        """Whether one of them was found missing of late."""
        now = self._clock()
        return any(self._gone.get(name, -inf) > now for name in names)

    def believe(self, names: Sequence[bytes]) -> None:
        """These were seen now."""
        now = self._clock()
        is_full = len(self._young) + len(names) > self._most // 2
        if self._young and (is_full or now > self._since + KEEP_SECONDS):
            self._old, self._young = self._young, {}
        if not self._young:
            self._since = now
        self._young.update(zip(names[-self._most // 2 :], repeat(now)))
        for name in self._gone.keys() & names:
            del self._gone[name]

    def deny(self, names: Sequence[bytes], index: int, seconds: float = KEEP_SECONDS) -> None:
        """That one is not there, and will not be asked for so long; what follows is not believed in."""
        behind = names[index:]
        for seen in (self._young, self._old):
            for name in seen.keys() & behind:
                del seen[name]
        if index < len(names):
            if len(self._gone) >= self._most:
                self._gone = {}
            self._gone[names[index]] = self._clock() + seconds

    def clear(self) -> None:
        """Nothing is believed."""
        self._young, self._old, self._gone = {}, {}, {}

    def check_invariants(self) -> None:
        """There are not too many, and none is believed to be there and gone."""
        assert len(self._young) <= self._most // 2 and len(self._old) <= self._most // 2, len(self)
        assert len(self._gone) <= self._most, f"{len(self._gone)} names are gone"
        both = self._gone.keys() & (self._young.keys() | self._old.keys())
        assert not both, f"{both} are there, and gone"
