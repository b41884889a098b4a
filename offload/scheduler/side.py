"""The scheduler's side: decides what moves, and keeps the engine's blocks from reuse while it does.

One step of the engine, top to bottom::

    offer               a waiting request asks what the pool has for it; queued stores give way to it
    allocated           the scheduler gave it blocks: pin the slots, open a load
    build_plan          requests are scheduled: open stores of their full, uncached blocks
    receive             workers report: commit or abort stores, unpin loads, release blocks
"""

import time
from collections.abc import Callable
from pathlib import Path

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, make_policy
from offload.config import OffloadConfig
from offload.messages import Fingerprint, StepPlan, WorkerReport
from offload.observe.metrics import Metrics
from offload.observe.recorder import TraceRecorder
from offload.scheduler import amounts
from offload.scheduler.adapters import Adapters
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.engine import Engine, Request, Step
from offload.scheduler.hints import RequestHints
from offload.scheduler.jobs import JobLedger, LoadJob, Progress
from offload.scheduler.offer import COMING, NOTHING, Offer, Why
from offload.scheduler.restores import Restores
from offload.scheduler.stores import Stores


class SchedulerSide:
    """All decisions of the connector. Lives in the scheduler's process; never touches KV bytes."""

    def __init__(
        self,
        config: OffloadConfig,
        engine: Engine,
        *,
        block_size: int,
        num_slots: int,
        slot_bytes: int,
        step_tokens: int,
        num_ranks: int,
        record_events: bool,
        fingerprint: Fingerprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``slot_bytes`` counts all ranks, ``num_slots`` is the least any rank has; ``clock`` in seconds.

        ``step_tokens``: that a step computes at most.
        """
        self.block_size = block_size
        self._clock = clock
        policy = make_policy(config.eviction_policy, num_slots, clock)
        self.allocator = CpuOffloadingBlockAllocator(
            num_slots,
            policy=HintedPolicy(policy, int(num_slots * config.hinted_share), clock),
            record_events=record_events,
        )
        self.ledger = JobLedger(num_ranks)
        self.metrics = Metrics()
        self.adapters = Adapters(self.allocator)
        self.stores = Stores(
            self.allocator,
            self.ledger,
            engine,
            CircuitBreaker("stores", clock),
            self.metrics,
            self.adapters,
            block_size=block_size,
            slot_bytes=slot_bytes,
            step_tokens=step_tokens,
            store_answers=config.store_answers,
            clock=clock,
        )
        self.restores = Restores(
            self.allocator,
            self.ledger,
            engine,
            CircuitBreaker("restores", clock),
            self.metrics,
            block_size=block_size,
            slot_bytes=slot_bytes,
            first_part=amounts.first_part_blocks(slot_bytes // num_ranks),
        )
        path = config.record_trace
        self._recorder = None if path is None else TraceRecorder(Path(path), block_size)
        self._engine = engine
        self._admitted: dict[str, bool] = {}  # requests, and whether KV may be loaded for them once more
        self._local_tokens: dict[str, int] = {}  # of waiting requests: what the GPU has
        self._hints: dict[str, RequestHints] = {}  # of requests that have asked, until they are over
        self._fingerprint = fingerprint
        self._next = StepPlan(fingerprint)
        self._num_evicted_seen = 0
        self.metrics.show("pool_blocks", num_slots)
        self.metrics.show("pool_tokens", num_slots * block_size)
        self.metrics.show("pool_bytes", num_slots * slot_bytes)
        self._has_losses = False  # a job of the report at hand fell short, so something left the pool
        self._has_news = True  # something may have changed a figure since the last take_metrics

    # One step

    def offer(self, request: Request, num_local: int) -> Offer:
        """What the pool can add to the ``num_local`` leading tokens the GPU has. Asked again and again.

        No tokens yet means: another request's load is bringing the next block. Every load ends or is given
        up, so nobody waits for ever. Otherwise the scheduler looks for blocks for the request next.

        It changes three things. The request may become a follower of a restore, and what has landed of that
        is handed to the GPU's prefix cache. ``num_local`` is remembered for ``allocated``. Blocks held for
        requests that are over may be released.
        """
        if self.restores.still_waits(request.request_id, num_local // self.block_size):
            return COMING
        self._local_tokens[request.request_id] = num_local
        offer = self._offer(request, num_local)
        if offer.tokens is not None:
            self.stores.holds.give_way(request, num_local, offer.tokens)
        return offer

    def allocated(self, request: Request, num_external: int) -> None:
        """The scheduler admitted ``request`` and expects ``num_external`` tokens from us, maybe none."""
        request_id = request.request_id
        self.restores.went_on(request_id)
        num_local = self._local_tokens.pop(request_id, 0)
        self.stores.holds.was_given(request, num_local, num_external)
        may_store = self.adapters.may_store(request, num_local // self.block_size)
        if request_id in self._admitted:
            if may_store:
                self.stores.backlog.admit_again(request_id)
            else:
                self.stores.backlog.finish(request_id)
        else:
            self._admitted[request_id] = True
            if self.adapters.admit(request):
                self._let_go_of_adapter(request)
                may_store = False
            kind = self.stores.arrived(request, num_local)
            hints = self._hints_of(request)
            keep = hints.to_keep(self._clock())
            self.allocator.touch(request.block_hashes, keep)
            if may_store and hints.may_store(self.block_size) and not request.resumable:
                self.stores.admit(request, keep, hints.max_offload_tokens, kind)
        if not num_external:
            return
        positions = amounts.load_range(num_local, num_external, self.block_size)
        self._next.loads.append(self.restores.open(request, positions, self.stores.filled_by))

    def build_plan(self, output: Step) -> StepPlan:
        """Everything the workers are to do in this step."""
        if self.restores.tidy():
            self.stores.backlog.plan_anew()
        self._has_news |= self.allocator.tidy()
        plan, self._next = self._next, StepPlan(self._fingerprint)
        had_queue = self.stores.backlog.num_queued > 0
        plan.stores += self.stores.plan(output, len(self._admitted))
        self._has_news = self._has_news or bool(plan.stores or plan.loads or had_queue)
        return plan

    def receive(self, report: WorkerReport | None, invalid_block_ids: set[int]) -> None:
        """Jobs ended; ``invalid_block_ids`` are GPU blocks that some connector failed to fill."""
        if invalid_block_ids and not self.restores.are_filling(invalid_block_ids):
            self.stores.spoil()  # a sibling's load failed, and a step has computed on top of it
        if report is None:
            return
        self._has_news = True
        for job_id, job_report in report.jobs.items():
            progress = self.ledger.report(job_id, *job_report)
            if progress is not None:
                self._advance(progress)
        if self._has_losses:
            self._has_losses = False
            self.stores.backlog.plan_anew()

    def finish(self, request: Request) -> None:
        """``request`` is over, in whatever state; its blocks are freed right after this returns."""
        self._local_tokens.pop(request.request_id, None)
        self._hints.pop(request.request_id, None)
        self.adapters.finish(request.request_id)
        self.restores.forget(request.request_id)
        was_admitted = self._admitted.pop(request.request_id, None) is not None
        if self._recorder is not None and was_admitted:
            self._recorder.record(
                request.arrival_time,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.block_hashes,
            )
        self._next.stores += self.stores.finish(request)

    # Now and then

    def reset(self) -> None:
        """Forget all KV: weights may have changed. Nothing computed before this is ever stored."""
        self.allocator.reset()
        self.stores.reset()
        self._next.cancelled += self.restores.cancel()
        self._has_news = True

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: ends of jobs travel on steps, and so do the queue's stores.

        Not for jobs past their deadline, which would keep it from ever coming to rest or shutting down. The
        queue moves, or is given up when its time is over.
        """
        is_busy = len(self.ledger) > self.ledger.num_given_up or len(self.restores.carryover) > 0
        return is_busy or self.stores.backlog.num_queued > 0

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, and the gauges; nothing if nothing has happened."""
        if not (self._has_news or self.metrics.has_counts):
            return {}
        self._has_news = False
        self.metrics.count("evicted_blocks", self.allocator.num_evicted - self._num_evicted_seen)
        self._num_evicted_seen = self.allocator.num_evicted
        num_used = self.allocator.capacity - self.allocator.num_free
        self.metrics.show("pool_used_blocks", num_used)
        self.metrics.show("pool_used_tokens", num_used * self.block_size)
        self.metrics.show("jobs_in_flight", len(self.ledger))
        self.metrics.show("queued_blocks", self.stores.backlog.num_queued)
        self.metrics.show("stores_answers", self.stores.answers.is_open)
        self.metrics.show("stuck_jobs", self.ledger.num_given_up)
        self.metrics.show("paused", self.restores.breaker.is_outage or self.stores.breaker.is_outage)
        return self.metrics.take()

    def check_invariants(self) -> None:
        """All parts agree, and nobody is known who is not known here. O(pool); for tests."""
        for part in (self.allocator, self.ledger, self.adapters, self.stores, self.restores, self.metrics):
            part.check_invariants()
        if self._recorder is not None:
            self._recorder.check_invariants()
        gone = [request_id for request_id in self.stores.backlog if request_id not in self._admitted]
        assert not gone, f"blocks of {gone} may be stored, and they are not admitted"
        planned = [store.job_id for store in self._next.stores]
        planned += [part.job_id for load in self._next.loads for part in load.parts]
        over = [job_id for job_id in planned if job_id not in self.ledger]
        assert not over, f"jobs {over} are over before workers were told of them"

    def left_over(self) -> dict[str, object]:
        """What has not ended or is known of somebody, by name; nothing once all is over. For tests."""
        left = {
            "jobs": list(self.ledger),
            "requests": [*self._admitted, *self._local_tokens, *self._hints],
            "pins": self.allocator.num_pins,
            "owners of uncached blocks": self.allocator.num_owners,
        }
        left |= self.stores.left_over() | self.restores.left_over()
        return {name: each for name, each in left.items() if each}

    def close(self) -> None:
        """The engine shuts down."""
        if self._recorder is not None:
            self._recorder.close()

    # Private

    def _offer(self, request: Request, num_local: int) -> Offer:
        if num_local >= len(request.block_hashes) * self.block_size:
            return NOTHING[Why.GPU_HAS_ALL]
        if not self._admitted.get(request.request_id, True):
            return NOTHING[Why.FAILED]
        hints = self._hints_of(request)
        if not hints.may_load(self.block_size):
            return NOTHING[Why.UNWANTED]
        if not self.adapters.may_load(request):
            return NOTHING[Why.RELOADING]
        if self.restores.follow(request, num_local // self.block_size):
            return COMING
        if self.restores.carryover.has_drops:
            return NOTHING[Why.DROPPING]
        if not self.restores.breaker.allows:
            return NOTHING[Why.PAUSED]
        depth = self.allocator.resident_depth(request.block_hashes)
        num_tokens = amounts.loadable_tokens(
            depth, num_local, request.num_tokens, self.block_size, hints.max_load_tokens
        )
        if not num_tokens:
            return NOTHING[Why.ABSENT]
        num_stuck = self.ledger.num_stuck_blocks
        if not amounts.may_load(self._engine.num_blocks, num_stuck, num_tokens // self.block_size):
            return NOTHING[Why.STUCK]
        return Offer(num_tokens, Why.RESIDENT)

    def _let_go_of_adapter(self, request: Request) -> None:
        """``request`` has its adapter loaded again: KV of others under it is of old weights."""

        def is_meant(other: Request) -> bool:
            return self.adapters.share_one(request, other)

        self.stores.drop(is_meant)
        self._next.cancelled += self.restores.cancel(is_meant)
        self._has_news = True

    def _hints_of(self, request: Request) -> RequestHints:
        """Read once per request: it asks in every step while it waits."""
        hints = self._hints.get(request.request_id)
        if hints is None:
            hints = self._hints[request.request_id] = self._engine.hints(request)
        return hints

    def _advance(self, progress: Progress) -> None:
        job = progress.job
        if progress.fell_short or (progress.ended and job.num_copied < job.num_blocks):
            self._has_losses = True
        if not isinstance(job, LoadJob):
            self.stores.advance(job, progress)
            return
        request = job.restore.request
        if progress.fell_short and not request.is_finished():
            # The scheduler counts such a request among the prefills it reserves blocks for ever after, and
            # would have it wait for blocks beside its own if it were offered a second load.
            self._admitted[request.request_id] = False
        self.restores.advance(job, progress)
