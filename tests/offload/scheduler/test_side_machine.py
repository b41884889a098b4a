"""The whole scheduler's side over an engine in memory: any history that an engine can have, in any order.

Every block and slot knows whose KV is in it (``ranks``), and ``serving`` checks these, all holds and all
invariants after every rule. At the end everything must come to rest, whatever has happened.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.scheduler.engine import State
from offload.scheduler.hints import RequestHints
from tests.offload.scheduler.ranks import Copy
from tests.offload.scheduler.serving import BLOCK, Serving, Sizes
from tests.strategies import thorough

LONGEST = 9
"""Blocks of a request."""

LENGTHS = st.integers(1, 5 * BLOCK)
HINTS = st.sampled_from(
    [
        *[RequestHints()] * 6,
        RequestHints(load=False),
        RequestHints(store=False),
        RequestHints(max_load_tokens=3),
        RequestHints(max_offload_tokens=5),
        RequestHints(priority="high", pin_seconds=5.0),
        RequestHints(keep=False),
    ]
)
SIZES = st.builds(
    Sizes,
    num_blocks=st.sampled_from([12, 18, 40]),
    num_slots=st.sampled_from([4, 12, 200]),
    num_ranks=st.sampled_from([1, 1, 2]),
    first_part=st.sampled_from([1, 2, 16]),
    answer_run=st.integers(1, 3),
    step_work=st.sampled_from([1, 300, 1 << 15]),
    shared_at_once=st.sampled_from([1, 512]),
    num_spare=st.integers(0, 2),
    policy=st.sampled_from(["lru", "hazard"]),
    step_tokens=st.sampled_from([4, 16]),
)


def prompt_of(family: int, length: int, turn: int) -> list[int]:
    """Prompts of a family begin alike; those of another turn go on otherwise after some blocks."""
    return [family * 100 + (turn * 1000 if index >= 3 * BLOCK else 0) + index for index in range(length)]


class SideMachine(RuleBasedStateMachine):
    """In a calm history the pool is large, and nothing is done for which a block may stay out of it."""

    @initialize(sizes=SIZES, is_calm=st.booleans())
    def make(self, sizes: Sizes, is_calm: bool) -> None:
        self.is_calm = is_calm
        self.sent: list[list[int]] = []
        self.serving = Serving(replace(sizes, num_slots=200) if is_calm else sizes)

    # Requests

    @precondition(lambda self: len(self.serving.requests) < 6)
    @rule(
        family=st.integers(0, 1),
        lengths=st.lists(LENGTHS, min_size=1, max_size=3),
        turn=st.integers(0, 1),
        answer=st.integers(1, 8),
        hints=HINTS,
    )
    def send(self, family: int, lengths: list[int], turn: int, answer: int, hints: RequestHints) -> None:
        for length in lengths:
            self._send(prompt_of(family, length, turn), answer, hints)

    @precondition(lambda self: self.sent and len(self.serving.requests) < 6)
    @rule(data=st.data(), num=st.integers(1, 2), fault=st.sampled_from([None, None, "short", "hangs"]))
    def ask_again(self, data: st.DataObject, num: int, fault: str | None) -> None:
        """What the GPU has forgotten, and some of it goes wrong on its way back."""
        self.serving.engine.forget()
        prompt = data.draw(st.sampled_from(self.sent[::-1]))
        for _ in range(num):
            self._send(prompt, 2, RequestHints())
        self.serving.step()
        if fault == "short" and self._copies() and not self.is_calm:
            self.end_short(data)
        elif fault == "hangs" and self._copies() and not self.is_calm:
            self.hang(data)

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.serving.abort(data.draw(st.sampled_from(self._alive())))

    @precondition(lambda self: self.serving.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.serving.preempt(data.draw(st.sampled_from(self.serving.running)))

    # Steps

    @rule(tokens=st.sampled_from([1, 4, None]), admits=st.sampled_from([True, True, False]))
    def step(self, tokens: int | None, admits: bool) -> None:
        self.serving.step(tokens, admits=admits)

    @precondition(lambda self: self._alive())
    @rule(num=st.integers(1, 4))
    def run_well(self, num: int) -> None:
        """All copies end, and everybody computes."""
        for _ in range(num):
            self.serving.ranks.end_all()
            self.serving.step()
            self.serving.check()

    @precondition(lambda self: self._alive() and not self.serving.ranks.copies)
    @rule()
    def come_to_rest(self) -> None:
        """And what comes next is restored."""
        self.serving.drain()
        self.serving.engine.forget()

    # Copies

    @precondition(lambda self: self._copies())
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        copy, rank = self._drawn(data)
        self.serving.ranks.end(copy, rank, len(copy.slots))

    @precondition(lambda self: self._copies() and not self.is_calm)
    @rule(data=st.data())
    def end_badly(self, data: st.DataObject) -> None:
        self.end_short(data)

    @precondition(lambda self: self._copies() and not self.is_calm)
    @rule(data=st.data())
    def get_stuck(self, data: st.DataObject) -> None:
        self.hang(data)

    def end_short(self, data: st.DataObject) -> None:
        copy, rank = self._drawn(data)
        self.serving.ranks.end(copy, rank, data.draw(st.integers(0, len(copy.slots) - 1)))
        self.serving.step()

    def hang(self, data: st.DataObject) -> None:
        copy, rank = self._drawn(data)
        self.serving.ranks.hang(copy, rank)
        self.serving.step()

    # Now and then

    @rule(seconds=st.sampled_from([0.1, 2.0, 8.0]))
    def pass_time(self, seconds: float) -> None:
        """Forgets what is on the GPU, too."""
        self.serving.now += seconds
        self.serving.engine.forget()

    @precondition(lambda self: not self.is_calm)
    @rule(what=st.sampled_from(["sibling", "sibling", "reset", "long pause", "nothing", "nothing"]))
    def go_wrong(self, what: str) -> None:
        match what:
            case "sibling":
                self.serving.fail_a_sibling()
            case "reset":
                self.serving.reset()
            case "long pause":
                self.serving.now += 40.0

    @invariant()
    def agrees(self) -> None:
        self.serving.check()

    def teardown(self) -> None:
        if not hasattr(self, "serving"):
            return
        self.serving.drain()
        if self.is_calm and not self._num_unstored():
            self._check_all_are_resident()

    def _check_all_are_resident(self) -> None:
        """Every full block of every request that ended well, as far as it may be stored."""
        for request in self.serving.over:
            hints = request.hints
            num_full = request.num_computed_tokens // BLOCK
            if hints.max_offload_tokens is not None:
                num_full = min(num_full, hints.max_offload_tokens // BLOCK)
            if request.state is State.COMPLETED and hints.store:
                depth = self.serving.side.allocator.resident_depth(request.block_hashes)
                assert depth >= num_full, f"{request} has {depth} blocks in the pool of {num_full}"

    def _num_unstored(self) -> float:
        return sum(num for name, num in self.serving.metrics.items() if name.startswith("unstored_"))

    def _alive(self) -> list[Any]:
        return [request for request in self.serving.requests.values() if not request.is_finished()]

    def _send(self, prompt: list[int], num_answer: int, hints: RequestHints) -> None:
        self.sent.append(prompt)
        self.serving.send(prompt, [7] * num_answer, hints)

    def _copies(self) -> list[Copy]:
        """Those that are yet to end on some rank, loads first."""
        copies = [copy for copy in self.serving.ranks.copies.values() if copy.ranks - copy.ends.keys()]
        return sorted(copies, key=lambda copy: (not copy.is_load, copy.job_id))

    def _drawn(self, data: st.DataObject) -> tuple[Copy, int]:
        copy = data.draw(st.sampled_from(self._copies()))
        return copy, data.draw(st.sampled_from(sorted(copy.ranks - copy.ends.keys())))


TestSideMachine = SideMachine.TestCase
TestSideMachine.settings = thorough(60, steps=40)
