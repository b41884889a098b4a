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
        if job.fills is None or not self._begun:
            return False
        known = [each for each in np.unique(job.fills).tolist() if each in self._begun]
        is_theirs = np.isin(job.fills, known)
        return self._seals.are_coming(job.sources[is_theirs], job.fills[is_theirs])

    def wait(self, job_id: int, job: TransferJob) -> None:
        """That load begins once nothing of it is coming any more."""
        self._waiting[job_id] = job

    def leave(self, job_id: int) -> None:
        """That load is over."""
        self._waiting.pop(job_id, None)

    def over(self) -> list[int]:
        """Loads that need not wait any more, in the order in which they came."""
        over = [job_id for job_id, job in self._waiting.items() if not self.must_wait(job)]
        for job_id in over:
            del self._waiting[job_id]
        return over

    def check_invariants(self) -> None:
        """Whoever waits reads what jobs have filled."""
        for job_id, job in self._waiting.items():
            assert job.fills is not None, f"{job_id} waits, and reads no slots: {job}"
