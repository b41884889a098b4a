"""Times between tokens, apart for steps that also computed a side prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.decode_latency.pace import Timeline

__all__ = ["Gaps", "join", "percentiles_ms"]

Seconds = NDArray[np.float64]


class Gaps(NamedTuple):
    """Seconds from each token of a steady request to its next one; float64[n].

    seconds: all of them.
    is_decode_only: bool[n], whether no side prompt was being computed meanwhile.
    """

    seconds: Seconds
    is_decode_only: NDArray[np.bool_]

    @classmethod
    def of(cls, timeline: Timeline) -> Gaps:
        """Take the differences. A gap that touches a prefill at one end only is not beside it."""
        before = np.concatenate([np.asarray(times[:-1], dtype=np.float64) for times in timeline.tokens])
        after = np.concatenate([np.asarray(times[1:], dtype=np.float64) for times in timeline.tokens])
        beside = np.zeros(len(after), dtype=np.bool_)
        for start, end in timeline.prefills:
            beside |= (start < after) & (end > before)
        return cls(after - before, ~beside)

    @property
    def decode_only(self) -> Seconds:
        """The gaps beside no prefill."""
        return self.seconds[self.is_decode_only]


def join(parts: Sequence[Gaps]) -> Gaps:
    """Put the gaps of several rounds together."""
    return Gaps(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def percentiles_ms(seconds: Seconds) -> tuple[float, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return round(float(p50) * 1000, 4), round(float(p99) * 1000, 4)
