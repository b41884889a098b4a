"""The scheduler's side: decides what moves, and keeps the engine's blocks from reuse while it does.

One step of the engine, top to bottom::

    matched_tokens      a waiting request asks what the pool has for it       (changes nothing)
    allocated           the scheduler gave it blocks: pin the slots, open a load
    build_plan          requests are scheduled: open stores of their full, uncached blocks
    receive             workers report: commit or abort stores, unpin loads, release blocks
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from allocator import CpuOffloadingBlockAllocator, StorePlan
from evictor import make_policy
from offload import planner
from offload.breaker import CircuitBreaker
from offload.config import OffloadConfig
from offload.hints import read_hints
from offload.layout import Ids
from offload.ledger import JobLedger, LoadJob, Progress, Restore, StoreJob
from offload.lookout import Lookout
from offload.metrics import Metrics
from offload.vllm.fingerprint import Fingerprint
from offload.vllm.messages import StepPlan, StoreOrder, WorkerReport
from offload.vllm.restores import Restores

COMPLETED = frozenset(
    {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION}
)
"""Ends that a request reaches by computing. An aborted one may count blocks that were never filled."""

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_block_id = attrgetter("block_id")


@dataclass(slots=True)
class _Tracked:
    """A request the scheduler has admitted.

    ``num_full`` only saves asking again while no further block has filled; what is stored is asked of
    the tree. ``may_be_stored`` turns False for good at a reset, when its KV may be of old weights, and
    is False from the start if the request says so, or is a streaming session, which takes back tokens
    and then overwrites blocks that were full. ``may_be_loaded`` turns False with the first load that
    fails: the scheduler still counts such a request among the prefills it reserves blocks for, and would
    have it wait for ever for room beside itself if it were offered a second load.

    ``num_planned`` is how far stores were planned since its last admission, or the last fault. What
    was stored and then evicted is not stored a second time while the request runs: requests whose chains
    do not fit the pool together would otherwise evict each other's blocks with every block they fill.
    """

    request: "Request"
    may_be_stored: bool
    may_be_loaded: bool = True
    num_full: int = 0
    num_planned: int = 0


class SchedulerSide:
    """All decisions of the connector. Lives in the scheduler's process; never touches KV bytes."""

    def __init__(
        self,
        config: OffloadConfig,
        kv_cache_manager: "KVCacheManager",
        *,
        block_size: int,
        num_slots: int,
        slot_bytes: int,
        num_ranks: int,
        record_events: bool,
        fingerprint: Fingerprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``slot_bytes`` counts all ranks, ``num_slots`` is the least any rank has; ``clock`` in seconds."""
        self._config = config
        self._manager = kv_cache_manager
        self._block_pool = kv_cache_manager.block_pool
        self.block_size = block_size
        self._slot_bytes = slot_bytes
        self.allocator = CpuOffloadingBlockAllocator(
            num_slots, policy=make_policy(config.eviction_policy), record_events=record_events
        )
        self.ledger = JobLedger(num_ranks)
        self.metrics = Metrics()
        self.load_breaker = CircuitBreaker("restores", clock)
        self.store_breaker = CircuitBreaker("stores", clock)
        self.restores = Restores(
            self.allocator,
            self.ledger,
            kv_cache_manager,
            block_size=block_size,
            first_part=planner.first_part_blocks(slot_bytes // num_ranks),
        )
        self._filled_by: Ids = np.full(num_slots, -1, dtype=np.int64)  # the store job, for every slot
        self._requests: dict[str, _Tracked] = {}
        self._lookout: Lookout[str] = Lookout()
        self._answers: deque[str] = deque()  # in line for a run of theirs to be stored
        self.answer_run = planner.answer_run_blocks(block_size)
        """Blocks of an answer that are stored at a time."""
        self._local_tokens: dict[str, int] = {}
        self._fingerprint = fingerprint
        self._next = StepPlan(fingerprint)
        self._shown = (0, -1, 0, 0, False)  # the figures of the last take_metrics

    # Loads

    def matched_tokens(self, request: "Request", num_local: int) -> int | None:
        """Tokens the pool can add to the ``num_local`` leading ones the GPU has. Asked again and again.

        None: not yet, because another request's load is bringing the next block. Every load ends or is given
        up, so nobody waits for ever.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is not None and not tracked.may_be_loaded:
            return 0
        if not read_hints(request.kv_transfer_params).load:
            return 0
        if self.restores.is_coming(request, num_local // self.block_size):
            return None
        if not self.load_breaker.allows:
            return 0
        depth = self.allocator.resident_depth(request.block_hashes)
        num_tokens = planner.loadable_tokens(depth, num_local, request.num_tokens, self.block_size)
        num_gpu_blocks, num_stuck = self._block_pool.num_gpu_blocks, self.ledger.num_stuck_blocks
        if not planner.may_load(num_gpu_blocks, num_stuck, num_tokens // self.block_size):
            return 0
        self._local_tokens[request.request_id] = num_local
        return num_tokens

    def allocated(self, request: "Request", num_external: int) -> None:
        """The scheduler admitted ``request`` and expects ``num_external`` tokens from us, maybe none."""
        request_id = request.request_id
        num_local = self._local_tokens.pop(request_id, 0)
        tracked = self._requests.get(request_id)
        if tracked is None:
            may_be_stored = read_hints(request.kv_transfer_params).store and not request.resumable
            self._requests[request_id] = _Tracked(request, may_be_stored)
        else:
            tracked.num_full = tracked.num_planned = 0
        self._lookout.expect(request_id, 1)
        if not num_external:
            self.allocator.touch(request.block_hashes)
            return
        positions = planner.load_range(num_local, num_external, self.block_size)
        block_ids = _ids_of(self._blocks_of(request_id, positions.start, positions.stop))
        order = self.restores.open(request, positions, block_ids, self._filled_by)
        self.load_breaker.began(order.parts[0].job_id)
        self._next.loads.append(order)

    # Stores

    def build_plan(self, output: "SchedulerOutput") -> StepPlan:
        """Everything the workers are to do in this step."""
        for request_id in output.preempted_req_ids or ():
            self.allocator.forget_owner(request_id)
            self._lookout.forget(request_id)
        scheduled = output.num_scheduled_tokens
        self._note_full_blocks(scheduled, output.total_num_scheduled_tokens)
        for run in self.allocator.uncached() if self._may_store() else ():
            tracked = self._requests[str(run.owner)]
            if run.owner in scheduled and not self._open_store(tracked, run.start, run.stop):
                break
        plan, self._next = self._next, StepPlan(self._fingerprint)
        return plan

    def _note_full_blocks(self, scheduled: dict[str, int], num_tokens: int) -> None:
        """Note the full blocks of requests that have filled enough of them.

        Looks at requests that compute more than one token now, and at those whose turn it is by the
        lookout: it counts on a token per step, so it may be early, and never late. Of answers one run is
        noted in a step; others wait in line, and theirs grow meanwhile.
        """
        due = self._lookout.due()
        if num_tokens > len(scheduled):
            due += [request_id for request_id, num in scheduled.items() if num > 1]
        for request_id in due:
            self._look_at(request_id, scheduled.get(request_id), may_note_answer=False)
        if self._answers:
            request_id = self._answers.popleft()
            self._look_at(request_id, scheduled.get(request_id), may_note_answer=True)

    def _look_at(self, request_id: str, num_scheduled: int | None, *, may_note_answer: bool) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None or not tracked.may_be_stored:
            return
        if num_scheduled is None:  # it waits for its KV, or for its turn
            self._lookout.expect(request_id, 1)
            return
        request, block_size = tracked.request, self.block_size
        num_computed = request.num_computed_tokens + num_scheduled
        num_full = planner.storable_blocks(
            num_computed, self._storable_tokens(request), len(request.block_hashes), block_size
        )
        num_prompt_blocks = request.num_prompt_tokens // block_size
        if planner.is_worth_storing(num_full, tracked.num_full, num_prompt_blocks, self.answer_run):
            if num_full > num_prompt_blocks and not may_note_answer:
                self._answers.append(request_id)
                return
            tracked.num_full = num_full
            tracked.num_planned = min(tracked.num_planned, num_full)
            self.allocator.note_full(request_id, request.block_hashes, num_full)
        if num_full < num_prompt_blocks or self._config.store_decode_blocks:
            steps = planner.tokens_to_next_look(
                num_computed, tracked.num_full, num_prompt_blocks, self.answer_run, block_size
            )
            self._lookout.expect(request_id, steps)

    def finish(self, request: "Request") -> None:
        """``request`` is over, in whatever state; its blocks are freed right after this returns.

        With overlapping steps a completed one may have a full block that no step has stored yet.
        """
        request_id = request.request_id
        self._local_tokens.pop(request_id, None)
        tracked = self._requests.pop(request_id, None)
        self.allocator.forget_owner(request_id)
        self._lookout.forget(request_id)
        if tracked is not None and tracked.may_be_stored and request.status in COMPLETED:
            num_full = planner.storable_blocks_at_finish(
                request.num_computed_tokens,
                request.num_output_placeholders,
                request.num_prompt_tokens,
                self._storable_tokens(request),
                len(request.block_hashes),
                self.block_size,
            )
            num_full = min(num_full, len(self._manager.get_blocks(request_id).blocks[0]))
            start = self.allocator.known_depth(request.block_hashes, num_full)
            if start < num_full and self._may_store():
                self._open_store(tracked, start, num_full)

    # Workers' reports

    def receive(self, report: WorkerReport | None, invalid_block_ids: set[int]) -> None:
        """Jobs ended; ``invalid_block_ids`` are GPU blocks that some connector failed to fill."""
        if invalid_block_ids and not invalid_block_ids <= self.restores.blocks():
            self.ledger.spoil_stores()  # a sibling's load failed, and a step has computed on top of it
        for job_id, job_report in (report.jobs if report else {}).items():
            progress = self.ledger.report(job_id, *job_report)
            if progress is not None:
                self._advance(progress)

    def reset(self) -> None:
        """Forget all KV: weights may have changed. Nothing computed before this is ever stored."""
        self.allocator.reset()
        for tracked in self._requests.values():
            tracked.may_be_stored = False
        self._next.cancelled += self.restores.cancel()

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping, because ends of jobs travel on steps.

        Not for jobs past their deadline, which would keep it from ever coming to rest or shutting down.
        """
        return len(self.ledger) > self.ledger.num_given_up

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, and the gauges."""
        allocator, ledger = self.allocator, self.ledger
        num_used = allocator.capacity - allocator.num_free
        is_paused = self.load_breaker.is_outage or self.store_breaker.is_outage
        shown = (allocator.num_evicted, num_used, len(ledger), ledger.num_given_up, is_paused)
        if shown != self._shown:
            self.metrics.count("evicted_blocks", allocator.num_evicted - self._shown[0])
            self.metrics.show("pool_blocks", allocator.capacity)
            self.metrics.show("pool_used_blocks", num_used)
            self.metrics.show("jobs_in_flight", len(ledger))
            self.metrics.show("stuck_jobs", ledger.num_given_up)
            self.metrics.show("paused", is_paused)
            self._shown = shown
        return self.metrics.take()

    # Private

    def _storable_tokens(self, request: "Request") -> int:
        store_all = self._config.store_decode_blocks
        num_tokens: int = request.num_tokens if store_all else request.num_prompt_tokens
        return num_tokens

    def _open_store(self, tracked: _Tracked, start: int, stop: int) -> bool:
        """Store the request's full blocks from position ``start`` on. False when no more may be now."""
        request = tracked.request
        limit = self._num_holdable()
        if self.store_breaker.is_outage:
            limit = 1  # if the trial hangs too, its slot is lost to the pool
        plan = None
        if start >= tracked.num_planned:
            plan = self.allocator.plan_store(request.block_hashes, stop, limit)
        if plan is None:  # stored and evicted before, or worth less than all that is here
            self.allocator.forget_owner(request.request_id)
            return True
        tracked.num_planned = plan.start + len(plan.hashes)
        self._hold_and_order(request, plan)
        return self._may_store()

    def _may_store(self) -> bool:
        return self._num_holdable() > 0 and self.store_breaker.allows

    def _num_holdable(self) -> int:
        return planner.holdable_blocks(self._block_pool.num_gpu_blocks, self.ledger.num_held_blocks)

    def _hold_and_order(self, request: "Request", plan: StorePlan) -> None:
        blocks = self._blocks_of(request.request_id, plan.start, plan.start + len(plan.hashes))
        self._block_pool.touch(blocks)
        job = self.ledger.open_store(plan, blocks)
        self.store_breaker.began(job.job_id)
        slots = plan.slots[:, 0].astype(np.int64)
        self._filled_by[slots] = job.job_id
        self._next.stores.append(StoreOrder(job.job_id, _ids_of(blocks), slots))

    def _blocks_of(self, request_id: str, start: int, stop: int) -> list[Any]:
        """GPU blocks at these positions of the request's table, as it is now."""
        blocks: list[Any] = self._manager.get_blocks(request_id).blocks[0][start:stop]
        return blocks

    def _advance(self, progress: Progress) -> None:
        job = progress.job
        if progress.fell_short or (progress.ended and job.num_copied < job.num_blocks):
            self._plan_anew()
        if isinstance(job, LoadJob):
            tracked = self._requests.get(job.restore.request.request_id)
            if progress.fell_short and tracked is not None and tracked.request is job.restore.request:
                tracked.may_be_loaded = False
            if progress.gave_up and not job.restore.was_stuck:
                self.metrics.count("failed_jobs")
                self.load_breaker.failed(job.restore.restore_id, hangs=True)
            restore = self.restores.advance(job, progress)
            if restore is not None:
                self._end_restore(restore)
            return
        if progress.gave_up:
            self.metrics.count("failed_jobs")
            self.store_breaker.failed(job.job_id, hangs=True)
        if progress.ended:
            self._end_store(job)
        elif progress.gave_up:
            self.allocator.abandon(job.plan)
            self._block_pool.free_blocks(reversed(self.ledger.take_held(job)))

    def _plan_anew(self) -> None:
        """Something has left the pool that was not evicted; whose chains went with it is not known here."""
        for tracked in self._requests.values():
            tracked.num_planned = 0

    def _end_restore(self, restore: Restore) -> None:
        num_blocks = 0 if restore.was_stuck else restore.num_landed
        self.metrics.count("restored_requests", num_blocks > 0)
        self.metrics.count("restored_tokens", num_blocks * self.block_size)
        self.metrics.count("loaded_bytes", num_blocks * self._slot_bytes)
        if num_blocks == len(restore.block_ids):
            self.load_breaker.succeeded(restore.restore_id)
        elif restore.is_cancelled:
            self.load_breaker.dismissed(restore.restore_id)
        elif not restore.was_stuck:
            self.metrics.count("failed_jobs")
            self.load_breaker.failed(restore.restore_id)

    def _end_store(self, job: StoreJob) -> None:
        self._block_pool.free_blocks(reversed(job.blocks))
        if job.num_copied == job.num_blocks:
            self.metrics.count("stored_bytes", job.num_copied * self._slot_bytes)
            self.store_breaker.succeeded(job.job_id)
            self.allocator.commit(job.plan)
            return
        self.allocator.abort(job.plan)
        if job.is_spoiled:
            self.store_breaker.dismissed(job.job_id)
        elif not job.given_up:
            self.metrics.count("failed_jobs")
            self.store_breaker.failed(job.job_id)


def _ids_of(blocks: list[Any]) -> Any:
    return np.fromiter(map(_block_id, blocks), dtype=np.int64, count=len(blocks))
