"""Restores over an engine in memory, beside a model that looks at every restore for every question."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import CpuOffloadingBlockAllocator
from offload.observe.metrics import Metrics
from offload.restore_config import RestoreWhen
from offload.scheduler.arrivals import Arrivals
from offload.scheduler.common import Common
from offload.scheduler.costs import Costs
from offload.scheduler.engine import State
from offload.scheduler.flow import Job
from offload.scheduler.hints import RequestHints
from offload.scheduler.jobs import JobLedger
from offload.scheduler.offer import NOTHING, Offer, Why
from offload.scheduler.restore import LoadPart, Restore
from offload.scheduler.restores import Restores
from offload.scheduler.spelling import SlotTokens
from offload.scheduler.why.notes import Notes
from offload.testing.memory_engine import Kv, MemoryEngine, MemoryRequest
from tests.strategies import thorough

LENGTH = 12
"""Blocks of one token in every chain of the pool. All share the first three."""


def tokens_of(chain: int) -> list[int]:
    return [0, 1, 2, *(100 * chain + index for index in range(3, LENGTH))]


class RestoresMachine(RuleBasedStateMachine):
    """Requests ask until they have blocks. Parts end well, fall short, or hang and end late."""

    @initialize(
        first_part=st.integers(1, 4), at_once=st.sampled_from([1, 2, 512]), work=st.sampled_from([1, 1 << 15])
    )
    def make(self, first_part: int, at_once: int, work: int) -> None:
        self.engine = MemoryEngine(100, 1)
        self.allocator = CpuOffloadingBlockAllocator(60)
        self.ledger = JobLedger(1)
        fills = np.zeros(self.allocator.capacity, dtype=np.int64)
        arrivals = Arrivals(self.allocator, self.engine.num_blocks)
        metrics, costs = Metrics(), Costs(lambda: 0.0, 1000)
        common = Common(
            self.allocator,
            self.ledger,
            self.engine,
            metrics,
            lambda: 0.0,
            1,
            1,
            1,
            fills,
            arrivals,
            costs,
            SlotTokens(fills, 1),
            Notes(
                (self.allocator, self.ledger, self.engine, metrics), lambda: 0.0, 1, costs, arrivals.fetched
            ),
        )
        self.restores = Restores(common, RestoreWhen.ALWAYS, first_part=first_part, step_tokens=64)
        self.breaker = self.restores.breaker
        self.restores.shared_at_once, self.restores.carryover.step_work = at_once, work
        self.restores.tidy()
        self.waiting: list[MemoryRequest] = []
        self.failed: set[str] = set()
        self.num_sent = 0

    # Requests

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(chains=st.lists(st.integers(0, 2), min_size=1, max_size=3), length=st.sampled_from([3, 5, 12]))
    def send(self, chains: list[int], length: int) -> None:
        """They ask at once; the pool has all of their KV, unless it was just lost."""
        for chain in chains:
            request = MemoryRequest(f"r{self.num_sent}", tokens_of(chain)[:length], [7], 1)
            self.num_sent += 1
            self.waiting.append(request)
            self._fill(tokens_of(chain))
            self._ask(request)

    @rule()
    def step(self) -> None:
        """Everybody asks, and what was carried over goes on."""
        for request in list(self.waiting):
            self._ask(request)
        self.restores.tidy()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """One that loads keeps its blocks until its restore has ended."""
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        is_loading = any(restore.request is request and not restore.was_stuck for restore in self.restores)
        request.state = State.ABORTED
        self.restores.finish(request)
        if not is_loading:
            self.engine.take_back(request.request_id)

    # Jobs

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        job = self._drawn(data)
        self._end(job, 0 if job.task.restore.is_cancelled else job.num_blocks)

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def fall_short(self, data: st.DataObject) -> None:
        job = self._drawn(data)
        self._end(job, data.draw(st.integers(0, job.num_blocks - 1)))

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        self._hang(self._drawn(data))

    @precondition(lambda self: len(self.ledger))
    @rule(chain=st.sampled_from([0, 1, 2, None]))
    def cancel(self, chain: int | None) -> None:
        """A reset, or an adapter that is loaded again."""

        def is_meant(request: Any) -> bool:
            return chain is None or request.block_hashes[-1] in self._hashes(chain)

        wanted = [
            job.job_id
            for job in self.ledger.of(self.restores)
            if job.task.restore.is_cancelled or is_meant(job.task.restore.request)
        ]
        assert self.restores.drop(is_meant) == wanted
        if chain is None:
            self.allocator.reset()

    # What must hold

    @invariant()
    def agrees(self) -> None:
        for part in (self.engine, self.allocator, self.ledger, self.restores):
            part.check_invariants()
        assert self.restores.num_pins == self.allocator.num_pins
        owned = self.engine.owners(*(job.blocks for job in self.ledger))
        for block_id in range(self.engine.num_blocks):
            held = self.engine.num_holds(block_id)
            assert held == owned[block_id], f"block {block_id} is held {held} times, by {owned[block_id]}"
        for prefix_hash, block in self.engine._cached.items():
            assert block.kv == Kv(prefix_hash, 0), f"{block} is shared, and has {block.kv}"

    def teardown(self) -> None:
        """Once all jobs have ended nobody waits for long, and nothing is left."""
        if not hasattr(self, "restores"):
            return
        for job in list(self.ledger.of(self.restores)):
            self._end(job, 0 if job.task.restore.is_cancelled or job.given_up else job.num_blocks)
        for _ in range(LENGTH * self.num_sent + 60):
            if not (self.waiting or len(self.ledger) or len(self.restores.carryover)):
                break
            self.step()
            self.agrees()
            for job in list(self.ledger.of(self.restores)):
                self._end(job, job.num_blocks)
        assert not self.waiting, f"{self.waiting} wait for ever"
        left = {name: each for name, each in self.restores.left_over().items() if each}
        assert not left and not self.allocator.num_pins, f"left are {left}, {self.allocator.num_pins} pins"
        assert self.allocator.num_free + self.allocator.num_resident == self.allocator.capacity
        assert self.engine.num_free == self.engine.num_blocks

    # Helpers

    def _ask(self, request: MemoryRequest) -> None:
        """As the scheduler's side answers a request, which goes on if it has to wait for nothing."""
        if any(restore.request is request for restore in self.restores):
            return
        if request.state is State.WAITS_FOR_KV:
            self.restores.went_on(request.request_id)
            if request.request_id not in self.failed:
                self.engine.share(request, request.num_computed_tokens)
            self._go(request)
            return
        position = self.engine.num_cached(request)
        bringing = [
            restore
            for restore in self.restores
            if restore.brings(request.block_hashes, position)
            and not (restore.is_void or restore.is_cancelled)
            and not self.engine.has(request.block_hashes[position])  # computed again: the last of the prompt
        ]
        if self.restores.still_waits(request.request_id, position) or self.restores.follow(request, position):
            return
        assert not bringing, f"{request} need not wait, and {bringing} bring its next block"
        depth = self.allocator.resident_depth(request.block_hashes)
        assert self.engine.give(request, request.num_tokens)
        self.restores.went_on(request.request_id)
        if depth <= position or self.restores.carryover.has_drops:
            self._go(request)
            return
        self.restores.open(request, range(position, depth))
        request.state, request.num_computed_tokens = State.WAITS_FOR_KV, depth

    def _go(self, request: MemoryRequest) -> None:
        """It runs, and is over at once."""
        self.waiting.remove(request)
        request.state = State.COMPLETED
        self.restores.finish(request)
        self.engine.take_back(request.request_id)

    def _end(self, job: Job[LoadPart], num_good: int) -> None:
        restore = job.task.restore
        num_good = 0 if job.given_up else num_good
        blocks = self.engine.blocks(restore.block_ids[job.task.start : job.task.stop])
        hashes = restore.chain[restore.first + job.task.start :]
        for index, (block, prefix_hash) in enumerate(zip(blocks, hashes, strict=False)):
            block.kv = Kv(prefix_hash, 0) if index < num_good else None
        if num_good < job.num_blocks:
            self.failed.add(restore.request.request_id)
        progress = self.ledger.report(job.job_id, 1, num_good)
        assert progress is not None
        self.restores.advance(job, progress)
        self._take_back(restore)

    def _hang(self, job: Job[LoadPart]) -> None:
        self.failed.add(job.task.restore.request.request_id)
        progress = self.ledger.report(job.job_id, 0, 0, True)
        assert progress is not None
        self.restores.advance(job, progress)

    def _take_back(self, restore: Restore) -> None:
        """Blocks of an aborted request, once all of its parts have ended."""
        if restore.request.is_finished() and not restore.parts_left:
            self.engine.take_back(restore.request.request_id)

    def _fill(self, tokens: list[int]) -> None:
        """The pool has this chain."""
        chain = MemoryRequest("", tokens, [7], 1).block_hashes
        plan = self.allocator.plan_store(chain, len(chain))
        if plan is not None:
            self.allocator.commit(plan)

    def _hashes(self, chain: int) -> list[bytes]:
        return MemoryRequest("", tokens_of(chain), [7], 1).block_hashes

    def _drawn(self, data: st.DataObject) -> Job[LoadPart]:
        job: Job[LoadPart] = data.draw(st.sampled_from(list(self.ledger.of(self.restores))))
        return job


