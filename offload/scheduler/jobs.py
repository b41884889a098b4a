"""The ledger of jobs in flight. Jobs begin and end here and nowhere else."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from offload.scheduler.flow import Flow, Job, Progress, Task


class JobLedger:
    """Jobs by id. A job ends when every rank has reported it over.

    ``num_good`` counts the leading blocks that every rank that reported has copied. A job fails as soon as
    one rank falls short, and ends when all have let go of its memory.
    """

    def __init__(self, num_ranks: int, first_id: int = 0) -> None:
        """Ranks that report each job, and the id of the first one."""
        self._num_ranks = num_ranks
        self._ids = count(first_id)
        self._first_id = first_id
        self._jobs: dict[int, Job[Any]] = {}
        self.num_opened = 0
        """Jobs that have begun, ever."""
        self.num_given_up = 0
        """Jobs in flight past their deadline."""

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._jobs)

    @property
    def next_id(self) -> int:
        """The id of the job that begins next."""
        return self._first_id + self.num_opened

    def open(
        self, flow: Flow[Task], task: Task, num_blocks: int, blocks: list[Any] | None = None
    ) -> Job[Task]:
        """Begin a job of that flow; ``blocks`` are GPU blocks that are held for it."""
        job = Job(next(self._ids), flow, task, num_blocks, self._num_ranks, num_blocks, blocks or [])
        self._jobs[job.job_id] = job
        self.num_opened += 1
        return job

    def __contains__(self, job_id: int) -> bool:
        """Whether that job is in flight."""
        return job_id in self._jobs

    def __iter__(self) -> Iterator[Job[Any]]:
        """Jobs in flight, in the order in which they began."""
        return iter(self._jobs.values())

    def of(self, flow: Flow[Task]) -> Iterator[Job[Task]]:
        """Those of a flow."""
        return (job for job in self._jobs.values() if job.flow is flow)

    def report(
        self,
        job_id: int,
        num_ranks: int,
        num_good: int,
        given_up: bool = False,
        is_sound: bool = False,
        reason: str = "",
    ) -> Progress | None:
        """``num_ranks`` more ranks have ended that job; at least ``num_good`` leading blocks are good.

        None for a job that is not in flight.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        fell_short = num_good < job.num_good
        gave_up = given_up and not job.given_up
        job.num_good = min(job.num_good, num_good)
        job.given_up |= given_up
        job.is_sound &= is_sound
        job.reason = job.reason or reason
        self.num_given_up += gave_up
        job.ranks_left -= num_ranks
        ended = job.ranks_left <= 0
        if ended:
            del self._jobs[job_id]
            self.num_given_up -= job.given_up
        return Progress(job, fell_short, gave_up, ended)

    def check_invariants(self) -> None:
        """Counters and jobs agree."""
        given_up = sum(job.given_up for job in self._jobs.values())
        assert given_up == self.num_given_up, f"{given_up} jobs given up, {self.num_given_up} counted"
        assert len(self) <= self.num_opened, f"{len(self)} jobs in flight, {self.num_opened} ever"
        for job_id, job in self._jobs.items():
            assert job.job_id == job_id, f"job {job.job_id} is filed under {job_id}"
            assert 0 < job.ranks_left <= self._num_ranks, f"{job} waits for {job.ranks_left} ranks"
            assert 0 <= job.num_good <= job.num_blocks, f"{job} has {job.num_good} blocks copied"
