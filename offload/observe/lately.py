"""What counters have grown by in the last minutes: for whoever asks how things stand now."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_EVERY_SECONDS = 30.0
_MOST = 10
"""Figures that are kept: of five minutes."""


class Lately:
    """Figures of counters of the last minutes, a few of them."""

    def __init__(self, now: float) -> None:
        """``now`` in seconds; all counters are 0."""
        self._kept: deque[tuple[float, Mapping[str, float]]] = deque([(now, {})], maxlen=_MOST)

    def told(self, now: float, totals: Mapping[str, float]) -> dict[str, Any]:
        """Counters since the start, and what they have grown by lately. O(counters).

        Args:
            now: in seconds, not before the last call's.
            totals: counters by key. Those that are not there are 0.
        """
        since, before = self._kept[0]
        grown = {key: value - before.get(key, 0) for key, value in totals.items()}
        if now - self._kept[-1][0] >= _EVERY_SECONDS:
            self._kept.append((now, dict(totals)))
        return {
            "total": dict(totals),
            "lately": {key: value for key, value in grown.items() if value},
            "lately_seconds": round(now - since, 3),
        }

    def check_invariants(self) -> None:
        """Time goes on, and counters only grow."""
        kept = list(self._kept)
        for (before, old), (after, new) in pairwise(kept):
            assert before <= after, f"{before} s comes before {after} s"
            fell = [key for key, value in old.items() if new.get(key, 0) < value]
            assert not fell, f"{fell} fell"