TestRestoresMachine = RestoresMachine.TestCase
TestRestoresMachine.settings = thorough(80, steps=40)


def test_a_request_whose_restore_fell_short_is_offered_no_more_and_is_forgotten() -> None:
    machine = RestoresMachine()
    machine.make(first_part=4, at_once=512, work=1 << 15)
    request, other = (MemoryRequest(name, [*tokens_of(0), 5], [7], 1) for name in ("r", "s"))
    machine._fill(tokens_of(0))
    machine.waiting.append(request)
    machine._ask(request)
    jobs = list(machine.ledger.of(machine.restores))
    assert len(jobs) > 1
    for job in jobs:
        machine._end(job, job.num_blocks - 1)
    machine._fill(tokens_of(0))
    assert machine.restores.early_offer(request, 0) == NOTHING[Why.FAILED]
    assert machine.restores.early_offer(other, 0) is None
    assert machine.restores.offer(other, 0, RequestHints()) == Offer(LENGTH, Why.RESIDENT)
    machine._go(request)
    machine.restores.finish(other)
    assert not any(machine.restores.left_over().values())


def two_of_a_kind() -> tuple[RestoresMachine, MemoryRequest]:
    """One request restores, another waits for it, all in one part."""
    machine = RestoresMachine()
    machine.make(first_part=LENGTH, at_once=512, work=1 << 15)
    machine.send(chains=[0, 0], length=LENGTH)
    _, second = machine.waiting
    assert machine.restores.still_waits(second.request_id, 0) and len(machine.ledger) == 1
    return machine, second


