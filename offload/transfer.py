"""The transfer engine: jobs in, blocks moved, ends out."""

import logging
from typing import NamedTuple

from offload.copiers.base import Copier, Direction
from offload.layout import BlockLayout, CopyBatch, Ids

logger = logging.getLogger(__name__)


CANCELLED = "cancelled"
"""The error of a job whose bytes were no longer wanted."""


class TransferEnd(NamedTuple):
    """A job has ended on this rank.

    Attributes:
        job_id: as submitted.
        direction: as submitted.
        num_blocks: leading blocks known to be copied; all of the job's on success.
        block_ids: the job's GPU blocks.
        error: what went wrong, None on success.
    """

    job_id: int
    direction: Direction
    num_blocks: int
    block_ids: Ids
    error: str | None


class _Job(NamedTuple):
    direction: Direction
    block_ids: Ids
    batch: CopyBatch


class TransferEngine:
    """Turns jobs over blocks and slots into copies, and their ends back into blocks.

    Nothing raised below it passes through: whatever a copier throws is the failed end of the jobs
    concerned. Every job submitted ends exactly once.
    """

    def __init__(self, layout: BlockLayout, copier: Copier) -> None:
        self._layout = layout
        self._copier = copier
        self._jobs: dict[int, _Job] = {}
        self._cancelled: set[int] = set()
        self._fence_errors: dict[Direction, str] = {}
        self._ended: list[TransferEnd] = []

    def __len__(self) -> int:
        """Jobs submitted and not yet reported."""
        return len(self._jobs) + len(self._ended)

    def fence(self, direction: Direction) -> None:
        """Jobs of that direction submitted from now on see all work the engine has enqueued so far."""
        try:
            self._copier.fence(direction)
            self._fence_errors.pop(direction, None)
        except Exception as error:
            self._fence_errors[direction] = _describe(error)

    def store(self, job_id: int, block_ids: Ids, slots: Ids) -> None:
        """Copy GPU blocks down into slots; ``int64[n]`` each, in chain order."""
        self._submit(job_id, _Job(Direction.STORE, block_ids, self._layout.store(block_ids, slots)))

    def load(self, job_id: int, slots: Ids, block_ids: Ids) -> None:
        """Copy slots up into GPU blocks; ``int64[n]`` each, in chain order."""
        self._submit(job_id, _Job(Direction.LOAD, block_ids, self._layout.load(slots, block_ids)))

    def cancel(self, job_id: int) -> None:
        """The bytes of that job are no longer wanted: it will end as failed, with no block copied."""
        if job_id in self._jobs:
            self._cancelled.add(job_id)

    def poll(self) -> list[TransferEnd]:
        """Jobs that have ended since the last call."""
        try:
            for job_id, num_copied, error in self._copier.poll():
                self._end(job_id, num_copied, error)
        except Exception as error:  # a broken device: nothing in flight can be trusted any more
            for job_id in list(self._jobs):
                self._end(job_id, 0, _describe(error))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for what is in flight and release the copier."""
        try:
            self._copier.close()
        except Exception as error:  # a broken device: nothing moves there any more
            logger.warning("copies in flight were given up: %s", _describe(error))

    def _submit(self, job_id: int, job: _Job) -> None:
        self._jobs[job_id] = job
        if fence_error := self._fence_errors.get(job.direction):
            self._end(job_id, 0, fence_error)
            return
        try:
            self._copier.submit(job_id, job.direction, job.batch)
        except Exception as error:
            self._end(job_id, 0, _describe(error))

    def _end(self, job_id: int, num_copied: int, error: str | None) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if job_id in self._cancelled:
            self._cancelled.remove(job_id)
            num_copied, error = 0, CANCELLED
        num_blocks = self._layout.whole_blocks(job.batch, num_copied)
        self._ended.append(TransferEnd(job_id, job.direction, num_blocks, job.block_ids, error))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
