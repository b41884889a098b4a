"""A worker whose copies take as long as over a link of a given bandwidth: vLLM's `worker_extension_cls`."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from offload.copiers import Copier, CopyEnd, Direction
from offload.layout import CopyBatch
from offload.vllm import worker_side

__all__ = ["BANDWIDTH", "PacedCopier", "PacedWorker"]

BANDWIDTH = "KV_OFFLOAD_BENCHMARK_BANDWIDTH"
"""Environment variable: a file with the bytes per second, in each direction, read at every copy."""


class _Task(NamedTuple):
    job_id: int
    direction: Direction
    batch: CopyBatch
    ends_at: float


class PacedCopier:
    """Makes a copy when a link of that bandwidth would have carried it, after all of its direction before."""

    def __init__(self, inner: Copier, bandwidth: Path) -> None:
        """`bandwidth`: the file that says so."""
        self._inner = inner
        self._bandwidth = bandwidth
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._tasks = {way: deque[_Task]() for way in Direction}

    def fence(self, direction: Direction) -> None:
        self._inner.fence(direction)

    def submit(self, job_id: int, direction: Direction, batch: CopyBatch) -> None:
        seconds = int(batch.sizes.sum()) / float(self._bandwidth.read_text())
        ends_at = max(self._free_at[direction], time.perf_counter()) + seconds
        self._free_at[direction] = ends_at
        self._tasks[direction].append(_Task(job_id, direction, batch, ends_at))

    def poll(self) -> list[CopyEnd]:
        self._copy_until(time.perf_counter())
        return self._inner.poll()

    def drain(self) -> None:
        self._copy_until(float("inf"))
        self._inner.drain()

    def close(self, seconds: float) -> bool:
        self._copy_until(float("inf"))
        return self._inner.close(seconds)

    def _copy_until(self, now: float) -> None:
        for tasks in self._tasks.values():
            while tasks and tasks[0].ends_at <= now:
                task = tasks.popleft()
                self._inner.submit(task.job_id, task.direction, task.batch)


class PacedWorker:
    """Mixed into vLLM's worker class; that it is imported there is what counts."""


def _pace(bandwidth: Path) -> None:
    make = worker_side._copier_for

    def make_paced(*arguments: Any) -> Copier:
        return PacedCopier(make(*arguments), bandwidth)

    worker_side._copier_for = make_paced


if file := os.environ.get(BANDWIDTH):
    _pace(Path(file))
