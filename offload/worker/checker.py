"""Seals are made and checked beside the engine, on threads."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from offload.messages import Route
from offload.worker.cpus import stay_on
from offload.worker.jobs import TransferJob
from offload.worker.lanes import Lane
from offload.worker.seals import Seals

CHECK_SECONDS = 0.001
"""What the engine waits at most for checks of loads that have been copied. The next look is a step later."""


def seal_thread() -> Executor:
    """A thread that makes and checks seals, in order."""
    cpus = os.sched_getaffinity(0)  # the thread itself begins later, perhaps elsewhere
    return ThreadPoolExecutor(1, "kv-offload-seal", initializer=partial(stay_on, cpus))


class Checker:
    """Makes and checks the seals of jobs, those of each route in order."""

    def __init__(self, seals: Seals, routes: Iterable[Route], make_executor: Callable[[], Executor]) -> None:
        """Start an executor for each route."""
        self._seals = seals
        self._executors = {route: make_executor() for route in routes}

    def seal(self, job_id: int, job: TransferJob) -> None:
        """That job has filled its slots."""
        if not self._seals.has_sums:
            self._seals.seal(job_id, job.block_ids, job.slots)
        else:
            job.checked = self._begin(job.lane, self._seals.seal, job_id, job.block_ids, job.slots)

    def check(self, job: TransferJob, num_blocks: int) -> None:
        """Look at its leading blocks, as far as they are to be looked at."""
        if self._seals.are_checked(job.slots):
            block_ids = None if job.block_ids is None else job.block_ids[:num_blocks]
            job.checked = self._begin(job.lane, self._seals.num_intact, block_ids, job.slots[:num_blocks])

    def wait(self, jobs: Iterable[TransferJob]) -> None:
        """Checks of loaded blocks begin when the copy has ended, and a sample takes much less than a step."""
        if self._seals.of_blocks:
            checks = [job.checked for job in jobs if job.checked and not job.lane.fills_pool]
            if checks:
                wait(checks, CHECK_SECONDS)

    def close(self) -> None:
        """Wait for what is under way, and begin nothing more."""
        for executor in self._executors.values():
            executor.shutdown(cancel_futures=True)

    # Private

    def _begin(self, lane: Lane, work: Callable[..., int], *arguments: Any) -> Future[int]:
        try:
            return self._executors[lane.route].submit(work, *arguments)
        except RuntimeError as error:  # no more threads: the job fails, and none but it
            failed = Future[int]()
            failed.set_exception(error)
            return failed