def test_who_waits_for_a_restore_that_is_cancelled_goes_on() -> None:
    machine, follower = two_of_a_kind()
    machine.restores.reset()
    assert not machine.restores.still_waits(follower.request_id, 0)
    assert not machine.restores.left_over()["requests that follow"]


def test_who_is_over_waits_for_nothing() -> None:
    machine, follower = two_of_a_kind()
    assert machine.restores.left_over()["requests that follow"] == [follower.request_id]
    follower.state = State.ABORTED
    machine.restores.finish(follower)
    assert not machine.restores.left_over()["requests that follow"]
    assert not machine.restores.still_waits(follower.request_id, 0)


def test_a_part_that_hung_gives_its_blocks_back_when_it_has_ended() -> None:
    machine, _ = two_of_a_kind()
    [job] = machine.ledger.of(machine.restores)
    machine._hang(job)
    block_ids = [block.block_id for block in job.blocks]
    held = [machine.engine.num_holds(block_id) for block_id in block_ids]
    assert block_ids
    machine._end(job, 0)
    assert [machine.engine.num_holds(block_id) for block_id in block_ids] == [num - 1 for num in held]


def test_what_was_handed_over_is_forgotten() -> None:
    """Its blocks were too many to be shared in one step, so it waits to be handed over."""
    machine = RestoresMachine()
    machine.make(first_part=LENGTH, at_once=1, work=1 << 15)
    machine.send(chains=[0, 0], length=LENGTH)
    request, _ = machine.waiting
    [job] = machine.ledger.of(machine.restores)
    machine._end(job, job.num_blocks)
    assert machine.restores.left_over()["restores to hand over"] == [request.request_id]
    machine.restores.check_invariants()
    assert machine.restores.went_on(request.request_id)
    machine.restores.check_invariants()
    assert not machine.restores.left_over()["restores to hand over"]
