"""When requests came, by the tick."""

import math
from bisect import bisect_right

_LEAST, _MOST = 8192, 16384


class Moments:
    """When ticks were reached, of at least the last 8,192 requests. All calls are O(log n)."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._seconds: list[float] = []

    def add(self, tick: int, seconds: float) -> None:
        """``tick`` is the latest."""
        if len(self._ticks) == _MOST:
            del self._ticks[:-_LEAST], self._seconds[:-_LEAST]
        self._ticks.append(tick)
        self._seconds.append(seconds)

    def at(self, tick: int) -> float:
        """When that one was reached, or the last one known before it; minus infinity if there is none."""
        found = bisect_right(self._ticks, tick)
        return self._seconds[found - 1] if found else -math.inf

    def check_invariants(self) -> None:
        """Ticks are in order, and no more are known than may be."""
        assert self._ticks == sorted(set(self._ticks)), "ticks out of order"
        assert len(self._ticks) == len(self._seconds) <= _MOST, f"{len(self._ticks)} moments"
