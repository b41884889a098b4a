"""What runs in the processes of the benchmark: our connector above a store, or above none."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from functools import partial
from typing import Any, NamedTuple

from offload.testing.engines.process import EngineProcess

__all__ = ["FAR", "NONE", "SILENT", "Day", "Run", "child_of"]

NONE, SILENT, FAR = "none", "silent", "far"
"""What is below the pool: nothing; a store that never answers; one behind a link."""

_BLOCK_TOKENS = 16
_DOCUMENTS = 40
_MOST_BLOCKS = 500
_OUTPUT_TOKENS = 16
_POSITIONS = 16
"""Of an extent, where blocks of 16 tokens have 64 KiB."""
_KNOWN_SECONDS = 60.0
"""Of the virtual clock, until it is known that a store is silent."""
_FAR_BYTES_PER_SECOND, _FAR_SECONDS = 1e9, 1e-3


class Run(NamedTuple):
    """What the scheduler did.

    Attributes:
        trace: what was scheduled, step by step, as a digest.
        computed: tokens.
        spent: of each step that schedules something, nanoseconds of the scheduler's thread.
    """

    trace: str
    computed: int
    spent: list[int]


def child_of(below: str, num_runs: int) -> EngineProcess[Day]:
    """A process with a ``Day``, forked from one that has only imported vLLM."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    made = partial(_make, below, num_runs)
    return EngineProcess(
        made, f"below: {below}", variables=quiet, fork_from=["benchmarks.control_plane.child"]
    )


class Day:
    """An engine that is asked for documents, some of them again."""

    def __init__(self, below: str, num_runs: int) -> None:
        """Begin when it is known how the store answers. The pool has room for all of so many runs."""
        from benchmarks.engine_replay import ReplayEngine, ReplaySettings  # not over here: it imports vLLM
        from benchmarks.engine_replay.engine import TimeModel
        from offload.testing.copiers.paced import Link, Pace, VirtualClock
        from offload.testing.media.faulty import MediumFault
        from offload.testing.virtual.store import VirtualStore

        clock = VirtualClock()
        self._store = None
        if below == SILENT:
            self._store = VirtualStore(positions=_POSITIONS, choose=lambda job: MediumFault.STUCK)
        elif below == FAR:
            pace = Pace(_FAR_BYTES_PER_SECOND, _FAR_SECONDS)
            link = Link(clock, lambda: pace)
            self._store = VirtualStore(
                positions=_POSITIONS, link=link, link_slot_bytes=TimeModel().block_bytes, keeps=False
            )
        self._engine = ReplayEngine(
            ReplaySettings(
                connector="offload",
                gpu_blocks=4 * _MOST_BLOCKS,
                cpu_blocks=(num_runs + 1) * _DOCUMENTS * _MOST_BLOCKS,
                block_size=_BLOCK_TOKENS,
                eviction_policy="lru",
                timer=time.thread_time_ns,
                watch=False,
                places=() if self._store is None else (self._store.place,),
                clock=clock,
            )
        )
        # workers make checksums in processes of their own, and here they would take the scheduler's caches
        self._engine._worker._worker._engine._seals.has_sums = False
        self._num_added = 0
        while clock.now < _KNOWN_SECONDS:
            self._ask(random.Random("known"), -1)
            self._come_to_rest()
        if self._store is not None:
            is_known = self._store.probes.breaker.is_outage
            assert is_known == (below == SILENT), f"{below}: an outage is {is_known}"

    def run(self, seed: int, num_requests: int) -> Run:
        """Ask for so many documents."""
        rng, trace, spent = random.Random(seed), hashlib.sha256(), list[int]()
        first, computed = self._num_added, 0
        for _ in range(num_requests):
            self._ask(rng, seed)
            for _ in range(rng.randrange(8)):
                computed += self._step(trace, spent, first)
        while not self._engine.is_idle() and self._engine.scheduler.has_unfinished_requests():
            computed += self._step(trace, spent, first)
        return Run(trace.hexdigest(), computed, spent)

    def close(self) -> None:
        """The engine ends."""
        if self._store is not None:
            for medium in self._store.media:
                medium.let_go()
        self._engine.close()

    def _ask(self, rng: random.Random, seed: int) -> None:
        from benchmarks.common.prompts import fresh_hashes

        document = random.Random(f"{seed} {rng.randrange(_DOCUMENTS)}")
        num_blocks = document.randrange(_POSITIONS, _MOST_BLOCKS)
        hashes = fresh_hashes(document, num_blocks)
        self._num_added += 1
        self._engine.add(str(self._num_added), hashes, num_blocks * _BLOCK_TOKENS + 5, _OUTPUT_TOKENS)

    def _step(self, trace: Any, spent: list[int], first: int) -> int:
        """Returns how many tokens it has computed."""
        if self._engine.is_idle():
            return 0
        step = self._engine.step()
        scheduled = step.output.num_scheduled_tokens
        if scheduled:
            trace.update(repr([(int(each) - first, count) for each, count in scheduled.items()]).encode())
            spent.append(step.schedule_ns + step.update_ns)
        return step.output.total_num_scheduled_tokens

    def _come_to_rest(self) -> None:
        while self._engine.scheduler.has_unfinished_requests():
            self._engine.step()


def _make(below: str, num_runs: int) -> Day:
    logging.disable(logging.WARNING)
    return Day(below, num_runs)
