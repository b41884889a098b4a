"""Stores: which full GPU blocks are copied down, and when."""

from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from allocator import CpuOffloadingBlockAllocator
from evictor import KeepHints
from offload import planner
from offload.breaker import CircuitBreaker
from offload.layout import Ids
from offload.ledger import JobLedger, Progress, StoreJob
from offload.lookout import Lookout
from offload.metrics import Metrics
from offload.vllm.messages import StoreOrder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

COMPLETED = frozenset(
    {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION}
)
"""Ends that a request reaches by computing. An aborted one may count blocks that were never filled."""

_ANSWERS_AT_ONCE = 4
"""Answers of which a run is stored in one step. The first costs as much as the others together."""

_block_id = attrgetter("block_id")


@dataclass(slots=True, eq=False)
class _Tracked:
    """An admitted request whose blocks may be stored.

    ``num_full`` were full when it was last looked at. ``num_planned`` is how far stores were planned since
    its last admission, or the last fault. What was stored and then evicted is not stored a second time while
    the request runs: requests whose chains do not fit the pool together would otherwise evict each other's
    blocks with every block they fill.
    """

    request: "Request"
    keep: KeepHints | None = None
    num_full: int = 0
    num_planned: int = 0


class Stores:
    """What requests have stored, and the stores in flight.

    A prompt's blocks are stored in the step that fills them; an answer's in runs of at least ``answer_run``,
    a few answers each ``answer_interval`` steps, and the rest when the request ends. Where a store begins is
    asked of the allocator each time. The source blocks are held until their copy has ended.
    """

    answer_interval = 16

    def __init__(
        self,
        allocator: CpuOffloadingBlockAllocator,
        ledger: JobLedger,
        kv_cache_manager: "KVCacheManager",
        breaker: CircuitBreaker,
        metrics: Metrics,
        *,
        block_size: int,
        slot_bytes: int,
        store_answers: bool,
    ) -> None:
        """Begin with none.

        Args:
            allocator: of the pool.
            ledger: of the jobs.
            kv_cache_manager: the scheduler's.
            breaker: pauses stores.
            metrics: counts them.
            block_size: tokens per block.
            slot_bytes: bytes of a block on all ranks.
            store_answers: whether to store more than prompts.
        """
        self.answer_run = planner.answer_run_blocks(block_size)
        self.breaker = breaker
        self.filled_by: Ids = np.full(allocator.capacity, -1, dtype=np.int64)
        """For every slot the store job that filled it."""
        self._allocator = allocator
        self._ledger = ledger
        self._manager = kv_cache_manager
        self._block_pool = kv_cache_manager.block_pool
        self._metrics = metrics
        self._block_size = block_size
        self._slot_bytes = slot_bytes
        self._store_answers = store_answers
        self._requests: dict[str, _Tracked] = {}
        self._lookout: Lookout[str] = Lookout()
        self._answers: dict[str, None] = {}  # in line for a run of theirs to be stored
        self._steps_to_answer = 0

    def __len__(self) -> int:
        """Requests whose blocks may be stored."""
        return len(self._requests)

    def admit(self, request: "Request", keep: KeepHints | None) -> None:
        """The scheduler gave ``request`` blocks for the first time; ``keep`` says how to keep them."""
        self._requests[request.request_id] = _Tracked(request, keep)
        self._lookout.expect(request.request_id, 1)

    def admit_again(self, request: "Request") -> None:
        """``request`` was preempted, and has blocks again."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.num_full = tracked.num_planned = 0
            self._lookout.expect(request.request_id, 1)

    def plan(self, output: "SchedulerOutput") -> list[StoreOrder]:
        """What to store once this step has run."""
        for request_id in output.preempted_req_ids or ():
            self._allocator.forget_owner(request_id)
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.request.status is RequestStatus.PREEMPTED:
                self._forget(request_id)  # until it is admitted again, which may have happened already
        scheduled = output.num_scheduled_tokens
        due = self._lookout.due()
        if output.total_num_scheduled_tokens > len(scheduled):
            due += [request_id for request_id, num in scheduled.items() if num > 1]
        if due or self._answers:
            self._note_full_blocks(due, scheduled)
        if not self._allocator.num_owners or not self._may_store():
            return []
        orders: list[StoreOrder] = []
        for run in self._allocator.uncached():
            if run.owner in scheduled and self._may_store():
                orders += self._open(self._requests[str(run.owner)], run.start, run.stop)
        return orders

    def finish(self, request: "Request") -> list[StoreOrder]:
        """What to store of a request that is over; its blocks are freed right after this returns.

        With overlapping steps a completed one may have a full block that no step has stored yet.
        """
        request_id = request.request_id
        tracked = self._requests.pop(request_id, None)
        is_waiting = self._allocator.forget_owner(request_id)
        self._forget(request_id)
        if tracked is None or request.status not in COMPLETED:
            return []
        num_full = planner.storable_blocks_at_finish(
            request.num_computed_tokens,
            request.num_output_placeholders,
            request.num_prompt_tokens,
            self._storable_tokens(request),
            len(request.block_hashes),
            self._block_size,
        )
        num_full = min(num_full, len(self._manager.get_blocks(request_id).blocks[0]))
        if (num_full <= tracked.num_full and not is_waiting) or not self._may_store():
            return []
        start = self._allocator.known_depth(request.block_hashes, num_full)
        return self._open(tracked, start, num_full) if start < num_full else []

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

    def plan_anew(self) -> None:
        """Something has left the pool that was not evicted; whose chains went with it is not known here."""
        for request_id, tracked in self._requests.items():
            tracked.num_full = tracked.num_planned = 0
            self._lookout.expect(request_id, 1)

    def stop_storing(self) -> None:
        """Nothing that was computed for these requests is ever stored: it may be of old weights."""
        self._requests.clear()
        self._answers.clear()

    # Which blocks

    def _note_full_blocks(self, due: list[str], scheduled: dict[str, int]) -> None:
        """Note the full blocks of requests that have filled enough of them. Answers wait in line.

        ``due`` are those that compute more than one token now, and those whose turn it is by the lookout: it
        counts on a token per step, so it may be early, and never late.
        """
        for request_id in due:
            self._look_at(request_id, scheduled.get(request_id), may_note_answer=False)
        self._steps_to_answer -= 1
        if self._answers and self._steps_to_answer <= 0:
            self._steps_to_answer = self.answer_interval
            for request_id in list(islice(self._answers, _ANSWERS_AT_ONCE)):
                del self._answers[request_id]
                self._look_at(request_id, scheduled.get(request_id), may_note_answer=True)

    def _forget(self, request_id: str) -> None:
        self._lookout.forget(request_id)
        self._answers.pop(request_id, None)

    def _look_at(self, request_id: str, num_scheduled: int | None, *, may_note_answer: bool) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if num_scheduled is None:  # it waits for its KV, or for its turn
            self._lookout.expect(request_id, 1)
            return
        request, block_size = tracked.request, self._block_size
        num_computed = request.num_computed_tokens + num_scheduled
        num_full = planner.storable_blocks(
            num_computed, self._storable_tokens(request), len(request.block_hashes), block_size
        )
        num_prompt_blocks = request.num_prompt_tokens // block_size
        if planner.is_worth_storing(num_full, tracked.num_full, num_prompt_blocks, self.answer_run):
            if num_full > num_prompt_blocks and not may_note_answer:
                noted = max(min(num_full, tracked.num_full), num_prompt_blocks)
                if num_full >= noted + self.answer_run:
                    self._answers[request_id] = None
                num_full = noted
            if num_full != tracked.num_full:
                tracked.num_full = num_full
                tracked.num_planned = min(tracked.num_planned, num_full)
                self._allocator.note_full(request_id, request.block_hashes, num_full)
        if request_id in self._answers:
            return
        if num_full < num_prompt_blocks or self._store_answers:
            steps = planner.tokens_to_next_look(
                num_computed, tracked.num_full, num_prompt_blocks, self.answer_run, block_size
            )
            self._lookout.expect(request_id, steps)

    def _storable_tokens(self, request: "Request") -> int:
        num_tokens: int = request.num_tokens if self._store_answers else request.num_prompt_tokens
        return num_tokens

    # Jobs

    def _may_store(self) -> bool:
        return self._num_holdable() > 0 and self.breaker.allows

    def _num_holdable(self) -> int:
        return planner.holdable_blocks(self._block_pool.num_gpu_blocks, self._ledger.num_held_blocks)

    def _open(self, tracked: _Tracked, start: int, stop: int) -> list[StoreOrder]:
        """Store full blocks of a request from position ``start`` on; as many as may be held now."""
        request = tracked.request
        if start < tracked.num_planned:  # stored and evicted before
            self._allocator.forget_owner(request.request_id)
            return []
        limit = 1 if self.breaker.is_outage else self._num_holdable()  # a trial that hangs costs its slots
        plan = self._allocator.plan_store(request.block_hashes, stop, limit, tracked.keep)
        if plan is None:  # worth less than all that is here now: another try at the next look
            self._allocator.forget_owner(request.request_id)
            tracked.num_full = 0
            return []
        stop = tracked.num_planned = plan.start + len(plan.hashes)
        blocks: list[Any] = self._manager.get_blocks(request.request_id).blocks[0][plan.start : stop]
        self._block_pool.touch(blocks)
        job = self._ledger.open_store(plan, blocks)
        self.breaker.began(job.job_id)
        slots = plan.slots[:, 0]
        self.filled_by[slots] = job.job_id
        return [StoreOrder(job.job_id, block_ids_of(blocks), slots)]

    def _end(self, job: StoreJob) -> None:
        self._block_pool.free_blocks(reversed(job.blocks))
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


def block_ids_of(blocks: list[Any]) -> Ids:
    """Ids of GPU blocks, ``int64[len(blocks)]``."""
    return np.fromiter(map(_block_id, blocks), dtype=np.int64, count=len(blocks))
