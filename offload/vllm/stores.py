"""Stores: jobs that copy full GPU blocks down, from the backlog."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from allocator import CpuOffloadingBlockAllocator, StorePlan
from evictor import KeepHints
from offload import planner
from offload.backlog import Backlog, Pending
from offload.breaker import CircuitBreaker
from offload.layout import Ids
from offload.ledger import JobLedger, Progress, StoreJob
from offload.metrics import Metrics
from offload.patience import Patience
from offload.vllm.adapters import Adapters
from offload.vllm.messages import StoreOrder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

COMPLETED = frozenset(
    {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION}
)
"""Ends that a request reaches by computing. An aborted one may count blocks that were never filled."""

_ENDED_AT_ONCE = 16
"""Stores of requests that have ended which begin in one step."""

_block_id = attrgetter("block_id")


class Stores:
    """Opens and ends the stores.

    What there is to store, and when, is the backlog's. What an answer has beyond its last run is stored when
    the request ends. Where a store begins is asked of the allocator each time. The source blocks are held
    until their copy has ended.
    """

    def __init__(
        self,
        allocator: CpuOffloadingBlockAllocator,
        ledger: JobLedger,
        kv_cache_manager: "KVCacheManager",
        breaker: CircuitBreaker,
        metrics: Metrics,
        adapters: Adapters,
        *,
        block_size: int,
        slot_bytes: int,
        step_tokens: int,
        store_answers: bool,
        clock: Callable[[], float],
    ) -> None:
        """Begin with none.

        Args:
            allocator: of the pool.
            ledger: of the jobs.
            kv_cache_manager: the scheduler's.
            breaker: pauses stores.
            metrics: counts them.
            adapters: told what is stored.
            block_size: tokens per block.
            slot_bytes: bytes of a block on all ranks.
            step_tokens: tokens that a step computes at most.
            store_answers: whether to store more than prompts.
            clock: in seconds.
        """
        self.breaker = breaker
        self.filled_by: Ids = np.full(allocator.capacity, -1, dtype=np.int64)
        """For every slot the store job that filled it."""
        self._allocator = allocator
        self._ledger = ledger
        self._manager = kv_cache_manager
        self._block_pool = kv_cache_manager.block_pool
        self._metrics = metrics
        self._adapters = adapters
        self._block_size = block_size
        self._slot_bytes = slot_bytes
        self._store_answers = store_answers
        self._step_tokens = step_tokens
        self.backlog = Backlog(allocator, clock, block_size=block_size, store_answers=store_answers)
        self._restoring: dict[str, int] = {}  # blocks that requests need when their KV has been loaded
        self._last_to_ask: str | None = None  # for which there was enough room, as it seemed
        self._margin = 0  # blocks that running requests can take in the next step
        self._is_waited_for = False  # in this step a request waits for blocks that stores hold
        self._is_short = False  # and for more of them than the queue has
        self._patience = Patience(clock)

    def admit(self, request: "Request", keep: KeepHints | None) -> None:
        """The scheduler gave ``request`` blocks for the first time; ``keep`` says how to keep them."""
        num_prompt_blocks = request.num_prompt_tokens // self._block_size
        pending = Pending(request.request_id, request, request.block_hashes, num_prompt_blocks, keep)
        self.backlog.admit(pending)

    def plan(self, output: "SchedulerOutput") -> list[StoreOrder]:
        """What to store once this step has run."""
        backlog, scheduled = self.backlog, output.num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            preempted = backlog.get(request_id)
            is_back = preempted is not None and preempted.request.status is not RequestStatus.PREEMPTED
            backlog.set_aside(request_id, is_back=is_back)
        if output.preempted_req_ids:
            self._give_up("gave_way")
        self._patience.spend(self._is_waited_for)
        busy: list[str] = []
        if output.total_num_scheduled_tokens > len(scheduled):
            busy = [request_id for request_id, num in scheduled.items() if num > 1]
        for due in backlog.due(busy):
            self._look(due, scheduled, has_turn=False)
        for due in backlog.turns():
            self._look(due, scheduled, has_turn=True)
        orders = [] if self._is_short else self._store_ended()
        self._is_short = self._is_waited_for = False
        if backlog.has_runs and self._may_store():
            for run in backlog.runs():
                pending = backlog.get(run.owner) if run.owner in scheduled else None
                if pending is not None and self._may_store():
                    orders += self._open(pending, run.start, run.stop)
        for request_id in [request_id for request_id in self._restoring if request_id in scheduled]:
            del self._restoring[request_id]
        self._margin = self._room_to_run(output, busy)
        self._give_way(self._margin)
        return orders

    def finish(self, request: "Request") -> list[StoreOrder]:
        """What to store of a request that is over; its blocks are freed right after this returns.

        What has no copy yet of a completed one is held, and stored now or in the next steps.
        """
        self._restoring.pop(request.request_id, None)
        pending, is_waiting = self.backlog.finish(request.request_id)
        if pending is None:
            return []
        if request.status not in COMPLETED:
            if is_waiting:
                known = self._allocator.known_depth(pending.chain, pending.num_full)
                self._count_unstored(pending.num_full - known, "aborted")
            return []
        num_full = planner.storable_blocks_at_finish(
            request.num_computed_tokens,
            request.num_output_placeholders,
            request.num_prompt_tokens,
            self._storable_tokens(request),
            len(request.block_hashes),
            self._block_size,
        )
        table = self._table_of(pending)
        num_full = min(num_full, len(table))
        if num_full <= pending.num_full and not is_waiting:
            return []
        start = self._allocator.known_depth(pending.chain, num_full)
        if start < pending.num_planned:
            self._count_unstored(num_full - pending.num_planned, "not_admitted")
        elif start < num_full:
            blocks = table[start:num_full]
            self._block_pool.touch(blocks)
            self.backlog.end(pending, start, blocks)
        orders = self._store_ended()
        self._give_way(self._margin)
        return orders

    def make_room(self, request: "Request", num_local: int) -> None:
        """A waiting request is about to ask the scheduler for blocks, some of which stores may hold.

        It waits for them while there is patience. Then the queue gives way, at once and by no more than the
        request lacks; if it had to wait all the same, though there seemed to be enough, by all. What is in
        flight cannot give way: a request that lacks more than the queue has waits for it, and meanwhile
        nothing more of the queue is stored. Nor does the queue give way to one that waits for others anyway.

        Args:
            request: the request.
            num_local: leading tokens that the GPU has.
        """
        num_queued, num_held = self.backlog.num_queued, self._ledger.num_held_blocks
        if not num_queued + num_held:
            return
        num_needed = planner.blocks_to_admit(request.num_tokens, num_local, self._block_size)
        num_lacking = num_needed - self._block_pool.get_num_free_blocks()
        was_refused, self._last_to_ask = request.request_id == self._last_to_ask, None
        if num_lacking <= 0 and not was_refused:
            self._last_to_ask = request.request_id
        elif num_lacking <= num_queued + num_held:
            self._is_waited_for = True
            if self._patience.is_over:
                self._is_short = num_lacking > num_queued
                if was_refused:
                    self._give_up("gave_way")
                elif not self._is_short:
                    self._give_way(num_needed)
                    self._last_to_ask = request.request_id

    def was_given(self, request: "Request", num_local: int, num_external: int) -> None:
        """It has got the blocks that it asked for, and asks for no more when ``num_external`` tokens come."""
        self._last_to_ask = None
        self._restoring.pop(request.request_id, None)
        if num_external:
            num_needed = planner.blocks_to_admit(
                request.num_tokens, num_local + num_external, self._block_size
            )
            self._restoring[request.request_id] = num_needed

    def spoil(self) -> None:
        """Some GPU blocks hold no valid KV; which others were computed on top of them cannot be told."""
        self._ledger.spoil_stores()
        self._give_up("outage")

    def reset(self) -> None:
        """Nothing computed before this is ever stored."""
        self.backlog.clear()
        self._give_up("reset")

    def drop(self, is_meant: "Callable[[Request], bool]") -> None:
        """Nothing computed before this for these requests is ever stored."""
        blocks = self.backlog.drop(is_meant)
        self._block_pool.free_blocks(blocks)
        self._count_unstored(len(blocks), "reset")

    def advance(self, job: StoreJob, progress: Progress) -> None:
        """Take in what became of a store."""
        if progress.gave_up:
            self._metrics.count("failed_jobs")
            self.breaker.failed(job.job_id, hangs=True)
        if progress.ended:
            self._end(job)
        elif progress.gave_up:
            self._allocator.abandon(job.plan)
            self._block_pool.free_blocks(reversed(self._ledger.take_held(job)))

    # Which blocks

    def _look(self, pending: Pending, scheduled: dict[str, int], *, has_turn: bool) -> None:
        num_scheduled = scheduled.get(pending.request_id)
        if num_scheduled is None:  # it waits for its KV, or for its turn
            self.backlog.look_later(pending)
            return
        num_tokens = pending.request.num_computed_tokens + num_scheduled
        num_full = planner.storable_blocks(
            num_tokens, self._storable_tokens(pending.request), len(pending.chain), self._block_size
        )
        self.backlog.look(pending, num_tokens, num_full, has_turn=has_turn)

    def _storable_tokens(self, request: "Request") -> int:
        num_tokens: int = request.num_tokens if self._store_answers else request.num_prompt_tokens
        return num_tokens

    def _table_of(self, pending: Pending) -> list[Any]:
        """The GPU blocks that its request has now; none after a preemption."""
        blocks: list[Any] = self._manager.get_blocks(pending.request_id).blocks[0]
        return blocks

    # Jobs

    def _may_store(self) -> bool:
        return self._num_holdable() > 0 and self.breaker.allows

    def _num_holdable(self) -> int:
        return planner.holdable_blocks(
            self._block_pool.num_gpu_blocks,
            self._ledger.num_held_blocks,
            is_patient=not self._patience.is_over,
        )

    def _open(self, pending: Pending, start: int, stop: int) -> list[StoreOrder]:
        """Store full blocks of a running request from position ``start`` on; as many as may be held now."""
        if start < pending.num_planned:
            self.backlog.was_evicted(pending)
            return []
        plan = self._allocator.plan_store(pending.chain, stop, self._limit(), pending.keep)
        if plan is None:
            self.backlog.declined(pending)
            return []
        stop = plan.start + len(plan.hashes)
        self.backlog.planned(pending, stop)
        blocks = self._table_of(pending)[plan.start : stop]
        self._block_pool.touch(blocks)
        return [self._begin(pending, plan, blocks)]

    def _store_ended(self) -> list[StoreOrder]:
        """Store what is first in the queue, as much as may be held now."""
        orders: list[StoreOrder] = []
        if self.backlog.is_overdue:
            self._give_up("overdue")
        for _ in range(_ENDED_AT_ONCE):
            pending = self.backlog.first
            if pending is None or not self._may_store():
                break
            orders += self._open_ended(pending)
        if self.breaker.is_outage:
            self._give_up("outage")
        return orders

    def _open_ended(self, pending: Pending) -> list[StoreOrder]:
        """Store the leading blocks of the first in the queue, and give up what has become worthless."""
        stop = pending.stop
        known = self._allocator.known_depth(pending.chain, stop)
        if known < pending.start:  # what is before it has left the pool
            self._drop_first(len(pending.blocks), "cut_off")
            return []
        if known > pending.start:  # another request has stored it
            self._drop_first(known - pending.start, None)
        limit = self._limit()
        plan = self._allocator.plan_store(pending.chain, stop, limit, pending.keep) if known < stop else None
        num_planned = len(plan.hashes) if plan is not None else 0
        orders = [] if plan is None else [self._begin(pending, plan, self.backlog.take(num_planned))]
        if known + num_planned < stop and num_planned < limit:
            self._drop_first(len(pending.blocks), "not_admitted")
        return orders

    def _begin(self, pending: Pending, plan: StorePlan, blocks: list[Any]) -> StoreOrder:
        """Copy these blocks, which are held for it, into the slots of ``plan``."""
        self._adapters.stored(pending.request)
        job = self._ledger.open_store(plan, blocks)
        self.breaker.began(job.job_id)
        slots = plan.slots[:, 0]
        self.filled_by[slots] = job.job_id
        return StoreOrder(job.job_id, block_ids_of(blocks), slots)

    def _limit(self) -> int:
        return 1 if self.breaker.is_outage else self._num_holdable()  # a trial that hangs costs its slots

    def _end(self, job: StoreJob) -> None:
        self._block_pool.free_blocks(reversed(job.blocks))
        self.backlog.moved()
        if job.num_copied == job.num_blocks:
            self._metrics.count("stored_bytes", job.num_copied * self._slot_bytes)
            self.breaker.succeeded(job.job_id)
            self._allocator.commit(job.plan)
            return
        self._allocator.abort(job.plan)
        if job.is_spoiled:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._metrics.count("failed_jobs")
            self.breaker.failed(job.job_id)

    # What the queue gives up

    def _room_to_run(self, output: "SchedulerOutput", busy: list[str]) -> int:
        """Blocks that running requests can take in the next step, so that none is preempted for the queue."""
        scheduled = output.num_scheduled_tokens
        num_prefill = self._step_tokens
        if output.total_num_scheduled_tokens < self._step_tokens:
            prefills = [self.backlog.get(request_id) for request_id in busy]
            if None not in prefills:
                num_prefill = sum(
                    each.request.num_tokens - each.request.num_computed_tokens - scheduled[each.request_id]
                    for each in prefills
                    if each is not None
                )
        num_prefill = min(num_prefill, self._step_tokens)
        num_blocks = planner.blocks_to_run(len(scheduled), num_prefill, self._block_size)
        return num_blocks + sum(self._restoring.values())

    def _give_way(self, num_needed: int) -> None:
        """Give up as many blocks as it takes for ``num_needed`` to be free. Others may share some of them."""
        num_given_up = 0
        while self.backlog.num_queued:
            lacking = num_needed - self._block_pool.get_num_free_blocks()
            if lacking <= 0:
                return
            num_given_up = max(lacking, 2 * num_given_up)
            self._give_up("gave_way", num_given_up)

    def _give_up(self, why: str, num_blocks: int | None = None) -> None:
        """Release the last blocks of the queue, or all."""
        if self.backlog.num_queued:
            blocks = self.backlog.give_up(self.backlog.num_queued if num_blocks is None else num_blocks)
            self._block_pool.free_blocks(blocks)
            self._count_unstored(len(blocks), why)

    def _drop_first(self, num_blocks: int, why: str | None) -> None:
        """Release blocks of the first in the queue; nothing is lost if there is no reason ``why``."""
        blocks = self.backlog.take(num_blocks)
        self._block_pool.free_blocks(reversed(blocks))
        if why is not None:
            self._count_unstored(len(blocks), why)

    def _count_unstored(self, num_blocks: int, why: str) -> None:
        self._metrics.count(f"unstored_blocks_{why}", num_blocks)


def block_ids_of(blocks: list[Any]) -> Ids:
    """Ids of GPU blocks, ``int64[len(blocks)]``."""
    return np.fromiter(map(_block_id, blocks), dtype=np.int64, count=len(blocks))
