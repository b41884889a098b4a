"""The backlog beside a model that looks at every request in every step."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import CpuOffloadingBlockAllocator
from offload.scheduler.backlog import Backlog, Pending
from tests.strategies import chain_of, thorough

BLOCK = 4
LONGEST = 16
"""Blocks of a request."""


@dataclass
class Request:
    """One request as the engine sees it, and what should be noted of it."""

    number: int
    num_prompt: int
    num_tokens: int = 0
    has_blocks: bool = True
    seen: int = 0
    noted: int = 0
    is_in_line: bool = False
    was_declined: bool = False
    """Until its next look, which may be a block away, or never come."""

    @property
    def name(self) -> str:
        return f"r{self.number}"

    def full(self, store_answers: bool) -> int:
        return min(self.num_tokens, LONGEST * BLOCK if store_answers else self.num_prompt) // BLOCK

    def start_over(self) -> None:
        if self.was_declined:  # and was not looked at since
            self.noted = 0
        self.seen, self.is_in_line, self.was_declined = 0, False, False

    def note(self, num_full: int) -> None:
        if num_full != self.seen:
            self.seen = self.noted = num_full


class BacklogMachine(RuleBasedStateMachine):
    """Three requests at most, so that the whole line has its turn at once."""

    @initialize(run=st.integers(1, 3), interval=st.integers(1, 3), store_answers=st.booleans())
    def make(self, run: int, interval: int, store_answers: bool) -> None:
        self.allocator = CpuOffloadingBlockAllocator(1000)
        self.now = 0.0
        self.backlog = Backlog(self.allocator, lambda: self.now, block_size=BLOCK)
        self.backlog.answer_run, self.backlog.answer_interval = run, interval
        self.store_answers = store_answers
        self.requests: list[Request] = []
        self.num_admitted = 0
        self.steps_to_turn = 0
        self.queued: list[tuple[str, int]] = []
        self.moved_at = self.stepped_at = 0.0

    @precondition(lambda self: len(self.requests) < 3)
    @rule(num_prompt=st.integers(1, 9 * BLOCK))
    def admit(self, num_prompt: int) -> None:
        request = Request(self.num_admitted, num_prompt)
        self.num_admitted += 1
        self.requests.append(request)
        chain = chain_of(request.number, *range(LONGEST))
        self.backlog.admit(
            Pending(request.name, request, chain, num_prompt // BLOCK, stores_answer=self.store_answers)
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Each request computes its prompt, a token, or nothing, as the engine likes."""
        self.moved_at += max(0.0, self.now - self.stepped_at - 10)
        self.stepped_at = self.now
        scheduled: dict[str, int] = {}
        for request in self.requests:
            most = min(max(request.num_prompt - request.num_tokens, 1), LONGEST * BLOCK - request.num_tokens)
            if request.has_blocks and most > 0:
                scheduled[request.name] = data.draw(st.sampled_from([0, 1, most, most]))
        scheduled = {name: num for name, num in scheduled.items() if num}
        for has_turn in (False, True):
            busy = [name for name, num in scheduled.items() if num > 1]
            for pending in self.backlog.turns() if has_turn else self.backlog.due(busy):
                if pending.request_id not in scheduled:
                    self.backlog.look_later(pending)
                    continue
                num_tokens = pending.request.num_tokens + scheduled[pending.request_id]
                after = Request(0, pending.request.num_prompt, num_tokens)
                self.backlog.look(pending, num_tokens, after.full(self.store_answers), has_turn=has_turn)
        self._step_the_model(scheduled)

    def _step_the_model(self, scheduled: dict[str, int]) -> None:
        run = self.backlog.answer_run
        for request in self.requests:
            if request.name in scheduled:
                request.num_tokens += scheduled[request.name]
                full, num_prompt_blocks = request.full(self.store_answers), request.num_prompt // BLOCK
                request.note(max(request.seen, min(full, num_prompt_blocks)))
                if full > num_prompt_blocks and full >= request.seen + run:
                    request.is_in_line = True
        self.steps_to_turn = max(0, self.steps_to_turn - 1)
        in_line = [request for request in self.requests if request.is_in_line]
        if in_line and not self.steps_to_turn:
            self.steps_to_turn = self.backlog.answer_interval
            for request in in_line:
                request.is_in_line = False
                if request.name in scheduled:
                    request.note(request.full(self.store_answers))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 2), num=st.integers(1, 5))
    def store(self, index: int, num: int) -> None:
        """What is stored is no longer listed, but noted all the same."""
        request = self.requests[index % len(self.requests)]
        for run in self.backlog.runs():
            if run.owner == request.name:
                plan = self.allocator.plan_store(run.chain, run.stop, num)
                pending = self.backlog.get(request.name)
                assert plan is not None and plan.start == run.start and pending is not None
                self.backlog.planned(pending, plan.start + len(plan.hashes))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 2))
    def decline(self, index: int) -> None:
        """Of a prompt. An answer's next look may be a turn late, and with it the turns of others."""
        request = self.requests[index % len(self.requests)]
        pending = self.backlog.get(request.name)
        if self.store_answers and request.num_tokens >= request.num_prompt:
            return
        assert pending is not None
        self.backlog.declined(pending, 0)
        request.was_declined = True
        request.seen = request.noted = 0

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 2), is_back=st.booleans())
    def preempt(self, index: int, is_back: bool) -> None:
        """It may have blocks again in the same step."""
        request = self.requests[index % len(self.requests)]
        request.start_over()
        request.num_tokens, request.noted, request.has_blocks = 0, 0, is_back
        if is_back:
            self.backlog.admit_again(request.name)
        self.backlog.set_aside(request.name, is_back=is_back)

    @rule()
    def resume(self) -> None:
        for request in self.requests:
            if not request.has_blocks:
                request.has_blocks = True
                self.backlog.admit_again(request.name)

    @rule(num=st.integers(0, 4))
    def lose(self, num: int) -> None:
        """A fault takes something out of the pool."""
        if self.requests:
            self.allocator.drop(chain_of(self.requests[0].number, *range(LONGEST)), num)
        for request in self.requests:
            request.start_over()
        self.backlog.plan_anew()

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 2), start=st.integers(0, 3), num=st.integers(0, 4))
    def finish(self, index: int, start: int, num: int) -> None:
        """What it has not stored is queued, in the order in which it is to be stored."""
        request = self.requests.pop(index % len(self.requests))
        pending = self.backlog.finish(request.name)
        assert pending is not None and pending.request is request
        assert self.backlog.finish(request.name) is None
        if num:
            blocks = [(request.name, position) for position in range(start, start + num)]
            self.backlog.end(pending, start, list(blocks))
            self.queued += blocks
            self.moved_at = self.now

    @precondition(lambda self: self.queued)
    @rule(num=st.integers(1, 4))
    def take(self, num: int) -> None:
        """Of the first request alone."""
        first = self.backlog.first
        assert first is not None and (first.request_id, first.start) == self.queued[0]
        mine = [block for block in self.queued if block[0] == first.request_id]
        assert first.stop == mine[-1][1] + 1
        assert self.backlog.take(num) == mine[:num]
        del self.queued[: len(mine[:num])]
        self.moved_at = self.now

    @rule(num=st.integers(0, 5))
    def give_up(self, num: int) -> None:
        """The last come first; within a request the deepest."""
        given_up = self.queued[max(0, len(self.queued) - num) :]
        assert self.backlog.give_up(num, "gave_way") == given_up[::-1]
        del self.queued[len(self.queued) - len(given_up) :]

    @rule(seconds=st.sampled_from([1.0, 29.0]), moved=st.booleans())
    def pass_time(self, seconds: float, moved: bool) -> None:
        self.now += seconds
        if moved:
            self.backlog.moved()
            self.moved_at = self.now

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if not really:
            self.allocator.reset()
            self.backlog.clear()
            self.requests.clear()

    @invariant()
    def agrees(self) -> None:
        self.backlog.check_invariants()
        assert len(self.backlog) == len(self.requests)
        assert self.backlog.num_queued == len(self.queued)
        assert (self.backlog.first is None) == (not self.queued)
        assert self.backlog.is_overdue == (bool(self.queued) and self.now - self.moved_at > 30)
        listed = {run.owner: run.stop for run in self.backlog.runs()}
        for request in self.requests:
            known = self.allocator.known_depth(chain_of(request.number, *range(LONGEST)), LONGEST)
            expected = request.noted if request.noted > known else None
            now = listed.pop(request.name, None)
            request.was_declined = request.was_declined and (now is None or now != expected)
            assert now == expected or (request.was_declined and now is None), (
                f"{request} is noted up to {now}"
            )
        assert not listed, f"{listed} are not there"


