"""Gives memory of the pool back to the system, and takes it again, beside the engine."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch

from offload.errors import HostMemoryError
from offload.messages import Resize, Resized, WorkerFacts
from offload.worker.copiers.cuda import use_device
from offload.worker.cpus import stay_on
from offload.worker.pool.memory import HostMemory, unit_of

logger = logging.getLogger(__name__)

_PINNED_BYTES = 256 << 20  # that are pinned together, so that they can be unpinned together
_HUGE_BYTES = 32 << 20  # where pages are huge: a part of such a page is not given back at once


class SizeRange(NamedTuple):
    """Sizes that a rank's part of a pool may have later.

    Attributes:
        most_bytes: the largest.
        is_meant: the configuration says so. If not, memory is pinned as what keeps its size.
    """

    most_bytes: int
    is_meant: bool


def make_resizable(
    facts: WorkerFacts, sizes: SizeRange, *, on_gpu: bool, huge_pages: bool, unit_slots: int
) -> None:
    """Say in ``facts`` of which slots the memory is taken together, and how many there may be.

    ``unit_slots``: 0: what makes whole pages.
    """
    if on_gpu and not sizes.is_meant:
        return
    least_bytes = _PINNED_BYTES if on_gpu else _HUGE_BYTES if huge_pages else 0
    unit = unit_slots or unit_of(facts.slot_bytes, least_bytes)
    most = max(facts.num_slots, sizes.most_bytes // facts.slot_bytes)
    if unit >= facts.num_slots:
        return  # nothing to give back
    if most > facts.num_slots:
        facts.num_slots = facts.num_slots // unit * unit
    facts.unit_slots, facts.most_slots = unit, most


class PageThread(Executor):
    """A thread that takes and gives back pages, in order.

    It is a daemon, so that one that hangs in the system does not keep the process from ending.
    """

    def __init__(self) -> None:
        """It begins with what it is given first."""
        self._todo: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._has_begun = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises RuntimeError if no thread can be started."""
        if not self._has_begun:
            Thread(target=self._run, name="kv-offload-resize", daemon=True).start()
            self._has_begun = True
        future = Future[Any]()
        self._todo.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """It ends when it has done what it was given. Waits for nothing, whatever is said."""
        self._todo.put(None)

    def _run(self) -> None:
        for future, work in iter(self._todo.get, None):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class WorkerResizing:
    """Carries out what the scheduler's side says of one rank's memory, in order, on one thread."""

    def __init__(
        self, memory: HostMemory, make_executor: Callable[[], Executor], device: torch.device
    ) -> None:
        """``memory`` was made with units. ``device``: of this rank; memory is pinned as its thread would."""
        self._memory = memory
        self._device = device
        self._make_executor = make_executor
        self._executor: Executor | None = None  # most pools are never resized
        self._cpus = os.sched_getaffinity(0)  # perhaps more than when the thread begins
        self._under_way: dict[int, Future[str]] = {}
        self._refused: dict[int, Resized] = {}

    def begin(self, resizes: Sequence[Resize]) -> None:
        """These are to be done."""
        for resize in resizes:
            self._executor = self._executor or self._make_executor()
            try:
                self._under_way[resize.number] = self._executor.submit(self._carry_out, resize)
            except RuntimeError as error:  # no thread can be started
                self.refuse([resize], str(error))

    def refuse(self, resizes: Sequence[Resize], reason: str) -> None:
        """These are not to be done on this rank."""
        self._refused |= {resize.number: Resized(1, reason) for resize in resizes}

    def take_ended(self) -> dict[int, Resized]:
        """What has ended since the last call."""
        if not (self._under_way or self._refused):
            return {}  # as in nearly every step
        ended = {number: work for number, work in self._under_way.items() if work.done()}
        for number in ended:
            del self._under_way[number]
        refused, self._refused = self._refused, {}
        return refused | {number: Resized(1, _error_of(work)) for number, work in ended.items()}

    def close(self, seconds: float) -> bool:
        """Begin nothing more, and wait so long for what has begun. Returns whether that has ended.

        If not, the memory may not be unmapped: others may have its addresses then.
        """
        begun = [work for work in self._under_way.values() if not work.cancel()]
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        has_ended = not wait(begun, seconds).not_done
        if not has_ended:
            logger.warning("the system still takes or gives back pages of the CPU pool after %g s", seconds)
        return has_ended

    def check_invariants(self) -> None:
        """Nothing is under way that nobody carries out."""
        assert self._executor is not None or not self._under_way, f"{self._under_way} has no thread"

    def _carry_out(self, resize: Resize) -> str:
        """Why the memory could not be taken; "" if all is done."""
        runs = list(zip(resize.starts.tolist(), resize.stops.tolist(), strict=True))
        stay_on(self._cpus)
        use_device(self._device)
        try:
            if resize.takes:
                self._memory.take(runs)
            else:
                self._memory.give_back(runs)
        except HostMemoryError as error:
            return str(error)
        return ""


def _error_of(work: "Future[str]") -> str:
    error = work.exception()
    return work.result() if error is None else f"{type(error).__name__}: {error}"
