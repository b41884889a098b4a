"""Copies between two places in host memory, on threads of their own."""

import ctypes
import queue
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from offload.messages import GPU_ROUTES, Route
from offload.worker.copiers.base import CopyEnd
from offload.worker.layout import CopyBatch


class _Task(NamedTuple):
    job_id: int
    batch: CopyBatch


class CpuCopier:
    """One thread per route, so that a load never queues behind stores.

    For engines whose "GPU" cache is host memory. What a copy reads was computed before it is submitted there,
    and nothing that computes meanwhile touches what it fills. So fences have nothing to wait for.
    ``ctypes.memmove`` releases the interpreter lock: copies really run beside the engine.
    """

    def __init__(self, routes: Iterable[Route] = GPU_ROUTES) -> None:
        """``routes``: those that it serves."""
        self._ended: queue.SimpleQueue[CopyEnd] = queue.SimpleQueue()
        self._todo: dict[Route, queue.Queue[_Task | None]] = {route: queue.Queue() for route in routes}
        self._threads = [
            threading.Thread(target=self._work, args=(todo,), name=f"kv-offload-{way.verb}", daemon=True)
            for way, todo in self._todo.items()
        ]
        for thread in self._threads:
            thread.start()

    def fence(self, route: Route) -> None:
        """Nothing to wait for: the engine computes on the calling thread."""

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        self._todo[route].put(_Task(job_id, batch))

    def poll(self) -> list[CopyEnd]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def drain(self) -> None:
        for todo in self._todo.values():
            todo.join()

    def close(self, seconds: float) -> bool:
        for todo in self._todo.values():
            todo.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, todo: "queue.Queue[_Task | None]") -> None:
        while (task := todo.get()) is not None:
            self._ended.put(_copy(task))
            todo.task_done()
        todo.task_done()


def _copy(task: _Task) -> CopyEnd:
    memmove = ctypes.memmove
    num_copied, error = 0, None
    begin = time.perf_counter()
    try:
        for source, target, size in zip(*(column.tolist() for column in task.batch), strict=True):
            memmove(target, source, size)
            num_copied += 1
    except Exception as failure:  # whatever it is, the thread goes on
        error = f"{type(failure).__name__}: {failure}"
    return CopyEnd(task.job_id, num_copied, error, time.perf_counter() - begin)