TestBacklogMachine = BacklogMachine.TestCase
TestBacklogMachine.settings = thorough(60)


def test_a_step_looks_at_those_who_may_have_filled_enough() -> None:
    """Of many requests that decode, few are looked at in a step, and all of them in time."""
    backlog = Backlog(CpuOffloadingBlockAllocator(10), lambda: 0.0, block_size=16)
    backlog.answer_run = 4
    for number in range(100):
        backlog.admit(Pending(f"r{number}", None, chain_of(number), 1))
    for pending in backlog.due([]):
        backlog.look(pending, 16 + int(pending.request_id[1:]) % 16, 1)
    looks = 0
    for _ in range(4 * 16 - 16):
        looks += len(backlog.due([]))
        assert not backlog.turns()
    assert looks == 0
    looks = sum(len(backlog.due([])) for _ in range(16))
    assert looks == 100


@pytest.mark.parametrize("store_answers", [True, False])
def test_what_is_at_rest_is_not_looked_at(store_answers: bool) -> None:
    backlog = Backlog(CpuOffloadingBlockAllocator(10), lambda: 0.0, block_size=4)
    backlog.answer_run = 1
    backlog.admit(Pending("r", None, chain_of(1, 2), 1, stores_answer=store_answers))
    (pending,) = backlog.due([])
    backlog.look(pending, 4, 1)
    assert any(backlog.due([]) for _ in range(4)) is store_answers
