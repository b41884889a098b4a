"""What runs in the processes of the benchmark: our connector with a silent store below it, or without one."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from functools import partial
from typing import Any

from offload.testing.engines.process import EngineProcess

__all__ = ["Day", "child_of"]

_BLOCK_TOKENS = 16
_DOCUMENTS = 40
_MOST_BLOCKS = 500
_OUTPUT_TOKENS = 16
_POSITIONS = 16
"""Of an extent, where blocks of 16 tokens have 64 KiB."""
_KNOWN_SECONDS = 60.0
"""Of the virtual clock, until it is known that a store is silent."""


def child_of(has_store: bool, num_runs: int) -> EngineProcess[Day]:
    """A process with a ``Day``, forked from one that has only imported vLLM."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    name = "with a silent store" if has_store else "without"
    made = partial(_make, has_store, num_runs)
    return EngineProcess(made, name, variables=quiet, fork_from=["benchmarks.control_plane.child"])


class Day:
    """An engine that is asked for documents, some of them again; whoever is below it never answers."""

    def __init__(self, has_store: bool, num_runs: int) -> None:
        """Begin when it is known that the store is silent. The pool has room for all of so many runs."""
        from benchmarks.engine_replay import ReplayEngine, ReplaySettings  # not over here: it imports vLLM
        from offload.testing.media.faulty import MediumFault
        from offload.testing.virtual.store import VirtualStore

        self._store = None
        if has_store:
            self._store = VirtualStore(positions=_POSITIONS, choose=lambda job: MediumFault.STUCK)
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
            )
        )
        self._num_added = 0
        while self._engine.clock.now < _KNOWN_SECONDS:
            self._ask(random.Random("known"), -1)
            self._come_to_rest()
        if self._store is not None:
            assert self._store.probes.breaker.is_outage, "the store hangs, and nobody has noticed"

    def run(self, seed: int, num_requests: int) -> tuple[str, list[int]]:
        """What was scheduled, step by step, as a digest; and each step's nanoseconds in the scheduler."""
        rng, trace, spent = random.Random(seed), hashlib.sha256(), list[int]()
        first = self._num_added
        for _ in range(num_requests):
            self._ask(rng, seed)
            for _ in range(rng.randrange(8)):
                self._step(trace, spent, first)
        while not self._engine.is_idle() and self._engine.scheduler.has_unfinished_requests():
            self._step(trace, spent, first)
        return trace.hexdigest(), spent

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

    def _step(self, trace: Any, spent: list[int], first: int) -> None:
        if self._engine.is_idle():
            return
        step = self._engine.step()
        scheduled = step.output.num_scheduled_tokens
        if scheduled:
            trace.update(repr([(int(each) - first, count) for each, count in scheduled.items()]).encode())
            spent.append(step.schedule_ns + step.update_ns)

    def _come_to_rest(self) -> None:
        while self._engine.scheduler.has_unfinished_requests():
            self._engine.step()


def _make(has_store: bool, num_runs: int) -> Day:
    logging.disable(logging.WARNING)
    return Day(has_store, num_runs)
