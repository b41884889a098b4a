"""Stores: jobs that copy full GPU blocks down, from the backlog."""

from collections.abc import Callable
from typing import Any

from allocator import StorePlan
from evictor import KeepHints
from offload.messages import STORE, Order, Part
from offload.scheduler import amounts
from offload.scheduler.adapters import Adapters
from offload.scheduler.answers import AnswerReuse, Kind
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.checkpoints import Candidate, Checkpoints
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, State, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.groups import GpuBlocks
from offload.scheduler.holds import Holds
from offload.scheduler.store import Store

_ENDED_AT_ONCE = 16
"""Stores of requests that have ended which begin from one step to the next."""


class Stores:
    """The flow from the GPU into the pool.

    What there is to store, and when, is the backlog's. What an answer has beyond its last run is stored when
    the request ends. Where a store begins is asked of the allocator each time. The source blocks are held
    until their copy has ended.
    """

    route = STORE

    def __init__(
        self, common: Common, adapters: Adapters, *, step_tokens: int, store_answers: bool | None
    ) -> None:
        """Begin with none.

        Args:
            common: what all flows work with.
            adapters: told what is stored.
            step_tokens: tokens that a step computes at most.
            store_answers: whether to store more than prompts; None: learn whether that pays.
        """
        self.breaker = CircuitBreaker("stores", common.clock)
        self._common = common
        self._allocator = common.allocator
        self._ledger = common.ledger
        self._engine = common.engine
        self._groups = common.engine.groups
        self._metrics = common.metrics
        self._adapters = adapters
        self._block_size = common.block_size
        self.answers = AnswerReuse(store_answers)
        self._num_ended_left = _ENDED_AT_ONCE
        self.checkpoints = Checkpoints(common)
        self._drafts = common.engine.drafts
        self._tokens_per_step = 1 + self._drafts.num_tokens
        self.backlog = Backlog(
            common.allocator,
            common.clock,
            block_size=common.block_size,
            tokens_per_step=self._tokens_per_step,
        )
        self.holds = Holds(self.backlog, common, step_tokens=step_tokens)

    def arrived(self, request: Request, num_local: int) -> Kind:
        """The scheduler gave ``request`` blocks for the first time; returns the kind of its answer.

        ``num_local``: leading tokens that the GPU had for it.
        """
        if not self.answers.is_learning:
            return ""
        chain = self._engine.chain(request)
        num_prompt = min(request.num_prompt_tokens // self._block_size, len(chain))
        num_found = max(num_local // self._block_size, self._allocator.known_depth(chain, num_prompt))
        num_before = self.answers.num_returned
        kind = self.answers.arrived(chain, num_prompt, num_found)
        self._metrics.count("returned_answers", self.answers.num_returned - num_before)
        return kind

    def admit(
        self, request: Request, keep: KeepHints | None, max_tokens: int | None, kind: Kind = ""
    ) -> None:
        """What ``request`` computes may be stored.

        ``keep`` says how to keep it, ``max_tokens`` how many leading tokens may be stored, None: all;
        ``kind`` is that of its answer.
        """
        num_prompt_blocks = request.num_prompt_tokens // self._block_size
        max_blocks = None if max_tokens is None else max_tokens // self._block_size
        if max_blocks is not None:
            num_prompt_blocks = min(num_prompt_blocks, max_blocks)
        pending = Pending(
            request.request_id,
            request,
            self._engine.chain(request),
            num_prompt_blocks,
            keep,
            max_blocks,
            kind,
            self.answers.are_stored(kind),
        )
        self.backlog.admit(pending)

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        """What to store once this step has run; ``num_admitted`` requests have begun and are not over."""
        backlog, scheduled = self.backlog, step.num_scheduled_tokens
        for request_id in step.preempted_req_ids or ():
            preempted = backlog.get(request_id)
            is_back = preempted is not None and self._engine.state(preempted.request) is not State.PREEMPTED
            backlog.set_aside(request_id, is_back=is_back)
        self.holds.begin_step(step)
        self.checkpoints.begin_step(step)
        busy: list[str] = []
        if step.total_num_scheduled_tokens > len(scheduled):
            busy = [request_id for request_id, num in scheduled.items() if num > self._tokens_per_step]
        for due in backlog.due(busy):
            self._look(due, scheduled, has_turn=False)
        for due in backlog.turns():
            self._look(due, scheduled, has_turn=True)
        self._num_ended_left = _ENDED_AT_ONCE
        orders = [] if self.holds.is_short else self._store_ended()
        if self._groups.has_bags:
            for passing, candidate in self.checkpoints.take():  # in the next step their blocks are gone
                orders += self._open_checkpoint(passing, candidate)
        elif backlog.has_runs and self._may_store():
            for run in backlog.runs():
                pending = backlog.get(run.owner) if run.owner in scheduled else None
                if pending is not None and self._may_store():
                    orders += self._open(pending, run.start, run.stop)
        self.holds.end_step(step, busy, num_admitted)
        return orders

    def finish(self, request: Request) -> list[Order]:
        """What to store of a request that is over; its blocks are freed right after this returns.

        What has no copy yet is held, and stored now or in the next steps.
        """
        pending = self.backlog.finish(request.request_id)
        self.holds.finish(request.request_id, pending)
        if pending is None:
            return []
        tables = self._engine.tables(pending.request_id)
        num_there = self._groups.num_positions(tables) if tables else 0
        num_full = self._leave_out_answer(pending, min(self._num_full_at_end(pending), num_there))
        if self._groups.has_bags:
            return self._store_last(pending, num_full)
        if not num_full:
            return []
        start = self._allocator.known_depth(pending.chain, num_full)
        if start < pending.num_planned:
            self.holds.count_unstored(max(0, num_full - pending.num_planned), "cut_off")
        elif start < num_full:
            blocks = self._groups.prefix(tables, range(start, num_full))
            self._engine.hold(blocks)
            self.backlog.end(pending, start, blocks, self._groups.columns)
        orders = self._store_ended()
        self.holds.let_run()
        return orders

    def spoil(self) -> None:
        """Some GPU blocks hold no valid KV; which others were computed on top of them cannot be told."""
        self._spoil_jobs()
        self.backlog.spoil()
        self.holds.give_up("outage")

    def reset(self) -> list[int]:
        """Nothing computed before this is ever stored. Stores in flight go on, for the GPU's blocks."""
        self.backlog.clear()
        self.holds.give_up("reset")
        self.holds.drop()
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing computed before this for these requests is ever stored."""
        self.holds.release(self.backlog.drop(is_meant), "reset")
        self.holds.drop(is_meant)
        return []

    @property
    def is_busy(self) -> bool:
        """Whether blocks wait to be stored. They move, or are given up when their time is over."""
        return self.backlog.num_queued > 0

    @property
    def num_pins(self) -> int:
        """None: slots that are being filled need none."""
        return 0

    def advance(self, job: Job[Store], progress: Progress) -> None:
        """Take in what became of a store."""
        if progress.gave_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id, hangs=True)
        if progress.ended:
            self._end(job)
        elif progress.gave_up:
            self._allocator.abandon(job.task.plan)
            self.holds.count_unstored(self.holds.release_held(job), "outage")

    def check_invariants(self) -> None:
        """Every store has slots of its own, and no more of them begin in a step than may."""
        for part in (self.answers, self.backlog, self.holds, self.checkpoints):
            part.check_invariants()
        assert 0 <= self._num_ended_left <= _ENDED_AT_ONCE, f"{self._num_ended_left} may begin"
        num_held = sum(len(job.blocks) for job in self._ledger.of(self))
        assert num_held == self.holds.num_held, f"{num_held} blocks in jobs, {self.holds.num_held} are held"
        spoiled = [job for job in self._ledger.of(self) if job.task.is_spoiled and job.num_good]
        assert not spoiled, f"{spoiled} are spoiled, and have good blocks"
        num_filling = 0
        for job in self._ledger.of(self):
            slots = job.task.plan.all_slots
            fills = set(self._common.filled_by[slots].tolist())
            assert fills == {job.job_id}, f"job {job.job_id} fills slots {slots}, known of them is {fills}"
            num_filling += len(slots)
        assert num_filling <= self._allocator.num_filling, (
            f"stores fill {num_filling} slots, the allocator knows of {self._allocator.num_filling}"
        )

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        left = {"backlog": list(self.backlog), "queued blocks": self.backlog.num_queued}
        return left | self.holds.left_over()

    # Which blocks

    def _look(self, pending: Pending, scheduled: dict[str, int], *, has_turn: bool) -> None:
        num_scheduled = scheduled.get(pending.request_id)
        if num_scheduled is None:  # it waits for its KV, or for its turn
            self.backlog.look_later(pending)
            return
        pending.has_run = True
        request = pending.request
        num_unsettled = self._drafts.num_unsettled_tokens
        num_tokens = request.num_computed_tokens + num_scheduled - num_unsettled
        num_known = request.num_tokens - num_unsettled
        if not pending.stores_answer:
            num_known = min(num_known, request.num_prompt_tokens)
        num_full = amounts.storable_blocks(num_tokens, num_known, pending.num_storable, self._block_size)
        self.backlog.look(pending, num_tokens, num_full, has_turn=has_turn)
        if self._groups.has_bags:
            tokens = range(request.num_computed_tokens, request.num_computed_tokens + num_scheduled)
            is_chunk_end = has_turn or num_scheduled > self._tokens_per_step
            self.checkpoints.look(pending, tokens, num_full, is_chunk_end=is_chunk_end)

    def _num_full_at_end(self, pending: Pending) -> int:
        """Full blocks of a request that is over, whatever ended it.

        One that failed, or that waited for its KV, counts tokens as computed that nobody has computed. An
        aborted one counts those of steps that are still under way.
        """
        request = pending.request
        num_unconfirmed = request.num_output_placeholders
        state = self._engine.state(request)
        if state is not State.COMPLETED:
            if state is not State.ABORTED or not pending.has_run:
                return 0
            num_unconfirmed = request.num_in_flight_tokens
        return amounts.storable_blocks_at_finish(
            request.num_computed_tokens,
            num_unconfirmed,
            request.num_prompt_tokens,
            request.num_tokens,
            pending.num_storable,
            self._block_size,
            self._drafts.num_unsettled_tokens,
        )

    def _leave_out_answer(self, pending: Pending, num_full: int) -> int:
        """How many of the full blocks of a request that is over to store: without its answer, or with it."""
        num_prompt, answers = pending.num_prompt_blocks, self.answers
        if num_full <= num_prompt:
            return num_full
        answers.ended(pending.chain, num_prompt, pending.kind)
        self._metrics.count("answers", answers.is_learning)
        if answers.are_stored(pending.kind):
            return num_full
        if answers.is_learning:
            self.holds.count_unstored(max(0, num_full - max(num_prompt, pending.num_planned)), "unreturned")
        return num_prompt

    # Checkpoints

    def _store_last(self, pending: Pending, num_full: int) -> list[Order]:
        """Store a checkpoint at the end of a request that is over, if its windows still are there."""
        orders: list[Order] = []
        if num_full > pending.num_prompt_blocks and not self._groups.has_states:
            orders = self._open_checkpoint(pending, Candidate(num_full, is_inner=False, is_standing=False))
        self._allocator.close(pending.chain)
        return orders

    def _open_checkpoint(self, pending: Pending, candidate: Candidate) -> list[Order]:
        planned = self.checkpoints.plan(pending, candidate, self._limit()) if self._may_store() else None
        return [] if planned is None else [self._copy(pending, *planned)]

    # Jobs

    def _may_store(self) -> bool:
        return self.holds.num_holdable > 0 and self.breaker.allows

    def _open(self, pending: Pending, start: int, stop: int) -> list[Order]:
        """Store full blocks of a running request from position ``start`` on; as many as may be held now."""
        if start < pending.num_planned:
            self.backlog.was_evicted(pending)
            return []
        plan = self._allocator.plan_store(
            pending.chain, stop, self._limit() // self._groups.columns, pending.keep
        )
        if plan is None:
            self.backlog.declined(pending)
            return []
        self.backlog.planned(pending, plan.stop)
        return [self._copy(pending, plan, [])]

    def _store_ended(self) -> list[Order]:
        """Store what is first in the queue, as much as may be held now."""
        orders: list[Order] = []
        if self.backlog.is_overdue:
            self.holds.give_up("overdue")
        while self._num_ended_left and self._may_store():
            pending = self.backlog.first
            if pending is None:
                break
            self._num_ended_left -= 1
            orders += self._open_ended(pending)
        if self.breaker.is_outage:
            self.holds.give_up("outage")
        return orders

    def _open_ended(self, pending: Pending) -> list[Order]:
        """Store the leading blocks of the first in the queue, and give up what has become worthless."""
        stop = pending.stop
        known = self._allocator.known_depth(pending.chain, stop)
        if known < pending.start:  # what is before it has left the pool
            self._drop_first(stop - pending.start, "cut_off")
            return []
        if known > pending.start:  # another request has stored it
            self._drop_first(known - pending.start, None)
        limit = self._limit() // self._groups.columns
        plan = self._allocator.plan_store(pending.chain, stop, limit, pending.keep) if known < stop else None
        num_planned = len(plan.hashes) if plan is not None else 0
        orders = [] if plan is None else [self._begin(pending, plan, self.backlog.take(num_planned))]
        if known + num_planned < stop and num_planned < limit:
            self._drop_first(stop - pending.start, "not_admitted")
        return orders

    def _drop_first(self, num_positions: int, why: str | None) -> None:
        """Release positions of the first in the queue; nothing is lost if there is no reason ``why``."""
        self.holds.release(self.backlog.take(num_positions)[::-1], why)

    def _copy(self, pending: Pending, plan: StorePlan, bag: GpuBlocks) -> Order:
        """Store positions that a request has in its tables, and blocks for the bag of ``plan``."""
        blocks = self._groups.prefix(self._engine.tables(pending.request_id), range(plan.start, plan.stop))
        blocks = blocks + bag if bag else blocks
        self._engine.hold(blocks)
        return self._begin(pending, plan, blocks)

    def _begin(self, pending: Pending, plan: StorePlan, blocks: list[Any]) -> Order:
        """Copy these blocks, which are held for it, into the slots of ``plan``."""
        self._adapters.stored(pending.request)
        store = Store(plan, is_lasting=self._common.may_last(pending.request))
        job = self._ledger.open(self, store, len(blocks), blocks)
        self.holds.begin(job, pending)
        self.breaker.began(job.job_id)
        slots = plan.all_slots
        self._common.filled_by[slots] = job.job_id
        return Order(self.route, [Part(job.job_id, 0, len(blocks))], self._engine.ids(blocks), slots)

    def _spoil_jobs(self) -> None:
        """All stores in flight will end as failed. Which of them copied such blocks cannot be told."""
        for job in self._ledger.of(self):
            job.num_good = 0
            job.task.is_spoiled = True

    def _limit(self) -> int:
        """GPU blocks that a store may hold now. A trial that hangs costs its slots."""
        return self._groups.least if self.breaker.is_outage else self.holds.num_holdable

    def _end(self, job: Job[Store]) -> None:
        store = job.task
        num_left = self.holds.release_held(job)
        self.backlog.moved()
        if job.num_good == job.num_blocks:
            self._metrics.count("stored_bytes", job.num_good * self._common.slot_bytes)
            self.breaker.succeeded(job.job_id)
            if not self._allocator.commit(store.plan):
                self.holds.count_unstored(num_left, "reset" if store.is_dropped else "cut_off")
            elif store.is_lasting:
                self._common.note_kept(store.plan)
            return
        self._allocator.abort(store.plan)
        self.holds.count_unstored(num_left, "outage")
        if store.is_spoiled:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id)
