"""Loads that wait for what other ranks are to fill of a pool that all of them share."""

import numpy as np

from offload.worker.jobs import TransferJob
from offload.worker.seals import Seals


class Elsewhere:
    """Jobs of which other ranks fill a part, and loads that wait for that.

    Nobody tells when they have: the seals of the slots do, which ranks share. A slot has the generation of
    the job, or its mark if the job has failed there, or those of a later job. Before, it has none of these.
    """

    def __init__(self, seals: Seals, remember_seconds: float) -> None:
        """``remember_seconds``: nobody waits for a job that was begun longer ago."""
        self._seals = seals
        self._remember_seconds = remember_seconds
        self._begun: dict[int, float] = {}  # jobs, and when this rank began its part
        self._waiting: dict[int, TransferJob] = {}
        self._first: dict[int, int] = {}  # of these: the first block that it lacks

    def __contains__(self, job_id: int) -> bool:
        """Whether that load waits."""
        return job_id in self._waiting

    def __len__(self) -> int:
        """Loads that wait."""
        return len(self._waiting)

    def began(self, job_id: int, now: float) -> None:
        """Other ranks fill a part of that job."""
        self._begun[job_id] = now
        while self._begun[oldest := next(iter(self._begun))] < now - self._remember_seconds:
            del self._begun[oldest]

    def must_wait(self, job: TransferJob) -> bool:
        """Whether slots that it reads are yet to be filled, or not, by jobs of other ranks."""
        return self._first_coming(job, 0) is not None

    def wait(self, job_id: int, job: TransferJob) -> None:
        """That load begins once nothing of it is coming any more."""
        self._waiting[job_id] = job
        self._first[job_id] = 0

    def leave(self, job_id: int) -> None:
        """That load is over."""
        self._waiting.pop(job_id, None)
        self._first.pop(job_id, None)

    def over(self) -> list[int]:
        """Loads that need not wait any more, in the order in which they came.

        As long as the first slot that a load lacks is coming, the others are not looked at.
        """
        over = []
        for job_id, job in self._waiting.items():
            first = self._first[job_id]
            if self._first_coming(job, first, first + 1) is None:
                if (found := self._first_coming(job, first)) is None:
                    over.append(job_id)
                else:
                    self._first[job_id] = found
        for job_id in over:
            self.leave(job_id)
        return over

    def check_invariants(self) -> None:
        """Whoever waits reads what jobs have filled, and lacks a block that it has."""
        assert self._first.keys() == self._waiting.keys(), f"{self._first} wait, {self._waiting} are known"
        for job_id, job in self._waiting.items():
            assert job.fills is not None, f"{job_id} waits, and reads no slots: {job}"
            assert self._first[job_id] < len(job.fills), f"{job_id} lacks no block, and waits: {job}"

    def _first_coming(self, job: TransferJob, start: int, stop: int | None = None) -> int | None:
        """The first block of these whose slot a job of other ranks is yet to fill."""
        if job.fills is None or not self._begun:
            return None
        fills = job.fills[start:stop]
        known = [each for each in np.unique(fills).tolist() if each in self._begun]
        coming = self._seals.coming(job.sources[start:stop], fills) & np.isin(fills, known)
        return start + int(coming.argmax()) if coming.any() else None
