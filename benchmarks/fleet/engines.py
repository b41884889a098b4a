"""An engine of the simulation: a real prefix tree, and a queue of prompts that are computed one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from allocator import CpuOffloadingBlockAllocator, Event
from benchmarks.trace_replay.prefill import PrefillModel
from evictor import make_policy
from offload.config import DEFAULT_POLICY
from offload.observe.trace import IDS_BLOCK_TOKENS

__all__ = ["SECONDS_PER_TOKEN", "Asked", "FleetEngine"]

SECONDS_PER_TOKEN = 0.02
"""Between two tokens of an answer, however many are decoded beside it."""

_MODEL = PrefillModel()


@dataclass(slots=True)
class Asked:
    """A request, and what became of it.

    Attributes:
        number: of it, from 0.
        chain: prefix hashes of the full blocks of its prompt, of ``IDS_BLOCK_TOKENS`` tokens.
        num_prompt, num_output: tokens.
        arrived_at, first_at: seconds; the second of its first token.
        found: tokens of its prompt that the engine had.
    """

    number: int
    chain: Sequence[bytes]
    num_prompt: int
    num_output: int
    arrived_at: float
    first_at: float = 0.0
    found: int = 0


@dataclass
class FleetEngine:
    """One engine.

    Attributes:
        name: of it.
        allocator: its pool, with the default policy.
        waiting: requests that have come and are not being computed.
        busy_seconds: of prefill.
        num_requests, num_computed: requests that have come; prompt tokens computed.
    """

    name: str
    allocator: CpuOffloadingBlockAllocator
    waiting: deque[Asked] = field(default_factory=deque)
    is_busy: bool = False
    busy_seconds: float = 0.0
    num_requests: int = 0
    num_computed: int = 0

    @classmethod
    def make(cls, name: str, pool_blocks: int, clock: Callable[[], float], has_events: bool) -> FleetEngine:
        """An engine with an empty pool of so many blocks. Its policy reads ``clock``."""
        policy = make_policy(DEFAULT_POLICY, pool_blocks, clock)
        return cls(name, CpuOffloadingBlockAllocator(pool_blocks, policy=policy, record_events=has_events))

    def begin(self, asked: Asked) -> float:
        """Compute a prompt: seconds that it takes. What the pool has by now is not computed."""
        depth = self.allocator.resident_depth(asked.chain)
        self.allocator.touch(asked.chain)
        asked.found = min(depth * IDS_BLOCK_TOKENS, asked.num_prompt - 1)
        seconds = _MODEL.seconds([asked.num_prompt]) - _MODEL.seconds([asked.found])
        self.is_busy = True
        self.busy_seconds += seconds
        self.num_computed += asked.num_prompt - asked.found
        return seconds

    def end(self, asked: Asked) -> list[Event]:
        """The prompt is computed, and its blocks are in the pool. Returns what came there and went."""
        self.is_busy = False
        plan = self.allocator.plan_store(asked.chain, len(asked.chain))
        if plan is not None:
            self.allocator.commit(plan)
        self.allocator.tidy()
        return self.allocator.take_events()

    def check(self) -> None:
        """Nothing waits, and the pool is whole. O(pool)."""
        assert not self.waiting and not self.is_busy, f"{self.name} has not answered all"
        self.allocator.check_invariants()
