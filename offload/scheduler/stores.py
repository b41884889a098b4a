"""Stores: jobs that copy full GPU blocks down, from the backlog."""

from collections.abc import Callable
from typing import Any

from allocator import StorePlan
from evictor import KeepHints
from offload.config import OffloadConfig
from offload.messages import STORE, Order, Part
from offload.scheduler.adapters import Adapters
from offload.scheduler.answers import AnswerReuse, Kind
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.checkpoints import Candidate, Checkpoints
from offload.scheduler.common import Common
from offload.scheduler.ended import Ended
from offload.scheduler.engine import Request, State, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.groups import GpuBlocks
from offload.scheduler.hand_offs import HandOffs, Refusal
from offload.scheduler.holds import Holds
from offload.scheduler.later import Later
from offload.scheduler.storable import Storable
from offload.scheduler.store import Store


class Stores:
    """The flow from the GPU into the pool.

    What there is to store, and when, is the backlog's. What an answer has beyond its last run is stored when
    the request ends. Where a store begins is asked of the allocator each time. The source blocks are held
    until their copy has ended.

    What is handed off is *delivered*. Its stores come first, as many at once as there are, and take the place
    of anything that is neither pinned nor leased. What lacks a copy when the request ends is stored then, all
    of it at once. So nothing of it waits in the queue, which gives way to others.
    """

    route = STORE

    def __init__(
        self, common: Common, adapters: Adapters, config: OffloadConfig, *, step_tokens: int
    ) -> None:
        """Begin with none.

        Args:
            common: what all flows work with.
            adapters: told what is stored.
            config: whether more than prompts is stored, and what is handed off.
            step_tokens: tokens that a step computes at most.
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
        self.hand_offs = HandOffs(common, config.fleet)
        self.answers = AnswerReuse(config.store_answers)
        self.checkpoints = Checkpoints(common)
        self._tokens_per_step = 1 + common.engine.drafts.num_tokens
        self.backlog = Backlog(
            common.allocator,
            common.clock,
            block_size=common.block_size,
            tokens_per_step=self._tokens_per_step,
        )
        self.holds = Holds(self.backlog, common, step_tokens=step_tokens)
        self.later: Later | None = None
        if common.late is not None:
            self.later = Later(common, common.late, self.backlog, self.holds, step_tokens=step_tokens)
        self.ended = Ended(common, self.backlog, self.holds, self.breaker, self.later, self._begin)
        self._storable = Storable(common, self.backlog, self.holds, self.checkpoints, self.answers)

    def learn_answers(self, answers: AnswerReuse) -> None:
        """Learn from now on with that patience. For tests."""
        self.answers = self._storable.answers = answers

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
        self,
        request: Request,
        keep: KeepHints | None,
        max_tokens: int | None,
        kind: Kind = "",
        *,
        delivers: bool = False,
    ) -> None:
        """What ``request`` computes may be stored.

        ``keep`` says how to keep it, ``max_tokens`` how many leading tokens may be stored, None: all;
        ``kind`` is that of its answer; ``delivers``: its prompt is to be handed off.
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
            delivers=delivers,
        )
        self.backlog.admit(pending)

    def must_wait(self, request: Request, num_local: int, num_external: int) -> bool:
        """Whether a request waits for stores before it takes blocks for so many tokens that we have."""
        return self.later is not None and self.later.must_wait(request, num_local, num_external)

    def has_begun(self, request: Request, num_local: int, num_external: int) -> None:
        """It has blocks, perhaps admitted; the GPU had ``num_local`` tokens, ``num_external`` are loaded."""
        if self.later is not None:
            pending = self.backlog.get(request.request_id)
            num_storable = 0 if pending is None else pending.num_storable
            self.later.has_begun(request, num_local, num_external, num_storable)

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        """What to store once this step has run; ``num_admitted`` requests have begun and are not over."""
        backlog, scheduled = self.backlog, step.num_scheduled_tokens
        for request_id in step.preempted_req_ids or ():
            preempted = backlog.get(request_id)
            is_back = preempted is not None and self._engine.state(preempted.request) is not State.PREEMPTED
            backlog.set_aside(request_id, is_back=is_back)
            if self.later is not None and not is_back:
                self.later.preempted(request_id)
        self.holds.begin_step(step)
        self.checkpoints.begin_step(step)
        has_more = step.total_num_scheduled_tokens > len(scheduled)
        busy = [name for name, num in scheduled.items() if num > self._tokens_per_step] if has_more else []
        for due in backlog.due(busy):
            self._storable.look(due, scheduled, has_turn=False)
        for due in backlog.turns():
            self._storable.look(due, scheduled, has_turn=True)
        self.ended.begin_step()
        self.hand_offs.leases.expire()
        if self.later is not None:
            self.later.step(len(scheduled))
        is_pressed = self.later is None or self.later.is_pressed(num_admitted)
        full = self._full_now(scheduled) if is_pressed else []
        orders = self._open_all(full, delivers=True)
        if not self.holds.is_short:
            orders += self.ended.store()
        orders += self._open_all(full, delivers=False)
        self.holds.end_step(step, busy, num_admitted)
        return orders

    def finish(self, request: Request) -> list[Order]:
        """What to store of a request that is over; its blocks are freed right after this returns.

        What has no copy yet is held, and stored now or in the next steps.
        """
        pending = self.backlog.finish(request.request_id)
        if self.later is not None:
            self.later.finish(request)
        self.holds.finish(request.request_id, pending)
        is_handed_off = self.hand_offs.ends(request)
        if pending is None:
            if is_handed_off:  # reset since it began
                self.hand_offs.refuse(request, Refusal.NOT_STORED)
            return []
        tables = self._engine.tables(pending.request_id)
        num_there = self._groups.num_positions(tables) if tables else 0
        num_full = self._storable.num_full_at_end(pending)
        num_full = self._storable.without_answer(pending, min(num_full, num_there))
        orders: list[Order] = []
        if is_handed_off:
            plan = self.hand_offs.deliver(pending, num_full if num_there else None, self.breaker)
            orders = [] if plan is None else [self._copy(pending, plan, [])]
        if self._groups.has_bags:
            return orders + self._store_last(pending, num_full)
        if self.later is not None:
            self.later.has_ended(pending, self._groups.prefix(tables, range(num_full)) if num_full else [])
            return orders + self._store_queued()
        if not num_full:
            return orders
        start = self._allocator.known_depth(pending.chain, num_full)
        if start < pending.num_planned:
            pending.lose("cut_off", pending.num_planned)
            self.holds.count_unstored(max(0, num_full - pending.num_planned), "cut_off")
        elif start < num_full:
            blocks = self._groups.prefix(tables, range(start, num_full))
            self._engine.hold(blocks)
            self.backlog.end(pending, start, blocks, self._groups.columns)
        return orders + self._store_queued()

    def spoil(self) -> None:
        """Some GPU blocks hold no valid KV; which others were computed on top of them cannot be told."""
        self._spoil_jobs()
        self.backlog.spoil()
        self._forget_later()
        self.holds.give_up("outage")

    def reset(self) -> list[int]:
        """Nothing computed before this is ever stored. Stores in flight go on, for the GPU's blocks."""
        self.backlog.clear()
        if self.later is not None:
            self.later.reset()
        self.holds.give_up("reset")
        self.holds.drop()
        self.hand_offs.leases.reset()
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing computed before this for these requests is ever stored."""
        self.holds.release(self.backlog.drop(is_meant), "reset")
        self._forget_later(is_meant)
        self.holds.drop(is_meant)
        return []

    @property
    def is_busy(self) -> bool:
        """Whether blocks wait to be stored. They move, or are given up when their time is over."""
        return self.backlog.num_queued > 0

    @property
    def num_pins(self) -> int:
        """Those of requests that wait for stores. Slots that are being filled need none."""
        return 0 if self.later is None else self.later.num_pins

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
        parts = self.answers, self.backlog, self.holds, self.ended, self.checkpoints, self.hand_offs
        for part in parts:
            part.check_invariants()
        self._common.tokens.check_invariants()
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
        left |= {} if self.later is None else self.later.left_over()
        return left | self.holds.left_over() | self.hand_offs.left_over()

    def _store_queued(self) -> list[Order]:
        """Store of the queue what may be held now, and have it give way to those that run."""
        orders = self.ended.store()
        self.holds.let_run()
        return orders

    def _forget_later(self, is_meant: Callable[[Request], bool] | None = None) -> None:
        """What these requests have left on the GPU, or all, is not stored."""
        if self.later is not None:
            self.later.forget(is_meant)

    # Checkpoints

    def _store_last(self, pending: Pending, num_full: int) -> list[Order]:
        """Store a checkpoint at the end of a request that is over, if its windows still are there."""
        orders: list[Order] = []
        if num_full > pending.num_prompt_blocks and not self._groups.has_states:
            orders = self._open_checkpoint(pending, Candidate(num_full, is_inner=False, is_standing=False))
        self._allocator.close(pending.chain)
        return orders

    def _open_checkpoint(self, pending: Pending, candidate: Candidate) -> list[Order]:
        limit = self._limit(pending, by_link=candidate.is_inner)  # a prompt without its end is worth nothing
        if not (limit and self.breaker.allows):
            return []
        must = self.hand_offs.must_be_stored(pending, candidate.depth) and not candidate.is_inner
        planned = self.checkpoints.plan(pending, candidate, limit, must=must)
        return [] if planned is None else [self._copy(pending, *planned)]

    # Jobs

    def _full_now(self, scheduled: dict[str, int]) -> list[tuple[Pending, Any]]:
        """What of running requests could be stored: checkpoints that they pass, or runs of full blocks."""
        if self._groups.has_bags:
            return self.checkpoints.take()  # in the next step their blocks are gone
        if not (self.backlog.has_runs and (self._may_store() or len(self.hand_offs))):
            return []
        found = [(self.backlog.get(run.owner), run) for run in self.backlog.runs() if run.owner in scheduled]
        return [(pending, run) for pending, run in found if pending is not None]

    def _open_all(self, full: list[tuple[Pending, Any]], *, delivers: bool) -> list[Order]:
        """Of these, what is to be handed off, or the others."""
        orders: list[Order] = []
        for pending, each in full:
            if pending.delivers is not delivers:
                continue
            if self._groups.has_bags:
                orders += self._open_checkpoint(pending, each)
            elif self._may_store(pending):
                orders += self._open(pending, each.start, each.stop)
        return orders

    def _may_store(self, pending: Pending | None = None) -> bool:
        delivers = pending is not None and pending.delivers
        return (delivers or self.holds.leave_room) and self.breaker.allows

    def _open(self, pending: Pending, start: int, stop: int) -> list[Order]:
        """Store full blocks of a running request from position ``start`` on; as many as may be held now."""
        if start < pending.num_planned:
            self.backlog.was_evicted(pending)
            return []
        limit = self._limit(pending) // self._groups.columns
        must = self.hand_offs.must_be_stored(pending, stop)
        note = self._common.note_of(pending.request)
        plan = self._allocator.plan_store(pending.chain, stop, limit, pending.keep, must=must, note=note)
        if plan is None:
            self.backlog.declined(pending, start)
            return []
        self.backlog.planned(pending, plan.stop)
        return [self._copy(pending, plan, [])]

    def _copy(self, pending: Pending, plan: StorePlan, bag: GpuBlocks) -> Order:
        """Store positions that a request has in its tables, and blocks for the bag of ``plan``."""
        blocks = self._groups.prefix(self._engine.tables(pending.request_id), range(plan.start, plan.stop))
        blocks = blocks + bag if bag else blocks
        self._engine.hold(blocks)
        return self._begin(pending, plan, blocks)

    def _begin(self, pending: Pending, plan: StorePlan, blocks: list[Any]) -> Order:
        """Copy these blocks, which are held for it, into the slots of ``plan``."""
        self._adapters.stored(pending.request, pending.chain)
        store = Store(plan, is_lasting=self._common.may_last(pending.request))
        store.late = pending.request_id if pending.is_late else None
        job = self._ledger.open(self, store, len(blocks), blocks)
        self.holds.begin(job, pending)
        self.breaker.began(job.job_id)
        slots = plan.all_slots
        self._common.filled_by[slots] = job.job_id
        part = Part(job.job_id, 0, len(blocks))
        return Order(self.route, [part], self._engine.ids(blocks), slots, is_urgent=pending.delivers)

    def _spoil_jobs(self) -> None:
        """All stores in flight will end as failed. Which of them copied such blocks cannot be told."""
        for job in self._ledger.of(self):
            job.num_good = 0
            job.task.is_spoiled = True

    def _limit(self, pending: Pending | None = None, *, by_link: bool = True) -> int:
        """GPU blocks that a store may hold now."""
        if pending is not None and pending.delivers and not self.breaker.is_outage:
            return self._engine.num_blocks
        return self.holds.limit(self.breaker, by_link=by_link)

    def _end(self, job: Job[Store]) -> None:
        store = job.task
        num_left = self.holds.release_held(job)
        self.backlog.moved()
        if job.num_good == job.num_blocks:
            self._metrics.count("stored_bytes", job.num_good * self._common.slot_bytes)
            self.breaker.succeeded(job.job_id)
            if not self._allocator.commit(store.plan):
                self.holds.count_unstored(num_left, "reset" if store.is_dropped else "cut_off")
            else:
                self._common.committed(store.plan, is_lasting=store.is_lasting, late=store.late)
            return
        self._allocator.abort(store.plan)
        self.holds.count_unstored(num_left, "outage")
        if store.is_spoiled:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id)
