"""Stores, backlog and holds over an engine in memory: no full block is lost without being counted."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import CpuOffloadingBlockAllocator
from offload.config import OffloadConfig
from offload.observe.metrics import METRICS, Metrics
from offload.scheduler.adapters import Adapters
from offload.scheduler.arrivals import Arrivals
from offload.scheduler.common import Common
from offload.scheduler.costs import Costs
from offload.scheduler.engine import State
from offload.scheduler.flow import Job
from offload.scheduler.jobs import JobLedger
from offload.scheduler.spelling import SlotTokens
from offload.scheduler.store import Store
from offload.scheduler.stores import Stores
from offload.scheduler.why.notes import Notes
from offload.testing.memory_engine import Kv, MemoryEngine, MemoryRequest, MemoryStep
from tests.strategies import thorough

BLOCK = 2
UNSTORED = [spec.name for spec in METRICS if spec.name.startswith("unstored_")]


class StoresMachine(RuleBasedStateMachine):
    """Requests share nothing, and the pool is large, so what is missing at the end can be counted."""

    @initialize(num_blocks=st.sampled_from([10, 30]), run=st.integers(1, 3), is_calm=st.booleans())
    def make(self, num_blocks: int, run: int, is_calm: bool) -> None:
        self.now = 0.0
        self.is_calm = is_calm
        self.engine = MemoryEngine(num_blocks, BLOCK)
        self.allocator = CpuOffloadingBlockAllocator(600)
        self.ledger, self.metrics = JobLedger(1), Metrics()
        fills = np.zeros(self.allocator.capacity, dtype=np.int64)
        arrivals = Arrivals(self.allocator, self.engine.num_blocks)
        metrics, costs = self.metrics, Costs(lambda: self.now, 1000)
        common = Common(
            self.allocator,
            self.ledger,
            self.engine,
            metrics,
            lambda: self.now,
            BLOCK,
            1,
            1,
            fills,
            arrivals,
            costs,
            SlotTokens(fills, BLOCK),
            Notes(
                (self.allocator, self.ledger, self.engine, metrics),
                lambda: self.now,
                BLOCK,
                costs,
                arrivals.fetched,
            ),
        )
        adapters = Adapters(self.allocator, self.engine)
        self.stores = Stores(common, adapters, OffloadConfig(cpu_gib=1), step_tokens=64)
        self.stores.backlog.answer_run, self.stores.backlog.answer_interval = run, 2
        self.running: list[MemoryRequest] = []
        self.preempted: list[MemoryRequest] = []
        self.just_preempted: set[str] = set()
        self.full: list[tuple[MemoryRequest, int]] = []
        self.num_sent = 0

    # Requests

    @precondition(lambda self: self.num_sent < 30)
    @rule(num_prompt=st.integers(1, 9), num_answer=st.integers(1, 9))
    def send(self, num_prompt: int, num_answer: int) -> None:
        """It asks once, and goes away if there are too few blocks."""
        prompt = [1000 * self.num_sent + index for index in range(num_prompt)]
        request = MemoryRequest(f"r{self.num_sent}", prompt, [7] * num_answer, BLOCK)
        self.num_sent += 1
        if self._is_given(request, num_prompt + num_answer):
            self.running.append(request)
            self.stores.admit(request, None, None)
        self.step(1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.preempted.append(request)
        self.just_preempted.add(request.request_id)
        request.state, request.num_computed_tokens = State.PREEMPTED, 0
        self.engine.take_back(request.request_id)

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self) -> None:
        """In the step that tells of the preemption, or later."""
        request = self.preempted[0]
        if self._is_given(request, request.num_tokens + 9):
            self.preempted.remove(request)
            self.running.append(request)
            request.state = State.OTHER
            self.stores.backlog.admit_again(request.request_id)
        self.step(4)

    @precondition(lambda self: self.running or self.preempted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([*self.running, *self.preempted]))
        (self.running if request in self.running else self.preempted).remove(request)
        self._finish(request, State.ABORTED)

    @rule(tokens=st.sampled_from([1, 3, 9]))
    def step(self, tokens: int) -> None:
        """Everybody computes so many tokens at most."""
        self.now += 0.01
        lacking = {request: request.num_tokens - request.num_computed_tokens for request in self.running}
        scheduled = {request.request_id: min(num, tokens) for request, num in lacking.items()}
        step = MemoryStep(scheduled, frozenset(self.just_preempted))
        self.just_preempted.clear()
        self.stores.plan(step, len(self.running) + len(self.preempted))
        for request in list(self.running):
            self.engine.compute(request, scheduled[request.request_id])
            if request.num_computed_tokens == request.num_tokens:
                request.append()
                if request.is_answered:
                    self.running.remove(request)
                    self._finish(request, State.COMPLETED)

    @rule(seconds=st.sampled_from([0.3, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # Jobs

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        job = self._drawn(data)
        self._report(job, 1, 0 if job.given_up else job.num_blocks)

    @precondition(lambda self: len(self.ledger) and not self.is_calm)
    @rule(data=st.data())
    def fall_short(self, data: st.DataObject) -> None:
        job = self._drawn(data)
        self._report(job, 1, data.draw(st.integers(0, job.num_blocks - 1)))

    @precondition(lambda self: len(self.ledger) and not self.is_calm)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        self._report(self._drawn(data), 0, 0)

    @precondition(lambda self: not self.is_calm)
    @rule(what=st.sampled_from(["spoil", "reset", "drop", "lose", "nothing", "nothing"]))
    def go_wrong(self, what: str) -> None:
        match what:
            case "spoil":
                self.stores.spoil()
            case "reset":
                self.allocator.reset()
                self.stores.reset()
            case "drop":
                self.stores.drop(lambda request: int(request.request_id[1:]) % 2 == 0)
            case "lose":
                self.stores.backlog.plan_anew()

    # What must hold

    @invariant()
    def agrees(self) -> None:
        for part in (self.engine, self.allocator, self.ledger, self.metrics, self.stores):
            part.check_invariants()
        backlog = self.stores.backlog
        owned = self.engine.owners(backlog.queued_blocks(), *(job.blocks for job in self.ledger))
        for block_id in range(self.engine.num_blocks):
            held = self.engine.num_holds(block_id)
            assert held == owned[block_id], f"block {block_id} is held {held} times, by {owned[block_id]}"
        for job in self.ledger.of(self.stores):
            assert job.task.is_spoiled or not job.blocks or self._is_right(job), (
                f"{job} copies other KV: {job.blocks}"
            )

    def teardown(self) -> None:
        """Everybody ends; then nothing is held, and what is missing was counted."""
        if not hasattr(self, "stores"):
            return
        for request in [*self.running, *self.preempted]:
            self._finish(request, State.ABORTED)
        self.running, self.preempted = [], []
        for _ in range(600):
            if not (len(self.ledger) or self.stores.backlog.num_queued):
                break
            for job in list(self.ledger.of(self.stores)):
                self._report(job, 1, 0 if job.given_up else job.num_blocks)
            self.now += 1.0
            self.step(1)
            self.agrees()
        left = {name: each for name, each in self.stores.left_over().items() if each}
        assert not left, f"left are {left}"
        assert self.engine.num_free == self.engine.num_blocks
        assert self.allocator.num_free + self.allocator.num_resident == self.allocator.capacity
        if self.is_calm:
            values = self.metrics.take()
            counted = sum(values.get(name, 0) for name in UNSTORED)
            missing = {
                request: num - self.allocator.resident_depth(request.block_hashes)
                for request, num in self.full
            }
            lost = sum(max(0, num) for num in missing.values())
            assert lost == counted, (
                f"{lost} full blocks are not in the pool, counted are {counted}: {missing}"
            )

    # Helpers

    def _is_given(self, request: MemoryRequest, num_tokens: int) -> bool:
        self.stores.holds.give_way(request, 0, 0)
        if not self.engine.give(request, num_tokens):
            return False
        self.stores.holds.was_given(request, 0, 0)
        return True

    def _finish(self, request: MemoryRequest, state: State) -> None:
        has_run = request.num_computed_tokens > 0
        request.state = state
        if has_run:
            self.full.append((request, request.num_computed_tokens // BLOCK))
        self.stores.finish(request)
        self.engine.take_back(request.request_id)

    def _report(self, job: Job[Store], num_ranks: int, num_good: int) -> None:
        progress = self.ledger.report(job.job_id, num_ranks, num_good, not num_ranks)
        assert progress is not None
        self.stores.advance(job, progress)

    def _is_right(self, job: Job[Store]) -> bool:
        """As far as its blocks are computed: those of this step are not yet."""
        kept: list[Any] = [block.kv for block in job.blocks]
        return kept == [Kv(each, 0) for each in job.task.plan.hashes]

    def _drawn(self, data: st.DataObject) -> Job[Store]:
        job: Job[Store] = data.draw(st.sampled_from(list(self.ledger.of(self.stores))))
        return job


TestStoresMachine = StoresMachine.TestCase
TestStoresMachine.settings = thorough(80, steps=40)


def test_blocks_that_the_queue_gives_up_are_free() -> None:
    machine = StoresMachine()
    machine.make(num_blocks=30, run=1, is_calm=True)
    machine.stores.breaker.failed("a store", hangs=True)
    machine.send(num_prompt=9, num_answer=1)
    machine.step(tokens=9)
    assert not (machine.running or len(machine.ledger))
    assert machine.engine.num_free == 30


def test_what_was_in_flight_when_a_sibling_failed_is_not_kept() -> None:
    machine = StoresMachine()
    machine.make(num_blocks=30, run=1, is_calm=True)
    machine.send(num_prompt=9, num_answer=9)
    machine.step(tokens=9)
    jobs = list(machine.ledger.of(machine.stores))
    assert jobs
    machine.stores.spoil()
    for job in jobs:
        machine._report(job, 1, job.num_blocks)
    assert machine.allocator.num_resident == 0
    assert "failed_jobs" not in machine.metrics.take()
    assert machine.stores.breaker._num_failures == 0, "it says nothing about stores"
