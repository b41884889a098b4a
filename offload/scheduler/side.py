"""The scheduler's side: decides what moves, and keeps the engine's blocks from reuse while it does.

One step of the engine, top to bottom::

    offer               a waiting request asks what the pool has for it; queued stores give way to it
    allocated           the scheduler gave it blocks: pin the slots, open a load
    build_plan          requests are scheduled: open stores of their full, uncached blocks
    receive             workers report: commit or abort stores, unpin loads, release blocks
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offload.config import OffloadConfig
from offload.messages import EPOCH_SHIFT, POOL, Fingerprint, JobReport, PoolFacts, StepPlan, WorkerReport
from offload.observe.metrics import Metrics
from offload.observe.recorder import recorder_of
from offload.scheduler import amounts
from offload.scheduler.adapters import Adapters
from offload.scheduler.adoption import adopt
from offload.scheduler.arrivals import Arrivals
from offload.scheduler.aside import Aside
from offload.scheduler.askers import Askers
from offload.scheduler.common import Common, Compute
from offload.scheduler.conservation import check_side, left_over_of
from offload.scheduler.costs import Costs
from offload.scheduler.engine import Engine, Request, Step
from offload.scheduler.flow import Below, Flow, Progress, Source
from offload.scheduler.gauges import Gauges
from offload.scheduler.hints import RequestHints
from offload.scheduler.jobs import JobLedger
from offload.scheduler.lasting import Lasting
from offload.scheduler.offer import ASIDE, COMING, NOTHING, Offer, Why
from offload.scheduler.other_sizes import OtherSizes
from offload.scheduler.pool import Sizes, late_stores, make_allocator, make_resizing
from offload.scheduler.restores import Restores
from offload.scheduler.spelling import SlotTokens
from offload.scheduler.stores import Stores
from offload.scheduler.turns import Turns
from offload.scheduler.weights import Weights
from offload.scheduler.why.notes import Notes
from offload.transfer_params import KVTransferParams


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
        block_bytes: int,
        step_tokens: int,
        num_ranks: int,
        record_events: bool,
        fingerprint: Fingerprint,
        clock: Callable[[], float] = time.monotonic,
        places: Sequence[Callable[[Common], Below]] = (),
        kept: Sequence[PoolFacts] = (),
        weights: Weights | None = None,
        peer: bytes | None = None,
        sizes: Sizes | None = None,
        compute: Compute = Compute(),  # noqa: B008 (immutable)
    ) -> None:
        """Begin with an empty pool, or with what one that outlived its engine has.

        Args:
            config: the user's.
            engine: whose blocks these are.
            block_size: tokens per block.
            num_slots: the least that any rank has.
            slot_bytes: bytes of a slot on all ranks, of which those count once that share it.
            block_bytes: bytes of a GPU block on all ranks.
            step_tokens: tokens that a step computes at most.
            num_ranks: ranks of the engine.
            record_events: whether to list what enters and leaves the pool.
            fingerprint: the engine's.
            clock: in seconds.
            places: make the flows of places below the pool.
            kept: what ranks have found in a pool that outlives its engine.
            weights: whether they have a name; others may say so.
            peer: by which other engines know this one, whose pool they read; None: they do not.
            sizes: that the pool may have later; None: it keeps its size.
            compute: how it computes.
        """
        self.block_size = block_size
        self.weights = Weights() if weights is None else weights
        self._clock = clock
        adopted = adopt(kept, num_slots, engine.groups) if kept else None
        late = late_stores(config, engine, num_slots, is_read=any((places, adopted, peer)), compute=compute)
        self.allocator = make_allocator(config, engine, num_slots, sizes, clock, record_events, adopted, late)
        self.ledger = JobLedger(num_ranks, 0 if adopted is None else adopted.epoch << EPOCH_SHIFT)
        self._lasting: Lasting | None = None
        if adopted is not None or peer is not None:
            self._lasting = Lasting(peer, outlives=adopted is not None)
        self.metrics = Metrics()
        filled_by = adopted.generations if adopted else np.full(self.allocator.num_slots, -1, np.int64)
        parts = self.allocator, self.ledger, engine, self.metrics
        self._common = common = Common(
            *parts,
            clock,
            block_size,
            slot_bytes,
            block_bytes,
            filled_by=filled_by,
            arrivals=(arrivals := Arrivals(self.allocator, int(engine.num_blocks * config.fetch_gpu_share))),
            costs=(costs := Costs(clock, step_tokens)),
            tokens=SlotTokens(filled_by, block_size),
            notes=(notes := Notes(parts, clock, block_size, costs, arrivals.fetched, has_below=bool(places))),
            lasting=self._lasting,
            record_events=record_events,
            late=late,
        )
        if adopted is not None:
            adopted.into(self.allocator)
            self.metrics.show("adopted_blocks", adopted.num_slots)
        self.costs, self.notes = costs, notes
        self.adapters = Adapters(self.allocator, engine)
        self.askers = Askers(self.metrics)
        self.stores = Stores(common, self.adapters, config, step_tokens=step_tokens)
        first_part = amounts.first_part_blocks(block_bytes // num_ranks)
        self.restores = Restores(common, config.restore_when, first_part=first_part, step_tokens=step_tokens)
        self.aside = Aside(common, self.restores.choices, step_tokens)
        self.flows: list[Flow[Any]] = [self.restores, self.stores]
        self._sources: list[Source] = []
        self.below: list[Below] = []
        """Places below the pool, in the order in which they are asked."""
        for make_flows in places:
            below = make_flows(common)
            self.below.append(below)
            self.flows += below.flows
            self._sources += below.sources
        self._sources.append(self.restores)
        assert len({flow.route.label for flow in self.flows}) == len(self.flows), "two flows have one route"
        self._recorder = recorder_of(config.record_trace, block_size)
        self._engine = engine
        self._turns = Turns(self.allocator, engine)
        self._local_tokens: dict[str, int] = {}  # of waiting requests: what the GPU has
        self._hints: dict[str, RequestHints] = {}  # of requests that have asked, until they are over
        self._fingerprint = fingerprint
        self._next = StepPlan(fingerprint)
        self._other_sizes = OtherSizes.of(common, self.stores.answers, config)
        self._gauges = Gauges(common, self.stores, self.flows, self._other_sizes)
        self._resizing = make_resizing(common, config, sizes, num_slots, num_ranks, self._other_sizes.resized)
        self._is_ending = False  # the engine shuts down, and tiers know
        self._has_losses = False  # a job of the report at hand fell short, so something left the pool
        self._has_news = True  # something may have changed a figure since the last take_metrics

    # One step

    def arrived(self, request: Request) -> None:
        """``request`` waits for its turn; what it will ask for may be brought nearer meanwhile."""
        self._name_weights(is_last=False)
        self.aside.arrived(request)
        self.notes.arrived(request)
        self.stores.hand_offs.arrived(request)
        self.restores.choices.arrived(request)
        if len(self._sources) > 1 and not self.restores.choices.is_off and self.adapters.may_load(request):
            hints = self._hints_of(request)
            if hints.may_load(self.block_size):
                for source in self._sources:
                    source.arrived(request, hints)

    def offer(self, request: Request, num_local: int) -> Offer:
        """What the pool can add to the ``num_local`` leading tokens the GPU has. Asked again and again.

        No tokens yet means: another request's load is bringing the next block, or others go first. Every load
        ends or is given up, so nobody waits for ever. Otherwise the scheduler looks for its blocks next.

        It changes four things. The request may become a follower of a restore, and what has landed of that
        is handed to the GPU's prefix cache. ``num_local`` is remembered for ``allocated``. Blocks held for
        requests that are over may be released. The engine may be told to end a step at a checkpoint.
        """
        self._name_weights(is_last=True)
        if self.restores.still_waits(request.request_id, num_local // self.block_size):
            return COMING
        if self.aside.asked(request.request_id):
            return ASIDE
        self._local_tokens[request.request_id] = num_local
        offer = self._offer(request, num_local)
        if offer.tokens is not None and self.aside.must(request, num_local, offer):
            offer = ASIDE
        if offer.tokens and self.stores.must_wait(request, num_local, offer.tokens):
            offer = COMING
        self.notes.asked(request, num_local, offer)
        if offer.tokens is not None:
            self.stores.holds.give_way(request, num_local, offer.tokens)
            if self._engine.groups.has_states:
                self.stores.checkpoints.prepare(request, self._hints_of(request).max_offload_tokens)
        return offer

    def allocated(self, request: Request, num_external: int) -> None:
        """The scheduler admitted ``request`` and expects ``num_external`` tokens from us, maybe none."""
        request_id = request.request_id
        has_waited = self.restores.went_on(request_id)
        num_local = self._local_tokens.pop(request_id, 0)
        self.aside.admitted(request, num_local, num_external, has_waited=has_waited)
        self.restores.choices.admitted(request, num_local, num_external)
        self.stores.holds.was_given(request, num_local, num_external)
        may_store = self.adapters.may_store(request, num_local // self.block_size)
        hints = self._hints_of(request)
        self.notes.admitted(request, num_local, num_external, has_waited=has_waited, hints=hints)
        if request_id in self._turns:
            if may_store:
                self.stores.backlog.admit_again(request_id)
            elif (pending := self.stores.backlog.finish(request_id)) is not None:
                self.allocator.close(pending.chain)
        else:
            if self.adapters.admit(request):
                self._let_go_of_adapter(request)
                may_store = False
            self._other_sizes.admitted(request)
            self._common.count_prompt(request.num_prompt_tokens, num_local)
            kind = self.stores.arrived(request, num_local)
            self._turns.begin(request, keep := hints.to_keep(self._clock()))
            delivers = self.stores.hand_offs.begin(request, hints, may_store=may_store)
            if may_store and hints.may_store(self.block_size) and not request.resumable:
                self.stores.admit(request, keep, hints.max_offload_tokens, kind, delivers=delivers)
            self.notes.stores(request, self.stores.backlog.get(request_id), hints, may_store=may_store)
        if not has_waited:
            self.stores.has_begun(request, num_local, num_external)
        if not num_external:
            return
        positions = amounts.load_range(num_local, num_external, self.block_size)
        self._next.orders.append(order := self.restores.open(request, positions))
        self.notes.opened(order)

    def build_plan(self, step: Step) -> StepPlan:
        """Everything the workers are to do in this step."""
        self._name_weights(is_last=step.total_num_scheduled_tokens > 0)
        self.allocator.departures.now = self._clock()
        self.aside.end_step()
        if self.restores.tidy():
            self.stores.backlog.plan_anew()
        self._has_news |= self.allocator.tidy()
        self._other_sizes.step()
        plan, self._next = self._next, StepPlan(self._fingerprint)
        num_tokens = step.total_num_scheduled_tokens
        plan.timed = self.costs.prefill.begin(num_tokens, lambda: self._engine.mean_depth(step))
        plan.resizes = self._resizing.step()
        had_queue = self.stores.backlog.num_queued > 0
        orders = [order for flow in self.flows for order in flow.plan(step, len(self._turns))]
        # what fills the pool goes first: what was opened in this step may follow it
        plan.orders = sorted([*plan.orders, *orders], key=lambda order: order.route.target != POOL)
        self._has_news = self._has_news or bool(plan.orders or had_queue)
        if self._lasting is not None:
            self._lasting.tell(plan)
        return plan

    def receive(self, report: WorkerReport | None, invalid_block_ids: set[int]) -> None:
        """Jobs ended; ``invalid_block_ids`` are GPU blocks that some connector failed to fill."""
        self.costs.prefill.end(0 if report is None else report.timed)
        if invalid_block_ids and not self.restores.are_filling(invalid_block_ids):
            self.stores.spoil()  # a sibling's load failed, and a step has computed on top of it
        if report is None:
            return
        self._has_news = True
        self.stores.hand_offs.leases.release(report.released)
        self.askers.hear(report.askers, report.served_bytes)
        self._resizing.hear(report.resized)
        for below in self.below if report.peers else ():
            below.hear(report.peers)
        for job_id, job_report in report.jobs.items():
            sound, reason = job_report.is_sound, job_report.reason
            progress = self.ledger.report(job_id, *job_report[:3], sound, reason)
            if progress is not None:
                self._advance(progress, job_report)
        if self._has_losses:
            self._has_losses = False
            self.stores.backlog.plan_anew()

    def finish(self, request: Request) -> KVTransferParams | None:
        """``request`` is over, in whatever state; its blocks are freed next. What its client is told."""
        self._local_tokens.pop(request.request_id, None)
        self._hints.pop(request.request_id, None)
        self.aside.finish(request.request_id)
        self.adapters.finish(request.request_id)
        if self._recorder is not None and request.request_id in self._turns:
            counts = request.num_prompt_tokens, request.num_output_tokens
            ended = self._engine.chain(request), self._turns.ending(request)
            self._recorder.record(request.arrival_time, *counts, *ended)
        for flow in self.flows:
            self._next.orders += flow.finish(request)
        self._other_sizes.finish(request, self._turns.end(request))
        told = self.stores.hand_offs.take_answer()
        self.notes.finished(request, told)
        return told

    # Now and then

    def reset(self) -> None:
        """Forget all KV: weights may have changed. Nothing computed before this is ever stored."""
        self.allocator.reset()
        self._other_sizes.reset()
        self.notes.reset()
        if self._lasting is not None:
            self._lasting.reset()
        for flow in self.flows:
            self._next.cancelled += flow.reset()
        self.weights.reset(self._engine.num_cached_blocks)
        self._has_news = True

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: ends of jobs travel on steps, and so do the queue's stores.

        Not for jobs past their deadline, which would keep it from ever coming to rest or shutting down. The
        queue moves, or is given up when its time is over. When the engine begins to shut down, tiers are
        told: they have something to do for a while.
        """
        if self.below and not self._is_ending and self._engine.is_ending():
            self._is_ending = True
            for below in self.below:
                if below.ending is not None:
                    below.ending()
        is_moving = len(self.ledger) > self.ledger.num_given_up
        is_moving = is_moving or (self._resizing.is_moving and not self._engine.is_ending())
        is_moving = is_moving or (self._lasting is not None and self._lasting.has_news)
        return is_moving or any(flow.is_busy for flow in self.flows)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, and the gauges; nothing if nothing has happened."""
        if not (self._has_news or self.metrics.has_counts):
            return {}
        self._has_news = False
        return self._gauges.take()

    def check_invariants(self) -> None:
        """All parts agree, and nobody is known who is not known here. O(pool); for tests."""
        check_side(self)
        num_pins = sum(flow.num_pins for flow in self.flows)
        assert num_pins == self.allocator.num_pins, f"{self.allocator.num_pins} pins, {num_pins} known"

    def left_over(self) -> dict[str, object]:
        """What has not ended or is known of somebody, by name; nothing once all is over. For tests."""
        return left_over_of(self)

    def close(self) -> None:
        """The engine shuts down."""
        if self._recorder is not None:
            self._recorder.close()

    # Private

    def _offer(self, request: Request, num_local: int) -> Offer:
        if num_local >= len(self._engine.chain(request)) * self.block_size:
            return NOTHING[Why.GPU_HAS_ALL]
        hints = self._hints_of(request)
        if not hints.may_load(self.block_size):
            return NOTHING[Why.UNWANTED]
        if not self.adapters.may_load(request):
            return NOTHING[Why.RELOADING]
        offer = self.restores.early_offer(request, num_local)
        if offer is not None:
            return offer
        for source in self._sources:
            offer = source.offer(request, num_local, hints)
            if offer is not None:
                follows = self.restores.offer
                return follows(request, num_local, hints, offer.stop) if offer.stop else offer
        return NOTHING[Why.ABSENT]

    def _name_weights(self, *, is_last: bool) -> None:
        """What was computed with weights of that name is there again, before anybody asks."""
        if suffix := self.weights.take(is_last=is_last):
            if self._lasting is not None:
                self._lasting.name_weights(suffix)
            for below in self.below:
                below.name_weights(suffix)

    def _let_go_of_adapter(self, request: Request) -> None:
        """``request`` has its adapter loaded again: KV of others under it is of old weights."""
        for flow in self.flows:
            self._next.cancelled += flow.drop(lambda other: self.adapters.share_one(request, other))
        self._has_news = True

    def _hints_of(self, request: Request) -> RequestHints:
        """Read once per request: it asks in every step while it waits."""
        hints = self._hints.get(request.request_id)
        if hints is None:
            hints = self._hints[request.request_id] = self._engine.hints(request)
        return hints

    def _advance(self, progress: Progress, report: JobReport) -> None:
        job = progress.job
        self._common.account(job, report, has_ended=progress.ended)
        if progress.fell_short or (progress.ended and job.num_good < job.num_blocks):
            self._has_losses = True
            if job.flow is self.restores:
                self.aside.failed(job.task.restore.request.request_id)
        job.flow.advance(job, progress)
        if progress.ended and job.flow is self.restores and not job.task.restore.parts_left:
            self.notes.restored(job.task.restore)
