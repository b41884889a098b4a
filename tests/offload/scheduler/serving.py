"""A scheduler over the memory engine, with our scheduler's side and ranks that copy when they are told to.

It calls the side's hooks in vLLM's order. It is simple: first come first served, one step at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.config import OffloadConfig, StoreWhen
from offload.fleet_config import NO_FLEET, FleetConfig
from offload.messages import Fingerprint, StepPlan
from offload.observe.metrics import METRICS
from offload.scheduler.engine import State
from offload.scheduler.hints import RequestHints
from offload.scheduler.quiet import QuietSide
from offload.testing.memory_engine import Kv, MemoryEngine, MemoryRequest, MemoryStep
from offload.transfer_params import KVTransferParams
from tests.offload.scheduler.ranks import Ranks

BLOCK = 2
"""Tokens."""

COUNTERS = frozenset(spec.name for spec in METRICS if spec.is_counter)


@dataclass(frozen=True)
class Sizes:
    """What an engine and a pool are like."""

    num_blocks: int = 16
    num_slots: int = 64
    num_ranks: int = 1
    first_part: int = 1
    answer_run: int = 2
    step_work: int = 1 << 15
    shared_at_once: int = 512
    num_spare: int = 0
    policy: str = "lru"
    step_tokens: int = 16
    fleet: FleetConfig = NO_FLEET
    peer: bytes | None = None
    store: StoreWhen = StoreWhen.EAGER


class Serving:
    """One engine. Time passes when it is told to."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.now = 0.0
        self.engine = MemoryEngine(sizes.num_blocks, BLOCK, sizes.num_spare)
        self.ranks = Ranks(self.engine, sizes.num_ranks)
        self.side = QuietSide(
            OffloadConfig(cpu_gib=1.0, eviction_policy=sizes.policy, fleet=sizes.fleet, store=sizes.store),
            self.engine,
            block_size=BLOCK,
            num_slots=sizes.num_slots,
            slot_bytes=64,
            block_bytes=64,
            step_tokens=sizes.step_tokens,
            num_ranks=sizes.num_ranks,
            record_events=False,
            fingerprint=Fingerprint("", "", sizes.num_ranks, BLOCK, "", ""),
            clock=lambda: self.now,
            peer=sizes.peer,
        )
        self.side.restores.first_part = sizes.first_part
        self.side.restores.shared_at_once = sizes.shared_at_once
        self.side.restores.carryover.step_work = sizes.step_work
        self.side.restores.tidy()
        self.side.stores.backlog.answer_run = sizes.answer_run
        self.side.stores.backlog.answer_interval = 2
        self.requests: dict[str, MemoryRequest] = {}
        self.waiting: list[MemoryRequest] = []
        self.running: list[MemoryRequest] = []
        self.over: list[MemoryRequest] = []
        """Those that have ended."""
        self.told: dict[str, KVTransferParams] = {}
        """What clients were told of hand-offs, by request."""
        self.metrics = dict.fromkeys(COUNTERS, 0.0)
        self._arrived: set[str] = set()  # restores that have ended, whose requests have not gone on
        self._preempted: set[str] = set()
        self._preempted_ever: set[str] = set()
        self._is_sibling_failing = self._has_sibling_failed = False
        self._num_sent = 0

    # What happens to an engine

    def send(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        hints: RequestHints | None = None,
        lora: Any = None,
        params: KVTransferParams | None = None,
    ) -> MemoryRequest:
        request = MemoryRequest(
            f"r{self._num_sent}", prompt, answer, BLOCK, hints=hints, lora_request=lora, params=params
        )
        self._num_sent += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request: MemoryRequest) -> None:
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
        was_loading = request.state is State.WAITS_FOR_KV and request.request_id not in self._arrived
        self._arrived.discard(request.request_id)
        self._finish(request, State.ABORTED, keeps_blocks=was_loading)

    def preempt(self, request: MemoryRequest) -> None:
        """One that runs. The next step says so."""
        self.running.remove(request)
        self.engine.take_back(request.request_id)
        request.state, request.num_computed_tokens = State.PREEMPTED, 0
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)
        self._preempted_ever.add(request.request_id)

    def reset(self) -> None:
        """Weights change, if nobody holds a block: then vLLM forgets its own cache as well."""
        self.engine.generation += self.engine.forget()
        self.side.reset()

    def fail_a_sibling(self) -> None:
        """A load of another connector failed, in the next step."""
        self._is_sibling_failing = self._has_sibling_failed = True

    # A step

    def step(self, tokens: int | None = None, *, admits: bool = True) -> StepPlan:
        """Of that many tokens at most; ``admits``: whether those that wait are looked at."""
        scheduled = self._schedule(self.sizes.step_tokens if tokens is None else tokens, admits=admits)
        step = MemoryStep(scheduled, frozenset(self._preempted))
        self._preempted.clear()
        plan = self.side.build_plan(step)
        self.ranks.take(plan)
        for request_id, num in scheduled.items():
            self.engine.compute(self.requests[request_id], num)
        polled = self.ranks.poll()
        for request_id in polled.failed:
            self._truncate(request_id, 0)
        for request in self.waiting:
            self._see_invalid(request, polled.invalid)
        for request_id in scheduled:
            self._sample(self.requests[request_id])
        self.side.receive(polled.report, polled.invalid | self._invalid_of_sibling())
        for request_id in polled.ended:
            if request_id in self.requests and not self.requests[request_id].is_finished():
                self._arrived.add(request_id)
            else:
                self.engine.take_back(request_id)
                self.requests.pop(request_id, None)
        self.metrics.update(
            {
                name: self.metrics[name] + value
                for name, value in self.side.take_metrics().items()
                if name in COUNTERS
            }
        )
        return plan

    def _schedule(self, budget: int, *, admits: bool) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            num = min(request.num_tokens - request.num_computed_tokens, budget)
            if request in self.running and num > 0 and self._grow(request, num, scheduled):
                scheduled[request.request_id] = num
                budget -= num
        for request in list(self.waiting) if admits and not self._preempted else ():
            if budget > 0 and self._may_go_on(request):
                num = self._admit(request, budget)
                if num is None:
                    break
                if num:
                    scheduled[request.request_id] = num
                    budget -= num
        return scheduled

    def _grow(self, request: MemoryRequest, num: int, scheduled: dict[str, int]) -> bool:
        while not self.engine.give(request, request.num_computed_tokens + num):
            victim = self.running[-1]
            scheduled.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _may_go_on(self, request: MemoryRequest) -> bool:
        """Unless its KV is on its way."""
        if request.state is not State.WAITS_FOR_KV:
            return True
        if request.request_id not in self._arrived:
            return False
        self._arrived.discard(request.request_id)
        if request.num_computed_tokens:
            self.engine.share(request, request.num_computed_tokens)
        else:
            self.engine.take_back(request.request_id)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        was_preempted = request.request_id in self._preempted_ever
        request.state = State.PREEMPTED if was_preempted else State.OTHER
        return True

    def _admit(self, request: MemoryRequest, budget: int) -> int | None:
        """Tokens that it computes in this step, 0 if it waits for its KV; None: there are too few blocks."""
        num_local, num_external = request.num_computed_tokens, 0
        if not num_local:
            num_local = self.engine.num_cached(request)
            offered = self.side.offer(request, num_local).tokens
            if offered is None:
                return 0
            num_external = offered
        num_new = 0 if num_external else min(request.num_tokens - num_local, budget)
        num_lacking = self.engine.num_lacking(request, request.num_tokens) + self._num_reserved(request)
        num_lacking += self.sizes.num_spare if self.running else 0
        if num_lacking > self.engine.num_free:
            return None
        assert self.engine.give(request, num_local + num_external + num_new)
        self.side.allocated(request, num_external)
        request.num_computed_tokens = num_local + num_external
        if num_external:
            request.state = State.WAITS_FOR_KV
            return 0
        request.state = State.OTHER
        self.waiting.remove(request)
        self.running.append(request)
        return num_new

    def _num_reserved(self, admitted: MemoryRequest) -> int:
        """Blocks that requests with restored KV will need. They cannot be preempted before they run."""
        holding = [
            each for each in self.waiting if each is not admitted and self.engine.table(each.request_id)
        ]
        return sum(self.engine.num_lacking(each, each.num_tokens) for each in holding)

    def _sample(self, request: MemoryRequest) -> None:
        if request.num_computed_tokens < request.num_tokens or request.is_finished():
            return
        request.append()
        if request.is_answered:
            self.running.remove(request)
            self._finish(request, State.COMPLETED)

    def _finish(self, request: MemoryRequest, state: State, *, keeps_blocks: bool = False) -> None:
        request.state = state
        told = self.side.finish(request)
        if told is not None:
            self.told[request.request_id] = told
        self.over.append(request)
        if not keeps_blocks:
            self.engine.take_back(request.request_id)
            del self.requests[request.request_id]

    def _see_invalid(self, request: MemoryRequest, invalid: set[int]) -> None:
        if request.state is not State.WAITS_FOR_KV:
            return
        table = self.engine.table(request.request_id)
        for position in range(request.num_computed_tokens // BLOCK):
            if table[position].block_id in invalid:
                self._truncate(request.request_id, position * BLOCK)
                return

    def _invalid_of_sibling(self) -> set[int]:
        """A block that no restore of ours fills, if a sibling fails in this step."""
        is_failing, self._is_sibling_failing = self._is_sibling_failing, False
        others = [each for each in range(self.sizes.num_blocks) if not self.side.restores.are_filling([each])]
        return set(others[:1]) if is_failing else set()

    def _truncate(self, request_id: str, num_tokens: int) -> None:
        request = self.requests[request_id]
        if not request.is_finished():
            request.num_computed_tokens = num_tokens

    # What must hold

    def check(self) -> None:
        """After every step, and whatever happens between two."""
        self.engine.check_invariants()
        self.side.check_invariants()
        backlog, ledger = self.side.stores.backlog, self.side.ledger
        owned = self.engine.owners(backlog.queued_blocks(), *(job.blocks for job in ledger))
        for block_id in range(self.sizes.num_blocks):
            held, owners = self.engine.num_holds(block_id), owned[block_id]
            assert held == owners, f"block {block_id} is held {held} times and has {owners} owners"
        assert {job.job_id for job in ledger} == {
            *self.ranks.copies,
            *(part.job_id for order in self.side._next.orders for part in order.parts),
        }, "the side and the ranks know different jobs"
        spoiled = [job for job in ledger.of(self.side.stores) if job.task.is_spoiled]
        may_be_spoiled = self._has_sibling_failed or self.ranks.may_seem_foreign
        assert may_be_spoiled or not spoiled, f"{spoiled} are spoiled, and no sibling has failed"
        for request in self.running:
            self._check_attended(request)
        self._check_pool()

    def _check_attended(self, request: MemoryRequest) -> None:
        table = self.engine.table(request.request_id)
        for position in range(request.num_computed_tokens // BLOCK):
            expected = request.block_hashes[position]
            kv = table[position].kv
            assert kv is not None and kv.prefix_hash == expected, (
                f"{request} attends to {kv} at position {position}"
            )

    def _check_pool(self) -> None:
        for node in self.side.allocator._tree.nodes():
            resident = node.slots[: node.resident, 0].tolist()
            for prefix_hash, slot in zip(node.hashes, resident, strict=False):
                for rank, slots in enumerate(self.ranks.slots) if slot >= 0 else ():
                    fill = slots.get(slot)
                    assert fill is not None and fill.kv == Kv(prefix_hash, self.engine.generation), (
                        f"slot {slot} of rank {rank} is resident with {fill}"
                    )

    def drain(self, max_steps: int = 400) -> None:
        """Nobody waits for ever: whatever has happened, everything ends, and nothing is left."""
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.side.has_pending_work or self.ranks.copies):
                break
            self.ranks.end_all()
            self.now += 1.0
            self.step()
            self.check()
        self.now += self.sizes.fleet.lease_seconds
        self.step()
        self.check()
        left = self.side.left_over()
        assert not (left or self.waiting or self.running or self.requests), (
            f"after {max_steps} steps: {self.waiting} wait, {self.running} run, left are {left}"
        )
        assert self.engine.num_free == self.sizes.num_blocks, f"{self.engine.num_free} blocks are free"
        allocator = self.side.allocator
        assert allocator.num_free + allocator.num_resident == allocator.capacity, (
            f"{allocator.num_filling} slots fill and {allocator.num_leaving} leave with no job in flight"
        )
