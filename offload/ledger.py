"""The ledger of jobs in flight. Jobs begin and end here and nowhere else."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from allocator import Pin, StorePlan
from offload.layout import Ids


@dataclass(slots=True, eq=False)
class StoreJob:
    """A store in flight: ``plan`` says into which slots, ``blocks`` are the held GPU blocks."""

    job_id: int
    plan: StorePlan
    block_ids: Ids
    blocks: list[Any]
    ranks_left: int
    num_copied: int


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load in flight: ``pin`` holds the slots, ``hashes`` name them, ``block_ids`` are filled."""

    job_id: int
    request_id: str
    pin: Pin
    hashes: list[bytes]
    block_ids: Ids
    ranks_left: int
    num_copied: int


class Progress(NamedTuple):
    """What a report changed: the job, whether it has fewer good blocks than before, whether it ended."""

    job: StoreJob | LoadJob
    fell_short: bool
    ended: bool


class JobLedger:
    """Jobs by id. Every rank reports a job once; it ends with the last report.

    ``num_copied`` counts the leading blocks that every rank that reported has copied: a job fails as
    soon as one rank falls short, and ends when all have let go of its memory.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ids = count()
        self._jobs: dict[int, StoreJob | LoadJob] = {}
        self.num_held_blocks = 0
        """GPU blocks held by stores in flight."""

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._jobs)

    def open_store(self, plan: StorePlan, block_ids: Ids, blocks: list[Any]) -> StoreJob:
        """Begin a store of ``blocks``, whose ids are ``block_ids``."""
        job = StoreJob(next(self._ids), plan, block_ids, blocks, self._num_ranks, len(block_ids))
        self._jobs[job.job_id] = job
        self.num_held_blocks += len(blocks)
        return job

    def open_load(self, request_id: str, pin: Pin, hashes: list[bytes], block_ids: Ids) -> LoadJob:
        """Begin a load for one request."""
        job = LoadJob(next(self._ids), request_id, pin, hashes, block_ids, self._num_ranks, len(block_ids))
        self._jobs[job.job_id] = job
        return job

    def loads(self) -> Iterator[LoadJob]:
        """Loads in flight."""
        return (job for job in self._jobs.values() if isinstance(job, LoadJob))

    def spoil_stores(self) -> None:
        """GPU blocks turned out to hold no valid KV: every store in flight will end as failed.

        Which stores copied those blocks, or KV computed on top of them, cannot be told from ids.
        """
        for job in self._jobs.values():
            if isinstance(job, StoreJob):
                job.num_copied = 0

    def report(self, job_id: int, num_ranks: int, num_copied: int) -> Progress | None:
        """``num_ranks`` more ranks have ended that job, each with at least ``num_copied`` leading blocks.

        None for a job that is not in flight, which a worker may report after it was given up.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        fell_short = num_copied < job.num_copied
        job.num_copied = min(job.num_copied, num_copied)
        job.ranks_left -= num_ranks
        ended = job.ranks_left <= 0
        if ended:
            del self._jobs[job_id]
            if isinstance(job, StoreJob):
                self.num_held_blocks -= len(job.blocks)
        return Progress(job, fell_short, ended)

    def check_invariants(self) -> None:
        """Counters and jobs agree."""
        stores = [job for job in self._jobs.values() if isinstance(job, StoreJob)]
        held = sum(len(job.blocks) for job in stores)
        assert held == self.num_held_blocks, f"{held} blocks in jobs, {self.num_held_blocks} counted"
        for job_id, job in self._jobs.items():
            assert job.job_id == job_id, f"job {job.job_id} is filed under {job_id}"
            assert 0 < job.ranks_left <= self._num_ranks, f"{job} waits for {job.ranks_left} ranks"
            assert 0 <= job.num_copied <= len(job.block_ids), f"{job} has {job.num_copied} blocks copied"
