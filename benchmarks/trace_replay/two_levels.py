"""The GPU's cache and the pool below it: what is found in either, by when blocks are copied down.

Requests follow each other, as in all of `benchmarks.trace_replay`. The pool is the connector's allocator with
its default policy. The GPU's cache is a model (`benchmarks.trace_replay.gpu_cache`). Stores:

- `eager`: a request's blocks are copied while it runs.
- `lazy`: blocks are copied before the GPU evicts them, once they are in the window: the part of its cache
  that is nearest to eviction. What comes before them is copied with them, because the pool has no position
  without those before it. What was loaded stays in the pool. When the pool is full, blocks that the GPU has
  too go first, those farthest from the GPU's eviction before others, as long as they are more than a tenth
  of the pool. Otherwise the policy decides what goes, or that a newcomer stays out.
- `hollow`: the same, but the pool may lack what comes before a position, as long as the GPU has that. So
  nothing is copied but the window, and any block may go that the GPU has, too.
- `once`: no block is in both. That is a bound, which no engine reaches: a block that the GPU evicts is in the
  pool from then on, and none was copied for nothing. It is one prefix tree as large as both together, whose
  leaves that the GPU has cannot go. The policy decides which of the others go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from allocator import CpuOffloadingBlockAllocator, Pin
from benchmarks.trace_replay.gpu_cache import Chain, GpuCache, OwnedRun
from benchmarks.trace_replay.replay import TraceClock
from evictor import make_policy
from offload.config import DEFAULT_POLICY

__all__ = ["EAGER", "MODES", "ONCE", "Found", "Levels", "make_levels"]

EAGER, ONCE = "eager", "once"

_MOST_TWICE = 0.1
"""Part of a full pool that may be on the GPU, too."""
_STEP_BLOCKS = 16
"""That a step of an engine computes: 8,192 tokens. The window moves with each."""


@dataclass(slots=True)
class Found:
    """What became of all requests, in blocks.

    Attributes:
        accessed: of prompts.
        on_gpu: found in the GPU's cache.
        in_pool: found behind these, in the pool.
        stored: copied into the pool.
    """

    accessed: int = 0
    on_gpu: int = 0
    in_pool: int = 0
    stored: int = 0


class Levels(Protocol):
    """A GPU's cache and a pool, both empty at first."""

    found: Found

    def serve(self, chain: Chain) -> None:
        """A request comes, and is over before the next one does. It fits the GPU's cache."""

    def check_invariants(self) -> None:
        """Both agree. O(blocks)."""


class _Eager:
    """Everything is copied at once."""

    def __init__(self, gpu_blocks: int, pool_blocks: int, clock: TraceClock) -> None:
        self.gpu = GpuCache(gpu_blocks)
        self.found = Found()
        policy = make_policy(DEFAULT_POLICY, pool_blocks, clock)
        self.allocator = CpuOffloadingBlockAllocator(pool_blocks, policy=policy)

    def serve(self, chain: Chain) -> None:
        """See ``Levels``, here and below."""
        on_gpu = self._look_up(chain)
        run = self.gpu.touch(chain, on_gpu)
        num_new = len(chain) - on_gpu
        self.gpu.evict(num_new - self.gpu.num_free)
        self.gpu.extend(run, num_new)
        self._store(chain, len(chain))

    def check_invariants(self) -> None:
        self.gpu.check_invariants()
        self.allocator.check_invariants()
        assert not self.allocator.num_filling, f"{self.allocator.num_filling} slots are filling"
        assert not len(self.allocator.leases), f"{len(self.allocator.leases)} chains are kept"

    def _look_up(self, chain: Chain) -> int:
        """Count what there is of ``chain``; returns how much the GPU has."""
        on_gpu = self.gpu.depth(chain)
        in_pool = self.allocator.resident_depth(chain)
        self.found.accessed += len(chain)
        self.found.on_gpu += on_gpu
        self.found.in_pool += max(0, in_pool - on_gpu)
        self.allocator.touch(chain)
        return on_gpu

    def _store(self, chain: Chain, stop: int) -> None:
        plan = self.allocator.plan_store(chain, stop)
        if plan is not None:
            self.allocator.commit(plan)
            self.found.stored += len(plan.hashes)


