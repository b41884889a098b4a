"""What calls take, one by one or added up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

__all__ = ["Stopwatch", "frozen_heap", "processor_seconds"]


def processor_seconds(call: Callable[[], object]) -> float:
    """What the call takes of this thread's processor."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within, no garbage collection looks at what is there now."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Stopwatch:
    """Nanoseconds of ``clock`` spent in the methods that are watched since the last ``take``, by label.

    ``less_own``: take off what reading the clock takes, as measured here.
    """

    def __init__(self, clock: Callable[[], int], *, less_own: bool = False) -> None:
        self._clock = clock
        self._own = fmean(-clock() + clock() for _ in range(5000)) if less_own else 0
        self._spent: dict[str, float] = {}

    def watch(self, owner: Any, labels: dict[str, str]) -> None:
        """Measure these methods of an object, each under its label, from now on."""
        for name, label in labels.items():
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def take(self) -> dict[str, Any]:
        """Nanoseconds by label, and start again at 0."""
        spent, self._spent = self._spent, {}
        return spent

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        clock, own = self._clock, self._own

        def timed(*arguments: Any, **named: Any) -> Any:
            began = clock()
            result = method(*arguments, **named)
            ended = clock()
            self._spent[label] = self._spent.get(label, 0) + ended - began - own
            return result

        return timed
