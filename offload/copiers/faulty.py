"""A copier that misbehaves on request, for tests."""

from collections.abc import Callable
from enum import Enum, auto

from offload.copiers.base import Copier, CopyEnd, Direction
from offload.layout import CopyBatch


class Fault(Enum):
    """What happens to one batch."""

    NONE = auto()
    REFUSE = auto()
    """``submit`` raises."""
    FAIL = auto()
    """It ends with an error and nothing copied."""
    STOP_HALFWAY = auto()
    """It ends with an error after the first half of its copies."""


class FaultyCopier:
    """Wraps a real copier; a function chooses each batch's fault, and ends may be held back.

    While ``holding`` is True nothing that has ended is reported; ``release`` lets single batches
    through, so that a test decides the order of completion.
    """

    def __init__(self, inner: Copier, choose: Callable[[int, Direction], Fault] | None = None) -> None:
        self._inner = inner
        self._choose = choose or (lambda job_id, direction: Fault.NONE)
        self._halved: set[int] = set()
        self._ended: list[CopyEnd] = []
        self._held: dict[int, CopyEnd] = {}
        self._released: set[int] = set()
        self.holding = False

    def release(self, job_id: int) -> None:
        """Report that batch as soon as it has ended, held back or not."""
        self._released.add(job_id)

    def fence(self, direction: Direction) -> None:
        self._inner.fence(direction)

    def submit(self, job_id: int, direction: Direction, batch: CopyBatch) -> None:
        fault = self._choose(job_id, direction)
        if fault is Fault.REFUSE:
            raise RuntimeError(f"job {job_id} refused on purpose")
        if fault is Fault.FAIL:
            self._ended.append(CopyEnd(job_id, 0, "failed on purpose"))
            return
        if fault is Fault.STOP_HALFWAY:
            self._halved.add(job_id)
            batch = CopyBatch(*(column[: len(column) // 2] for column in batch))
        self._inner.submit(job_id, direction, batch)

    def poll(self) -> list[CopyEnd]:
        ended, self._ended = [*self._ended, *map(self._spoil, self._inner.poll())], []
        self._held.update((end.job_id, end) for end in ended)
        ready = [job_id for job_id in self._held if not self.holding or job_id in self._released]
        self._released.difference_update(ready)
        return [self._held.pop(job_id) for job_id in ready]

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()

    def _spoil(self, end: CopyEnd) -> CopyEnd:
        if end.job_id not in self._halved:
            return end
        self._halved.remove(end.job_id)
        return end._replace(error="stopped half-way on purpose")