class _Lazy(_Eager):
    """Blocks are copied right before the GPU evicts them, with all before them."""

    def __init__(self, gpu_blocks: int, pool_blocks: int, clock: TraceClock, window: int) -> None:
        super().__init__(gpu_blocks, pool_blocks, clock)
        self._window = window
        self._most_twice = int(_MOST_TWICE * pool_blocks)
        self._asked: dict[OwnedRun, int] = {}  # runs in the window, and up to where they were to be stored

    def serve(self, chain: Chain) -> None:
        on_gpu = self._look_up(chain)
        run = self.gpu.touch(chain, on_gpu)
        in_pool = self.allocator.resident_depth(chain)
        loads = self.allocator.leases.begin(chain, in_pool) if in_pool > on_gpu else None
        for num_blocks in _steps(len(chain) - on_gpu):
            num_to_go = max(0, num_blocks - self.gpu.num_free)
            self._copy_window(num_to_go)
            self.gpu.evict(num_to_go)
            self.gpu.extend(run, num_blocks)
        if loads is not None:
            self.allocator.leases.end(loads)
        self._copy_window(0)

    def _copy_window(self, num_to_go: int) -> None:
        """Copy what the GPU evicts next: so many blocks, and those in the window behind them."""
        for run in [run for run in self._asked if not len(run)]:
            del self._asked[run]
        for run in self.gpu.next_to_go(self._window + num_to_go - self.gpu.num_free):
            if self._asked.get(run, 0) < run.stop:
                self._asked[run] = run.stop
                num_lacking = run.stop - self.allocator.known_depth(run.chain, run.stop)
                if num_lacking:
                    self._make_room(num_lacking - self.allocator.num_free)
                    self._store(run.chain, run.stop)

    def _make_room(self, num_blocks: int) -> None:
        """Have blocks leave that the GPU has, too, if there are too many of them."""
        if num_blocks <= 0:
            return
        runs = [(run, self._num_twice(run)) for run in self.gpu.newest_first()]
        num_left = min(num_blocks, sum(num_twice for _, num_twice in runs) - self._most_twice)
        for run, num_twice in runs:
            if num_left <= 0:
                break
            if num_twice:
                num_left -= self.allocator.shedding.shed(run.chain, run.start, run.stop, num_left)

    def _num_twice(self, run: OwnedRun) -> int:
        return max(0, self.allocator.known_depth(run.chain, run.stop) - run.start)


class _Once:
    """No block is in both: the bound."""

    def __init__(self, gpu_blocks: int, pool_blocks: int, clock: TraceClock) -> None:
        self.gpu = GpuCache(gpu_blocks)
        self.found = Found()
        num_blocks = gpu_blocks + pool_blocks
        policy = make_policy(DEFAULT_POLICY, num_blocks, clock)
        self.union = CpuOffloadingBlockAllocator(num_blocks, policy=policy)
        self._leases: dict[OwnedRun, Pin] = {}

    def serve(self, chain: Chain) -> None:
        on_gpu, in_either = self.gpu.depth(chain), self.union.resident_depth(chain)
        assert on_gpu <= in_either, f"{on_gpu} blocks are on the GPU, {in_either} in either"
        self.found.accessed += len(chain)
        self.found.on_gpu += on_gpu
        self.found.in_pool += in_either - on_gpu
        self.union.touch(chain)
        loads = self.union.leases.begin(chain, in_either) if in_either else None
        run = self.gpu.touch(chain, on_gpu)
        for each in [each for each in self._leases if not len(each)]:
            self._keep(each)
        self._keep(run)
        self._compute(run, in_either)
        if loads is not None:
            self.union.leases.end(loads)

    def check_invariants(self) -> None:
        self.gpu.check_invariants()
        self.union.check_invariants()
        for run in self.gpu.oldest_first():
            depth = self.union.resident_depth(run.chain[: run.stop])
            assert depth == run.stop, f"{run.stop} blocks are on the GPU, {depth} in either"

    def _compute(self, run: OwnedRun, in_either: int) -> None:
        """The newest run gets all of its chain, of which ``in_either`` blocks are there."""
        num_new = len(run.chain) - run.stop
        for gone in self.gpu.evict(num_new - self.gpu.num_free):
            self._keep(gone)
        self._extend(run, num_new)

    def _extend(self, run: OwnedRun, num_blocks: int) -> None:
        self.gpu.extend(run, num_blocks)
        plan = self.union.plan_store(run.chain, run.stop, must=True)
        if plan is not None:
            self.union.commit(plan)
        self._keep(run)

    def _keep(self, run: OwnedRun) -> None:
        """What the GPU has of it cannot go."""
        lease = self._leases.pop(run, None)
        if lease is not None:
            self.union.leases.end(lease)
        if len(run):
            self._leases[run] = self.union.leases.begin(run.chain, run.stop)


