"""A copier whose copies take as long as over a link: in real time, or on a virtual clock without bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from offload.messages import Route
from offload.worker.copiers import Copier, CopyEnd
from offload.worker.layout import CopyBatch

__all__ = ["Clock", "Link", "Pace", "PacedCopier", "RealClock", "VirtualClock"]


class Clock(Protocol):
    """Seconds since some moment."""

    @property
    def now(self) -> float: ...

    def wait_until(self, time: float) -> None:
        """Let time pass, if it has not yet."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start."""

    now: float = 0.0

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


class RealClock:
    """That of this machine."""

    @property
    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_: float) -> None:
        time.sleep(max(0.0, time_ - self.now))


class Pace(NamedTuple):
    """How fast a link is. `seconds` pass from a copy's last byte to its end; other copies go on meanwhile."""

    bytes_per_second: float
    seconds: float = 0.0


class Booking(NamedTuple):
    """When a copy ends, and how long it takes once the link is free."""

    end: float
    seconds: float


class Link:
    """One copy after another each way, all ways at once. `pace` is asked at every copy."""

    def __init__(self, clock: Clock, pace: Callable[[], Pace]) -> None:
        self.clock = clock
        self._pace = pace
        self._free_at: dict[Hashable, float] = {}

    def book(self, way: Hashable, size: float) -> float:
        """Copy `size` bytes as soon as the link is free that way. Returns when that will have ended."""
        return self.booked(way, size).end

    def booked(self, way: Hashable, size: float) -> Booking:
        """The same, and how long the copy itself takes."""
        pace = self._pace()
        seconds = size / pace.bytes_per_second
        self._free_at[way] = max(self._free_at.get(way, 0.0), self.clock.now) + seconds
        return Booking(self._free_at[way] + pace.seconds, seconds + pace.seconds)


class _Task(NamedTuple):
    end: float
    seconds: float
    job_id: int
    route: Route
    batch: CopyBatch


class PacedCopier:
    """An `offload.worker.copiers.Copier` over a `Link`.

    Args:
        link: says when a copy ends.
        inner: makes the copy then; None: no byte is moved.
        scale: bytes of the link per byte of a batch.
    """

    def __init__(self, link: Link, inner: Copier | None = None, scale: float = 1.0) -> None:
        self._link = link
        self._inner = inner
        self._scale = scale
        self._tasks: list[_Task] = []
        self._ended: list[CopyEnd] = []

    def fence(self, route: Route) -> None:
        if self._inner is not None:
            self._inner.fence(route)

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        booking = self._link.booked(route, int(batch.sizes.sum()) * self._scale)
        self._tasks.append(_Task(*booking, job_id, route, batch))
        self._copy_until(self._link.clock.now)  # a link without limit is no slower than none

    def poll(self) -> list[CopyEnd]:
        self._copy_until(self._link.clock.now)
        ended, self._ended = self._ended, []
        return ended if self._inner is None else self._inner.poll()

    def drain(self) -> None:
        self._link.clock.wait_until(max((task.end for task in self._tasks), default=0.0))
        self._copy_until(self._link.clock.now)
        if self._inner is not None:
            self._inner.drain()

    def hurry(self, job_ids: Container[int]) -> None:
        """A caller waits for these."""
        self._link.clock.wait_until(max((t.end for t in self._tasks if t.job_id in job_ids), default=0.0))

    def close(self, seconds: float) -> bool:
        """What the link has not carried yet is copied at once."""
        self._copy_until(float("inf"))
        return self._inner is None or self._inner.close(seconds)

    @property
    def next_end(self) -> float | None:
        """When the next copy ends; None if there is none."""
        return min((task.end for task in self._tasks), default=None)

    def _copy_until(self, now: float) -> None:
        due = [task for task in self._tasks if task.end <= now]
        self._tasks = [task for task in self._tasks if task.end > now]
        for task in due:
            if self._inner is None:
                self._ended.append(CopyEnd(task.job_id, len(task.batch.sizes), None, task.seconds))
            else:
                self._inner.submit(task.job_id, task.route, task.batch)
