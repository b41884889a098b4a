"""Restores that requests wait for, and what became of their parts."""

from dataclasses import dataclass, field
from typing import NamedTuple

from offload.messages import Order
from offload.worker.jobs import CANCELLED, TransferEnd


class Ended(NamedTuple):
    """Requests whose restores have ended, each told once.

    Attributes:
        requests: their ids.
        failed: of these, those of which nothing may be used.
    """

    requests: set[str]
    failed: set[str]


@dataclass(slots=True, eq=False)
class _Restore:
    """What a request waits for: its load jobs not yet ended here, and what the ended ones did not fill."""

    request_id: str
    parts_left: int
    unfilled: set[int] = field(default_factory=set)
    is_worthless: bool = False  # also what was filled


class Awaited:
    """Restores under way on this rank. Each is over with the last of its parts."""

    def __init__(self, *, is_divisible: bool) -> None:
        """Nobody waits. ``is_divisible``: the engine can use a part of what was to be loaded."""
        self._is_divisible = is_divisible
        self._restores: dict[int, _Restore] = {}  # by job
        self._unfilled: set[int] = set()  # of those that are over

    @property
    def num_jobs(self) -> int:
        """That somebody waits for."""
        return len(self._restores)

    def begin(self, order: Order) -> None:
        """Its request, if it names one, waits for each of its parts."""
        if order.request_id is not None:
            restore = _Restore(order.request_id, len(order.parts))
            self._restores |= {job_id: restore for job_id, _, _ in order.parts}

    def end_part(self, end: TransferEnd, ended: Ended) -> None:
        """That job is over, or given up; ``ended`` is told if its restore is over with it."""
        restore = self._restores.pop(end.job_id, None)
        if restore is None:  # nobody waits, or it was given up before
            return
        restore.parts_left -= 1
        restore.is_worthless |= not end.is_over or end.error == CANCELLED
        restore.unfilled.update(end.targets[end.num_good :].tolist())
        if restore.parts_left:
            return
        ended.requests.add(restore.request_id)
        if restore.is_worthless or (restore.unfilled and not self._is_divisible):
            ended.failed.add(restore.request_id)
        else:
            self._unfilled |= restore.unfilled

    def take_unfilled(self) -> set[int]:
        """GPU blocks that ended restores did not fill, of requests that may use the others; told once."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def check_invariants(self) -> None:
        """Every restore waits for as many jobs as are known to be its own."""
        for restore in self._restores.values():
            parts = sum(other is restore for other in self._restores.values())
            assert parts == restore.parts_left, f"{parts} jobs of {restore} are under way"
