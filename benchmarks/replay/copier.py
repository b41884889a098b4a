"""A copier of no bytes, on a virtual clock: a copy takes as long as a link of a given bandwidth would."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from offload.copiers import CopyEnd, Direction
from offload.layout import CopyBatch


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start."""

    now: float = 0.0

    def wait_until(self, time: float) -> None:
        """Let time pass, if it has not yet."""
        self.now = max(self.now, time)


class Link:
    """One copy after another in each direction, both directions at once."""

    def __init__(self, clock: VirtualClock, bytes_per_second: float) -> None:
        self.clock = clock
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = dict.fromkeys(Direction, 0.0)

    def book(self, direction: Direction, size: float) -> float:
        """Copy ``size`` bytes as soon as the link is free. Returns when that will have ended."""
        begin = max(self._free_at[direction], self.clock.now)
        self._free_at[direction] = end = begin + size * self._seconds_per_byte
        return end


class _Task(NamedTuple):
    end: float
    job_id: int
    num_copies: int


class TimedCopier:
    """Our ``offload.copiers.Copier`` over a ``Link``. ``scale``: bytes of the link per byte of a batch."""

    def __init__(self, link: Link, scale: float) -> None:
        self._link = link
        self._scale = scale
        self._tasks: list[_Task] = []

    def fence(self, direction: Direction) -> None:
        """Copies of a step are submitted when it is over."""

    def submit(self, job_id: int, direction: Direction, batch: CopyBatch) -> None:
        end = self._link.book(direction, int(batch.sizes.sum()) * self._scale)
        self._tasks.append(_Task(end, job_id, len(batch.sizes)))

    def poll(self) -> list[CopyEnd]:
        now = self._link.clock.now
        ended = [task for task in self._tasks if task.end <= now]
        self._tasks = [task for task in self._tasks if task.end > now]
        return [CopyEnd(task.job_id, task.num_copies, None) for task in ended]

    def drain(self) -> None:
        self._link.clock.wait_until(max((task.end for task in self._tasks), default=0.0))

    def hurry(self, job_ids: Container[int]) -> None:
        """A caller waits for these."""
        self._link.clock.wait_until(max((t.end for t in self._tasks if t.job_id in job_ids), default=0.0))

    def close(self, seconds: float) -> bool:
        return True

    @property
    def next_end(self) -> float | None:
        """When the next copy ends; None if there is none."""
        return min((task.end for task in self._tasks), default=None)
