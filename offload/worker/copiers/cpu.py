"""Copies between two places in host memory, on threads of their own."""

import ctypes
import queue
import threading
import time
from typing import NamedTuple

from offload.worker.copiers.base import CopyEnd, Direction
from offload.worker.layout import CopyBatch


class _Task(NamedTuple):
    job_id: int
    batch: CopyBatch


class CpuCopier:
    """One thread per direction, so that a load never queues behind stores.

    For engines whose "GPU" cache is host memory. There the forward pass has ended by the time a copy is
    submitted, so fences have nothing to wait for. ``ctypes.memmove`` releases the interpreter lock:
    copies really run beside the engine.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[CopyEnd] = queue.SimpleQueue()
        self._todo: dict[Direction, queue.Queue[_Task | None]] = {way: queue.Queue() for way in Direction}
        self._threads = [
            threading.Thread(target=self._work, args=(todo,), name=f"kv-offload-{way.value}", daemon=True)
            for way, todo in self._todo.items()
        ]
        for thread in self._threads:
            thread.start()

    def fence(self, direction: Direction) -> None:
        """Nothing to wait for: the engine computes on the calling thread."""

    def submit(self, job_id: int, direction: Direction, batch: CopyBatch) -> None:
        self._todo[direction].put(_Task(job_id, batch))

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
    num_copied = 0
    try:
        for source, target, size in zip(*(column.tolist() for column in task.batch), strict=True):
            memmove(target, source, size)
            num_copied += 1
    except Exception as error:  # whatever it is, the thread goes on
        return CopyEnd(task.job_id, num_copied, f"{type(error).__name__}: {error}")
    return CopyEnd(task.job_id, num_copied, None)
