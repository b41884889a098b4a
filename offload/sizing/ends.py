"""Ends of answers, as far as a trace has them: a policy may learn from how answers end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evictor.endings import Endings
from offload.observe.trace import TraceRequest

__all__ = ["End", "ends_of"]


class End(NamedTuple):
    """Of one answer: seconds of the trace, the place of its request there, the class of its ending."""

    seconds: float
    request: int
    ending: int

    def is_told(self, arrival: float, num_requests: int) -> bool:
        """Whether it is told before a request that arrives then, behind so many others."""
        return self.seconds <= arrival and self.request < num_requests


def ends_of(requests: Sequence[TraceRequest], classes: Endings | None = None) -> list[End]:
    """Those that the trace tells of, in the order in which they come. O(requests).

    ``classes``: that endings have had so far; None: nothing is known of endings yet.
    """
    times = [
        (each.timestamp_seconds + each.answer_seconds, place)
        for place, each in enumerate(requests)
        if each.stop is not None
    ]
    classes = Endings() if classes is None else classes
    return [End(when, place, classes.class_of(requests[place].stop)) for when, place in sorted(times)]
