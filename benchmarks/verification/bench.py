"""A transfer engine without an engine around it, and its turns."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import numpy as np

from benchmarks.verification.cases import Case
from offload.config import Verify
from offload.messages import LOAD, STORE, Ids
from offload.scheduler import amounts
from offload.worker.copiers import Copier
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout
from offload.worker.seals import Seals
from offload.worker.transfer import TransferEngine

__all__ = ["Bench", "Turn"]

_POLL_SECONDS = 50e-6


class Turn(NamedTuple):
    """One load or store: seconds until its end was polled, of CPU beside, of the longest pause."""

    seconds: float
    cpu_seconds: float
    pause: float


class Bench:
    """A transfer engine with one setting, and the jobs of one case."""

    def __init__(
        self, case: Case, layout: BlockLayout, num_slots: int, verify: Verify, copier: Copier
    ) -> None:
        self._case = case
        self._engine = TransferEngine(
            gpu_lanes(layout, copier), Seals(layout, num_slots, verify, of_blocks=case.of_blocks)
        )
        self._num_slots = num_slots
        self._job_ids = itertools.count(1)
        self._start = 0
        self._fills = np.zeros(num_slots, dtype=np.int64)
        if case.route == LOAD:
            everything = np.arange(num_slots)
            self._fills[:] = job_id = next(self._job_ids)
            self._engine.submit(job_id, STORE, everything, everything)
            self._wait(1)

    def take_turn(self) -> Turn:
        """Make one load or store, of the blocks after those of the turn before."""
        case, engine = self._case, self._engine
        self._start = self._start if self._start + case.num_blocks <= self._num_slots else 0
        block_ids = np.arange(self._start, self._start + case.num_blocks)
        self._start += case.num_blocks
        cpu_before = time.process_time() - time.thread_time()
        started = time.perf_counter()
        if case.route == STORE:
            engine.fence(STORE)
            engine.submit(next(self._job_ids), STORE, block_ids, block_ids)
            num_jobs = 1
        else:
            engine.fence(LOAD)
            parts = amounts.load_parts(case.num_blocks, amounts.first_part_blocks(case.shape.block_bytes))
            for start, stop in parts:
                ids: Ids = block_ids[start:stop]
                engine.submit(next(self._job_ids), LOAD, ids, ids, self._fills[ids])
            num_jobs = len(parts)
        pause = self._wait(num_jobs)
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - time.thread_time() - cpu_before
        return Turn(seconds, max(0.0, cpu_seconds), pause)

    def close(self) -> None:
        """End the copier."""
        self._engine.close(5.0)

    def _wait(self, num_jobs: int) -> float:
        """Poll until so many jobs have ended; returns the longest pause between two polls."""
        pause, last = 0.0, time.perf_counter()
        while True:
            for end in self._engine.poll():
                if end.error is not None:
                    raise RuntimeError(f"{end.route.verb} of {len(end.targets)} blocks: {end.error}")
                num_jobs -= 1
            now = time.perf_counter()
            pause, last = max(pause, now - last), now
            if not num_jobs:
                return pause
            time.sleep(_POLL_SECONDS)
