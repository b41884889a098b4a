"""When requests came, by the tick."""

import math
from array import array
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LEAST, _MOST = 8192, 16384


class Moments:
    """When ticks were reached, of at least the last 8,192 requests. Calls for one tick are O(log n)."""

    def __init__(self) -> None:
        self._ticks = array("q")
        self._seconds = array("d")

    def add(self, tick: int, seconds: float) -> None:
        """``tick`` is the latest. A clock that goes back stands still meanwhile."""
        if self._seconds and seconds < self._seconds[-1]:
            seconds = self._seconds[-1]
        if len(self._ticks) == _MOST:
            del self._ticks[:-_LEAST], self._seconds[:-_LEAST]
        self._ticks.append(tick)
        self._seconds.append(seconds)

    def at(self, tick: int) -> float:
        """When that one was reached, or the last one known before it; minus infinity if there is none."""
        found = bisect_right(self._ticks, tick)
        return self._seconds[found - 1] if found else -math.inf

    def all_at(self, ticks: Ints) -> Floats:
        """``at`` of each. Whole arrays."""
        found = np.searchsorted(np.frombuffer(self._ticks, np.int64), ticks, "right")
        return np.concatenate(([-np.inf], np.frombuffer(self._seconds)))[found]

    def ticks_at(self, seconds: Floats) -> Ints:
        """Which was the last one reached at each of these moments; -1 if none is known. Whole arrays."""
        found = np.searchsorted(np.frombuffer(self._seconds), seconds, "right")
        return np.concatenate(([-1], np.frombuffer(self._ticks, np.int64)))[found]

    def ticks_per_second(self, num_requests: int) -> float:
        """Over so many of the last requests; 1 if no time has passed."""
        first = max(0, len(self._ticks) - 1 - num_requests)
        seconds = self._seconds[-1] - self._seconds[first]
        return (self._ticks[-1] - self._ticks[first]) / seconds if seconds > 0 else 1.0

    def check_invariants(self) -> None:
        """Ticks and moments are in order, and no more are known than may be."""
        ticks, seconds = self._ticks.tolist(), self._seconds.tolist()
        assert ticks == sorted(set(ticks)), "ticks out of order"
        assert seconds == sorted(seconds), "moments out of order"
        assert len(ticks) == len(seconds) <= _MOST, f"{len(ticks)} moments"
