"""The connector's scheduler side over an engine that has no model, no GPU cache and no bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.trace_replay.replay import TraceClock
from offload.config import OffloadConfig, StoreWhen
from offload.messages import (
    NAME_BYTES,
    POOL,
    Fingerprint,
    Ids,
    JobReport,
    Order,
    Route,
    TierFacts,
    WorkerReport,
)
from offload.scheduler.common import Common
from offload.scheduler.engine import Drafts, Origin, State, States
from offload.scheduler.flow import Below
from offload.scheduler.groups import GpuBlocks, Group, Groups, Kind
from offload.scheduler.hints import RequestHints
from offload.scheduler.side import SchedulerSide
from offload.scheduler.tiers.tier import TierLimits, make_tier
from offload.transfer_params import KVTransferParams

__all__ = ["Moved", "TierReplay"]

_SLOT_BYTES = 1 << 20
"""An extent is one block here, as for a model of 8 billion parameters with blocks of some tokens."""
_TOKEN_SECONDS = 1e-6
_FETCH_SECONDS = _TOKEN_SECONDS / 4
"""Of a token. Both are so short that the clock stays with the arrivals: a fetch always pays."""
_MOST_STEPS = 100_000
_SPILL, _FETCH = Route("spill", POOL, "tier"), Route("fetch", "tier", POOL)


class _Request:
    """A prompt of full blocks and one token, which is answered by one token."""

    lora_request = None
    priority = 0
    resumable = skip_reading_prefix_cache = False
    num_output_placeholders = num_in_flight_tokens = num_computed_tokens = 0
    num_output_tokens = 1

    def __init__(self, number: int, chain: Sequence[bytes], block_tokens: int) -> None:
        self.request_id = f"request-{number}"
        self.arrival_time = 0.0
        self.chain = chain
        self.num_prompt_tokens = len(chain) * block_tokens + 1
        self.state = State.OTHER

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + 1

    def is_finished(self) -> bool:
        return self.state is State.COMPLETED


@dataclass(frozen=True, slots=True)
class _Step:
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: frozenset[str] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class _Engine:
    """Blocks of the one request that there is: 1, 2, and so on. Its prefix cache has nothing."""

    num_spare = 0
    drafts = Drafts()

    def __init__(self, most_blocks: int, block_tokens: int) -> None:
        self.num_blocks = self.num_free = 4 * most_blocks + 64
        self.groups = Groups([Group(Kind.FULL, block_tokens)], block_tokens)
        self._table = list(range(1, most_blocks + 2))

    def state(self, request: _Request) -> State:
        return request.state

    def ending(self, request: _Request) -> None:
        """Not known yet: here requests are over before their answers would have ended."""

    def hints(self, request: _Request) -> RequestHints:
        return _NO_HINTS

    def transfer_params(self, request: _Request) -> KVTransferParams:
        return _NO_PARAMS

    def origin(self, request: _Request) -> Origin:
        return _NO_ORIGIN

    def chain(self, request: _Request) -> Sequence[bytes]:
        return request.chain

    def tables(self, request_id: str) -> list[GpuBlocks]:
        return [self._table]

    def mean_depth(self, step: Any) -> float:
        return 0.0

    def states(self, step: Any) -> dict[str, dict[int, States]]:
        return {}

    def branch(self, request: _Request) -> int:
        return 0

    def retain(self, request: _Request, num_tokens: int) -> None:
        pass

    def blocks(self, block_ids: Ids) -> GpuBlocks:
        return block_ids.tolist()

    def ids(self, blocks: Sequence[int]) -> Ids:
        return np.array(blocks, dtype=np.int64)

    def hold(self, blocks: Sequence[int]) -> None:
        pass

    def release(self, blocks: Iterable[int]) -> None:
        pass

    def num_holds(self, block_id: int) -> int:
        return 1

    def num_free_of(self, hashes: Iterator[bytes]) -> int:
        return 0

    def has(self, prefix_hash: bytes) -> bool:
        return False

    def is_ending(self) -> bool:
        return False

    def share(self, request: _Request, num_tokens: int) -> None:
        pass


_NO_HINTS = RequestHints()
_NO_PARAMS = KVTransferParams()
_NO_ORIGIN = Origin(None, 0, "")


@dataclass(slots=True)
class Moved:
    """What became of all requests, in blocks.

    Attributes:
        accessed: of prompts.
        hits: that were restored.
        from_tier: of these, that the pool did not have when their request came.
        moved: by route: what was copied.
    """

    accessed: int = 0
    hits: int = 0
    from_tier: int = 0
    moved: Counter[Route] = field(default_factory=Counter)

    @property
    def written(self) -> int:
        """Into the tier."""
        return self.moved[_SPILL]

    @property
    def fetched(self) -> int:
        """From the tier."""
        return self.moved[_FETCH]


class TierReplay:
    """One request after the other, each complete before the next one comes, and all that it spills.

    The scheduler's side, its pool, the tier's directory and what decides about spills and fetches are those
    of the connector. Every copy ends well in the next step.
    """

    def __init__(
        self,
        pool_blocks: int,
        tier_blocks: int,
        limits: TierLimits,
        *,
        policy: str,
        most_blocks: int,
        block_tokens: int,
    ) -> None:
        """``tier_blocks``: room for so many below, 0: no tier; ``most_blocks``: of a request."""
        self.clock = TraceClock()
        self.moved = Moved()
        self._block_tokens = block_tokens
        self._tier_blocks = tier_blocks
        self._limits = limits
        self._number = 0
        engine = _Engine(most_blocks, block_tokens)
        self.side = SchedulerSide(
            OffloadConfig(cpu_gib=1, eviction_policy=policy, store=StoreWhen.EAGER),
            engine,
            block_size=block_tokens,
            num_slots=pool_blocks,
            slot_bytes=_SLOT_BYTES,
            block_bytes=_SLOT_BYTES,
            step_tokens=most_blocks * block_tokens,
            num_ranks=1,
            record_events=False,
            fingerprint=Fingerprint("", "", 1, block_tokens, "", ""),
            clock=self.clock,
            places=[self._make_flows] if tier_blocks else [],
        )

    def serve(self, chain: Sequence[bytes], seconds: float) -> None:
        """A request comes at that time, with at least one full block."""
        self.clock.seconds = max(self.clock.seconds, seconds)
        side, request = self.side, _Request(self._number, chain, self._block_tokens)
        self._number += 1
        num_before = side.allocator.resident_depth(chain)
        side.arrived(request)
        while (offer := side.offer(request, 0)).tokens is None:
            self._step({})
        side.allocated(request, offer.tokens)
        if offer.tokens:
            request.state = State.WAITS_FOR_KV
            self._rest()
        request.state = State.OTHER
        request.num_computed_tokens = offer.tokens
        num_new = request.num_prompt_tokens - offer.tokens
        self._step({request.request_id: num_new})
        request.num_computed_tokens = request.num_prompt_tokens
        request.state = State.COMPLETED
        side.finish(request)
        self._rest()
        num_hits = offer.tokens // self._block_tokens
        self.moved.accessed += len(chain)
        self.moved.hits += num_hits
        self.moved.from_tier += max(0, num_hits - num_before)

    def check_invariants(self) -> None:
        """All parts of the scheduler's side agree, and nothing is left of any request."""
        self.side.check_invariants()
        assert not self.side.left_over(), f"{self.side.left_over()} is left over"

    def _rest(self) -> None:
        """Steps without tokens until nothing is under way, nor anything to begin."""
        for _ in range(_MOST_STEPS):
            if not self._step({}) and not self.side.has_pending_work:
                return
        raise AssertionError(f"the engine does not come to rest: {self.side.left_over()}")

    def _step(self, scheduled: dict[str, int]) -> bool:
        plan = self.side.build_plan(_Step(scheduled))
        self.clock.seconds += sum(scheduled.values()) * _TOKEN_SECONDS
        report = WorkerReport()
        for order in plan.orders:
            self._copy(order, report)
        self.side.receive(report, set())
        return bool(plan.orders)

    def _copy(self, order: Order, report: WorkerReport) -> None:
        for part in order.parts:
            num_blocks = part.stop - part.start
            self.moved.moved[order.route] += num_blocks
            if order.route == _FETCH:
                self.clock.seconds += num_blocks * self._block_tokens * _FETCH_SECONDS
            report.add(part.job_id, JobReport(1, num_blocks, nbytes=num_blocks * _SLOT_BYTES))

    def _make_flows(self, common: Common) -> Below:
        none: Ids = np.empty(0, dtype=np.int64)
        names = np.empty((0, NAME_BYTES), dtype=np.uint8)
        facts = TierFacts(1, self._tier_blocks, 1, none, none, none, names, names)
        return make_tier(_SPILL, _FETCH, common, [facts], self._limits)
