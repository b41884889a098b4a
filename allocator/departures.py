"""Where what left the pool began: a bounded memory, for whoever asks why something is not there."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple

MOST_DEPARTURES = 1 << 14
"""That are remembered: some 3 MB."""


class Cause(Enum):
    """Why positions left the pool."""

    EVICTED = auto()
    """For others."""
    DROPPED = auto()
    """They were not wanted any more, or their bytes were wrong."""
    SHRUNK = auto()
    """The pool was made smaller."""
    UNSTORED = auto()
    """They had no slots, and the GPU lost them."""


class Departure(NamedTuple):
    """Positions of a chain left the pool, from one on to the end of what was there.

    Attributes:
        cause: why.
        at: when, by the caller's clock.
        whom: for whom, in the caller's words; "" if that is not known.
    """

    cause: Cause
    at: float
    whom: str


class Departures:
    """Remembers by the prefix hash of the first position that left. O(1) each, however much left.

    What leaves are tails. So the first position of a chain that is missing is where the last of its tails
    began, unless something of that was stored again meanwhile. Where nothing is known, nothing is said.

    Attributes:
        now: the time, by the caller's clock.
        whom: for whom the next ones go, in the caller's words.
        num_forgotten: those that made room for later ones.
    """

    def __init__(self, most: int = MOST_DEPARTURES) -> None:
        """Nothing has left. ``most``: that are remembered, at least 1."""
        self._most = most
        self._by_first: OrderedDict[bytes, Departure] = OrderedDict()
        self.now = 0.0
        self.whom = ""
        self.num_forgotten = 0
        self._is_shrinking = False

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._by_first)

    def begin(self, whom: str, now: float) -> None:
        """What the next plan evicts leaves for that one, at that time."""
        self.whom, self.now = whom, now

    @contextmanager
    def shrinking(self) -> Iterator[None]:
        """What leaves meanwhile leaves as the pool is made smaller."""
        self._is_shrinking = True
        try:
            yield
        finally:
            self._is_shrinking = False

    def note(self, first_hash: bytes, cause: Cause) -> None:
        """All from that position on has left. What had slots leaves a pool that is made smaller for that."""
        if self._is_shrinking and cause is not Cause.UNSTORED:
            cause = Cause.SHRUNK
        self._by_first[first_hash] = Departure(cause, self.now, self.whom)
        self._by_first.move_to_end(first_hash)
        if len(self._by_first) > self._most:
            self._by_first.popitem(last=False)
            self.num_forgotten += 1

    def of(self, first_hash: bytes) -> Departure | None:
        """The last one that began there; None: none is remembered."""
        return self._by_first.get(first_hash)

    def check_invariants(self) -> None:
        """It is bounded, and in the order of time."""
        assert len(self) <= self._most, f"{len(self)} are remembered, {self._most} may be"
        times = [each.at for each in self._by_first.values()]
        assert times == sorted(times), "what left later is forgotten first"
        assert not self._is_shrinking, "nobody makes the pool smaller now"
