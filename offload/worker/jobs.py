"""A job on a worker, and its end."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.messages import Extents, Ids, Route
from offload.worker.copiers.base import CopyEnd
from offload.worker.lanes import Lane

CANCELLED = "cancelled"
"""The error of a job whose bytes were no longer wanted."""


class TransferEnd(NamedTuple):
    """A job has ended on this rank.

    Attributes:
        job_id: as submitted.
        route: as submitted.
        num_good: leading blocks of the job that this rank has nothing against: those of its part known to be
            copied, and checked, with what is before them; all of the job's on success.
        targets: where the blocks of its part were to go. Of a load that is all of them.
        error: what went wrong, None on success.
        seconds: that the copy took, as its copier says.
        nbytes: that were copied.
        is_over: False for a job that was given up while its copy may still run. Its memory must be left
            alone until the same job comes again with True.
        is_absent: nothing went wrong but that a block was not there.
    """

    job_id: int
    route: Route
    num_good: int
    targets: Ids
    error: str | None
    seconds: float = 0.0
    nbytes: int = 0
    is_over: bool = True
    is_absent: bool = False

    def void(self) -> "TransferEnd":
        """That of a job whose bytes are not wanted after all."""
        return self._replace(num_good=0, error=CANCELLED)


@dataclass(slots=True, eq=False)
class TransferJob:
    """A job that was submitted, or this rank's part of it.

    Attributes:
        lane: that of its route.
        sources: as submitted, of this part.
        targets: the same.
        since: when it was handed to the copier, and before that, when it began to wait for its turn.
        fills: the jobs that must have filled the slots it reads, and no other since.
        extents: where a tier keeps them.
        own: which blocks of the whole job these are, ``int64[n]``.
        num_blocks: those of the whole job.
        batch: the copies of its first ``num_wanted`` blocks, once it has begun.
        num_wanted: leading blocks that the batch copies.
        follows: it waited for others, which were to fill slots that it reads.
        missing: the error of what these have not filled, None if they have.
        is_cancelled: nobody wants its bytes.
        is_given_up: its copy is past its deadline.
        copied: how the copy has ended.
        num_current: leading slots that no job had begun to fill again when the copy had ended.
        checked: leading blocks that were sealed, or found intact.
    """

    lane: Lane
    sources: Ids
    targets: Ids
    since: float
    fills: Ids | None
    extents: Extents | None
    own: Ids
    num_blocks: int
    batch: Any = None
    num_wanted: int = 0
    follows: bool = False
    missing: str | None = None
    is_cancelled: bool = False
    is_given_up: bool = False
    copied: CopyEnd | None = None
    num_current: int = 0
    checked: Future[int] | None = None

    @property
    def slots(self) -> Ids:
        """Those that it fills or reads."""
        return self.targets if self.lane.fills_pool else self.sources

    @property
    def block_ids(self) -> Ids | None:
        """GPU blocks; None if it has none."""
        if not self.lane.meets_gpu:
            return None
        return self.sources if self.lane.fills_pool else self.targets

    def num_good(self, num_own: int) -> int:
        """Leading blocks of the whole job, when so many of this part are good, and others see to theirs."""
        return self.num_blocks if num_own == len(self.own) else int(self.own[num_own])

    @property
    def is_copying(self) -> bool:
        """Whether a request may be waiting for its copy, which is under way."""
        return self.copied is None and not self.is_given_up
