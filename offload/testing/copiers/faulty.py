"""A copier that misbehaves on request, for tests."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from offload.messages import Route
from offload.worker.copiers.base import Copier, CopyEnd
from offload.worker.layout import CopyBatch


class Fault(Enum):
    """What happens to one batch."""

    NONE = auto()
    REFUSE = auto()
    """``submit`` raises."""
    FAIL = auto()
    """It ends with an error and nothing copied."""
    STOP_HALFWAY = auto()
    """It ends with an error after the first half of its copies."""
    END_SHORT = auto()
    """It ends after the first half of its copies as if that were all."""
    WRONG_BYTES = auto()
    """It ends as if all were well, with one byte wrong. Targets must be host memory."""
    STUCK = auto()
    """It does not begin before ``let_go``."""
    DIE = auto()
    """It and all that is in flight end only after ``let_go``; until then further batches are refused."""


class _Batch(NamedTuple):
    job_id: int
    route: Route
    batch: CopyBatch


class FaultyCopier:
    """Wraps a real copier; a function chooses each batch's fault, and ends may be held back.

    While ``holding`` is True nothing that has ended is reported; ``release`` lets single batches
    through, so that a test decides the order of completion.
    """

    def __init__(self, inner: Copier, choose: Callable[[int, Route], Fault] | None = None) -> None:
        self._inner = inner
        self._choose = choose or (lambda job_id, route: Fault.NONE)
        self._faults: dict[int, Fault] = {}
        self._middles: dict[int, int] = {}
        self._stuck: list[_Batch] = []
        self.is_dead = False
        """No batch is accepted, and none ends."""
        self._ended: list[CopyEnd] = []
        self._held: dict[int, CopyEnd] = {}
        self._released: set[int] = set()
        self.holding = False
        self.corrupted: list[int] = []
        """Addresses of the bytes that were made wrong."""

    @property
    def is_stuck(self) -> bool:
        """Whether something ends only after ``let_go``."""
        return self.is_dead or bool(self._stuck)

    def release(self, job_id: int) -> None:
        """Report that batch as soon as it has ended, held back or not."""
        self._released.add(job_id)

    def let_go(self) -> None:
        """What is stuck begins now, and what died lives again."""
        self.is_dead = False
        stuck, self._stuck = self._stuck, []
        for batch in stuck:
            self._inner.submit(*batch)

    def fence(self, route: Route) -> None:
        self._inner.fence(route)

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        fault = self._choose(job_id, route)
        if fault is Fault.REFUSE or self.is_dead:
            raise RuntimeError(f"job {job_id} refused on purpose")
        if fault is Fault.FAIL:
            self._ended.append(CopyEnd(job_id, 0, "failed on purpose"))
            return
        if fault in (Fault.STUCK, Fault.DIE):
            self.is_dead = fault is Fault.DIE
            self._stuck.append(_Batch(job_id, route, batch))
            return
        if fault in (Fault.STOP_HALFWAY, Fault.END_SHORT):
            batch = CopyBatch(*(column[: len(column) // 2] for column in batch))
        if fault is Fault.WRONG_BYTES and len(batch.sizes):
            middle = len(batch.sizes) // 2
            self._middles[job_id] = int(batch.targets[middle] + batch.sizes[middle] // 2)
        self._faults[job_id] = fault
        self._inner.submit(job_id, route, batch)

    def poll(self) -> list[CopyEnd]:
        if self.is_dead:
            return []
        ended, self._ended = [*self._ended, *map(self._spoil, self._inner.poll())], []
        self._held.update((end.job_id, end) for end in ended)
        ready = [job_id for job_id in self._held if not self.holding or job_id in self._released]
        self._released.difference_update(ready)
        return [self._held.pop(job_id) for job_id in ready]

    def drain(self) -> None:
        self._inner.drain()

    def close(self, seconds: float) -> bool:
        return self._inner.close(seconds) and not self.is_stuck

    def _spoil(self, end: CopyEnd) -> CopyEnd:
        fault = self._faults.pop(end.job_id, Fault.NONE)
        if fault is Fault.STOP_HALFWAY:
            return replace(end, error="stopped half-way on purpose")
        if end.job_id in self._middles:
            address = self._middles.pop(end.job_id)
            ctypes.c_uint8.from_address(address).value ^= 0xFF
            self.corrupted.append(address)
        return end
