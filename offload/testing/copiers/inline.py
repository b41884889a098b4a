"""Copies and calls on the calling thread, for runs that must be the same every time."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from offload.messages import Route
from offload.worker.copiers import CopyEnd
from offload.worker.layout import CopyBatch


class InlineExecutor(Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class RefusingExecutor(Executor):
    """Does nothing that it is given, as where no thread can be started."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise RuntimeError("can't start new thread")


class InlineCopier:
    """Copies between two places in host memory on the calling thread, when submitted."""

    def __init__(self) -> None:
        self._ended: list[CopyEnd] = []

    def fence(self, route: Route) -> None:
        """Nothing to wait for."""

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        for source, target, size in zip(*(column.tolist() for column in batch), strict=True):
            ctypes.memmove(target, source, size)
        self._ended.append(CopyEnd(job_id, len(batch.sizes), None))

    def poll(self) -> list[CopyEnd]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Nothing is left to wait for."""

    def close(self, seconds: float) -> bool:
        """Nothing to release."""
        return True
