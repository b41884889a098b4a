"""A job on a worker, and its end."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.messages import BROKEN, Extents, Ids, Route
from offload.worker.copiers.base import CopyEnd, describe
from offload.worker.lanes import Lane
from offload.worker.seals import Seals

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
        reason: see ``JobReport``.
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
    reason: str = ""

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
        is_urgent: it is not held back.
        batch: the copies of its first ``num_wanted`` blocks, once it has begun.
        num_wanted: leading blocks that the batch copies.
        follows: it waited for others, which were to fill slots that it reads.
        missing: the error of what these have not filled, None if they have.
        is_cancelled: nobody wants its bytes.
        is_given_up: its copy is past its deadline.
        copied: how the copy has ended.
        num_current: leading slots that no job had begun to fill again when the copy had ended.
        checked: leading blocks that were sealed, or found intact.
        is_broken: a checksum differed.
    """

    lane: Lane
    sources: Ids
    targets: Ids
    since: float
    fills: Ids | None
    extents: Extents | None
    own: Ids
    num_blocks: int
    is_urgent: bool = False
    batch: Any = None
    num_wanted: int = 0
    follows: bool = False
    missing: str | None = None
    is_cancelled: bool = False
    is_given_up: bool = False
    copied: CopyEnd | None = None
    num_current: int = 0
    checked: Future[int] | None = None
    is_broken: bool = False

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

    def num_filled(self, seals: Seals) -> int:
        """How many leading blocks of it are there to be copied."""
        return len(self.sources) if self.fills is None else seals.num_current(self.sources, self.fills)

    def was_to_come(self, seals: Seals, index: int) -> bool:
        """Whether the slot of that block lacks what a job was to bring that has failed."""
        if self.fills is None or index == len(self.sources):
            return False
        return self.follows or seals.has_failed(int(self.fills[index]), int(self.sources[index]))

    def outcome(self) -> tuple[int, str | None]:
        """How many leading blocks of its part are good, now that its copy has ended, and what went wrong."""
        assert self.copied is not None
        error = self.copied.error
        num_good = self.lane.whole_blocks(self.batch, self.copied.num_copied)
        if error is None and num_good < self.num_wanted and not self.lane.is_question:
            error = f"the copy ended after {num_good} of {self.num_wanted} blocks"
        if self.num_current < len(self.slots):
            num_good = min(num_good, self.num_current)
            another = f"the slot of block {self.num_current} was filled by another store"
            error = error or self.missing or another
        if self.checked is not None:
            try:
                num_intact = self.checked.result()
            except Exception as failure:
                num_intact, error = 0, describe(failure)
            if num_intact < num_good:
                num_good = num_intact
                self.is_broken = error is None or error == self.missing
                error = (
                    None if error == self.missing else error
                ) or f"block {num_intact} is not what was stored: its checksum differs"
        return num_good, error

    def end(self, job_id: int, num_own: int, error: str | None) -> TransferEnd:
        """How it ends, when so many leading blocks of its part are good."""
        if self.is_cancelled:
            num_good, error = 0, CANCELLED
        elif self.is_given_up:
            num_good, error = 0, "the copy ended after it was given up"
        else:
            num_good = self.num_good(num_own)
        is_absent = error is not None and error == self.missing
        end = TransferEnd(job_id, self.lane.route, num_good, self.targets, error, is_absent=is_absent)
        if self.copied is None:
            return end
        nbytes = self.lane.num_bytes(self.batch, self.copied.num_copied)
        is_absent |= self.copied.is_absent and error == self.copied.error
        seconds, reason = self.copied.seconds, BROKEN if self.is_broken else self.copied.reason
        return end._replace(seconds=seconds, nbytes=nbytes, is_absent=is_absent, reason=reason)

    @property
    def is_copying(self) -> bool:
        """Whether a request may be waiting for its copy, which is under way."""
        return self.copied is None and not self.is_given_up
