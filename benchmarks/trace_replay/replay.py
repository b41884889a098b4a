"""Sends the requests of a workload through a pool, one after the other, and measures the calls."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allocator import CpuOffloadingBlockAllocator, StorePlan
from evictor import EvictionPolicy
from offload.sizing.ends import End

__all__ = ["OurPool", "Pool", "Replayed", "TraceClock", "freeze_garbage", "replay"]

Chain = Sequence[bytes]


class TraceClock:
    """Shows the time of the request that is replayed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Pool(Protocol):
    """A pool of blocks behind the calls that serve one request at a time."""

    def begin(self, chain: Chain) -> None:
        """The next request has this chain. What is done here is not the pool's: it is not measured."""

    def find(self) -> int:
        """Look the request up and use what there is of it; how many leading blocks that is."""

    def store(self) -> int:
        """Make room for the blocks not found, as far as the pool wants them; how many were evicted."""

    def finish(self) -> None:
        """What was stored is complete, and the request over."""


class OurPool:
    """The connector's own allocator: ``allocator.serve`` in parts, so that each can be measured.

    Args:
        capacity: in blocks.
        policy: a fresh one.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:  # type: ignore[type-arg]
        self.allocator = CpuOffloadingBlockAllocator(capacity, policy=policy)
        self._chain: Chain = ()
        self._plan: StorePlan | None = None
        self._turns: list[int] = []  # of the requests, in order

    def begin(self, chain: Chain) -> None:
        """See ``Pool``, here and below."""
        self._chain = chain

    def forget_kv(self) -> None:
        """The pool is empty again, and the policy remembers what it has learned."""
        self.allocator.reset()
        while self.allocator.tidy():
            pass
        self._turns.clear()

    def find(self) -> int:
        depth = self.allocator.resident_depth(self._chain)
        self._turns.append(self.allocator.touch(self._chain))
        return depth

    def ended(self, request: int, chain: Chain, ending: int) -> None:
        """The answer to that request, which had this chain, has ended so."""
        self.allocator.ended(chain, self._turns[request], ending)

    def store(self) -> int:
        evicted = self.allocator.num_evicted
        self._plan = self.allocator.plan_store(self._chain, len(self._chain))
        return self.allocator.num_evicted - evicted

    def finish(self) -> None:
        if self._plan is not None:
            self.allocator.commit(self._plan)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of each request.

    Attributes:
        hits: leading blocks that were there.
        evicted: blocks that left for it; empty if nobody counted.
        spent_ns: in all calls for it; empty if not measured.
        store_ns: in the one that made room; empty if not measured.
    """

    hits: list[int]
    evicted: list[int]
    spent_ns: list[int]
    store_ns: list[int]


def replay(
    pool: Pool,
    chains: Sequence[Chain],
    arrivals: Sequence[float],
    clock: TraceClock,
    timer: Callable[[], int],
    ends: Sequence[End] = (),
) -> Replayed:
    """Serve all requests, each complete before the next one comes. Ends of answers are told at their times.

    Args:
        pool: an empty one.
        chains: of the requests.
        arrivals: their times, in seconds, in order.
        clock: that the pool's policy reads.
        timer: nanoseconds.
        ends: of answers, in order; one takes its time in the account of its own request.
    """
    seen = Replayed([], [], [], [])
    to_come = deque(ends if isinstance(pool, OurPool) else ())
    for chain, arrival in zip(chains, arrivals, strict=True):
        while to_come and to_come[0].is_told(arrival, len(seen.hits)):
            end = to_come.popleft()
            clock.seconds = end.seconds
            began = timer()
            pool.ended(end.request, chains[end.request], end.ending)  # type: ignore[attr-defined]
            seen.spent_ns[end.request] += timer() - began
        clock.seconds = arrival
        pool.begin(chain)
        began = timer()
        hits = pool.find()
        found = timer()
        evicted = pool.store()
        stored = timer()
        pool.finish()
        seen.spent_ns.append(timer() - began)
        seen.store_ns.append(stored - found)
        seen.hits.append(hits)
        seen.evicted.append(evicted)
    return seen


def freeze_garbage() -> None:
    """What is there now is no longer looked at, as in vLLM's engine core once it has started.

    Collection stays on. What became garbage since the last time goes first; ``gc.unfreeze`` ends it.
    """
    gc.collect()
    gc.freeze()