class _Hollow(_Once):
    """Blocks are copied right before the GPU evicts them, and nothing else is."""

    def __init__(self, gpu_blocks: int, pool_blocks: int, clock: TraceClock, window: int) -> None:
        super().__init__(gpu_blocks, pool_blocks, clock)
        self._window = window
        self._pool_blocks = pool_blocks
        self._most_twice = int(_MOST_TWICE * pool_blocks)

    def check_invariants(self) -> None:
        super().check_invariants()
        num_twice = sum(run.num_copied for run in self.gpu.oldest_first())
        num_used = self.union.num_resident - len(self.gpu) + num_twice
        assert num_used <= self._pool_blocks, f"{num_used} blocks are in a pool of {self._pool_blocks}"

    def _compute(self, run: OwnedRun, in_either: int) -> None:
        for num_blocks in _steps(len(run.chain) - run.stop):
            num_to_go = max(0, num_blocks - self.gpu.num_free)
            self._copy_window(num_to_go)
            for gone in self.gpu.evict(num_to_go):
                self._keep(gone)
            loaded = slice(run.stop, min(run.stop + num_blocks, in_either))
            self._extend(run, num_blocks)
            run.copied[loaded] = True
        self._copy_window(0)

    def _copy_window(self, num_to_go: int) -> None:
        num_left = self._window + num_to_go - self.gpu.num_free
        due = self.gpu.next_to_go(num_left)
        for run in due:
            num_blocks = min(num_left, len(run))
            num_left -= num_blocks
            window = run.copied[run.stop - num_blocks : run.stop]
            self.found.stored += num_blocks - int(np.count_nonzero(window))
            window[:] = True
        self._make_room(due)

    def _make_room(self, due: Sequence[OwnedRun]) -> None:
        """Have blocks leave until the pool has no more than it has room for; none of those that are due."""
        runs = [(run, run.num_copied) for run in self.gpu.newest_first()]
        num_twice = sum(num for _, num in runs)
        over = self.union.num_resident - len(self.gpu) + num_twice - self._pool_blocks
        num_left = min(over, num_twice - self._most_twice)
        over -= max(0, num_left)
        for run, num_copied in runs:
            if num_left <= 0:
                break
            if num_copied and run not in due:
                gone = run.start + np.flatnonzero(run.copied[run.start : run.stop])[:num_left]
                run.copied[gone] = False
                num_left -= len(gone)
        over += max(0, num_left)  # they are all due
        if over > 0:
            self.union.evict(over)


MODES = (EAGER, "lazy", "hollow", ONCE)


def make_levels(mode: str, gpu_blocks: int, pool_blocks: int, window: float, clock: TraceClock) -> Levels:
    """Caches of so many blocks by that mode; ``window`` is a part of the GPU's cache."""
    num_due = max(1, round(window * gpu_blocks))
    match mode:
        case "eager":
            return _Eager(gpu_blocks, pool_blocks, clock)
        case "lazy":
            return _Lazy(gpu_blocks, pool_blocks, clock, num_due)
        case "hollow":
            return _Hollow(gpu_blocks, pool_blocks, clock, num_due)
        case _:
            return _Once(gpu_blocks, pool_blocks, clock)


def _steps(num_blocks: int) -> list[int]:
    whole, rest = divmod(num_blocks, _STEP_BLOCKS)
    return [_STEP_BLOCKS] * whole + [rest] * (rest > 0)
