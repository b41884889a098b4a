"""Requests with much to compute let those pass whose KV has arrived, on vLLM's real scheduler."""

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from vllm.v1.request import Request

from offload.messages import LOAD
from offload.scheduler import aside
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import (
    Counts,
    come_to_rest,
    forget_gpu,
    forget_gpu_while_held,
    hold,
    release,
    serve,
    step_until,
    tokens,
)

LENGTH, BLOCK = 96, 4
PROMPTS = [tokens(LENGTH + 1, first) for first in range(1, 5)]
SHARE = 0.25
"""Of the time that its own prompt takes: a request waits no longer for restores of others."""
PATIENCE = SHARE * LENGTH * 0.25e-3
"""As nothing was measured."""
SOON = PATIENCE / 12
"""Seconds of a step, so that restores land within that time."""
WITH_IT = PATIENCE / 4
"""Who comes so soon after it was first asked has come with it."""

Engines = Callable[..., VirtualEngine]


class Batch:
    """Four prompts that come at once, of which the pool has some; in what order they get first tokens."""

    def __init__(
        self, engine: VirtualEngine, arrived: Sequence[int], order: Sequence[int] = range(4), depth: int = 0
    ) -> None:
        """Those that have ``arrived`` are there as a whole, of others ``depth`` tokens."""
        self.engine = engine
        for place in range(4):
            stop = LENGTH if place in arrived else depth
            if stop:
                serve(engine, PROMPTS[place][:stop])
        forget_gpu(engine)
        engine.counts["computed"] = 0
        self.requests: dict[int, Request] = {}
        self.first: dict[int, int] = {}
        self.scheduled: dict[int, int] = {}
        self._began, self.began = engine.num_steps, engine.clock()
        for place in order:
            self.add(place)

    def add(self, place: int, priority: int = 0) -> Request:
        request = self.requests[place] = self.engine.add(PROMPTS[place], 3, priority=priority)
        return request

    def step(self) -> None:
        self.engine.step()
        step = self.engine.num_steps - self._began
        for place, request in self.requests.items():
            if request.num_computed_tokens and request.status.name == "RUNNING":
                self.scheduled.setdefault(place, step)
            if request.num_output_tokens:
                self.first.setdefault(place, step)

    def run(self) -> None:
        for _ in range(200):
            if all(request.is_finished() for request in self.requests.values()):
                come_to_rest(self.engine)
                return
            self.step()
        raise AssertionError(f"of {self.requests} some do not end")


@pytest.fixture(params=[False, True], ids=["in step", "overlapped"])
def make(request: pytest.FixtureRequest, engines: Engines) -> Engines:
    def engine(**settings: object) -> VirtualEngine:
        defaults = {"gpu_blocks": 160, "cpu_slots": 160, "chunk": 48, "step_seconds": SOON}
        return engines(**(defaults | settings), overlapped=request.param)

    return engine


@pytest.mark.parametrize("order", list(permutations(range(4)))[::3])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_those_that_arrived_have_their_first_token_before_others_begin(
    make: Engines, lost: int, order: tuple[int, ...]
) -> None:
    arrived = range(lost, 4)
    batch = Batch(make(), arrived, order)
    batch.run()
    last = max(batch.first[place] for place in arrived)
    assert all(batch.scheduled[place] > last - batch.engine.settings.overlapped for place in range(lost))


def test_nobody_waits_where_all_are_lost(make: Engines) -> None:
    batch = Batch(make(), [])
    batch.step()
    assert batch.requests[0].num_computed_tokens == 48


def test_nobody_waits_where_none_is_lost(make: Engines) -> None:
    engine = make()
    steps = []
    for arrived in (range(4), range(4)):
        batch = Batch(engine, arrived)
        batch.run()
        steps.append(max(batch.first.values()))
        assert engine.reset()
    assert steps[0] == steps[1] <= 6


def test_who_lacks_the_end_of_its_prompt_lets_others_pass_too(make: Engines) -> None:
    batch = Batch(make(), [1, 2, 3], depth=24)
    batch.run()
    assert all(batch.first[place] < batch.first[0] for place in (1, 2, 3))


def test_time_for_others_is_not_time_lost_to_kv(make: Engines) -> None:
    batch = Batch(make(), [1, 2, 3])
    counts = Counts(batch.engine)
    batch.run()
    (first,) = batch.engine.side.notes.of(lambda each: each == batch.requests[0].request_id, 2)
    assert first.aside > 0 == first.held and first.num_restored == 0
    assert first.gain is None and not counts["lost_seconds"]


def test_restores_that_take_long_are_not_waited_for(make: Engines) -> None:
    engine = make()
    batch = Batch(engine, [1, 2, 3])
    hold(engine, LOAD)
    began = engine.clock()
    step_until(engine, lambda: batch.requests[0].num_computed_tokens > 0)
    waited = engine.clock() - began
    assert PATIENCE / 2 < waited <= PATIENCE + 4 * SOON
    release(engine)
    batch.run()


def test_a_pause_that_was_taken_for_a_prefill_keeps_nobody_waiting_for_long(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps seem to have taken hours; that prefills take so long is not believed."""
    monkeypatch.setattr(aside, "_MOST_SECONDS", PATIENCE)
    engine = make()
    batch = Batch(engine, [1, 2, 3])
    monkeypatch.setattr(engine.side.costs.prefill, "expected", lambda first, stop: 3600.0 * (stop - first))
    hold(engine, LOAD)
    began = engine.clock()
    step_until(engine, lambda: batch.requests[0].num_computed_tokens > 0)
    assert engine.clock() - began <= SHARE * PATIENCE + 4 * SOON
    release(engine)
    batch.run()


def test_those_that_came_in_a_long_step_go_on_before_another_long_one(make: Engines) -> None:
    batch = Batch(make(chunk=72, step_seconds=2 * PATIENCE, gpu_blocks=240), [2, 3], order=[0])
    batch.step()
    for place in (1, 2, 3):
        batch.add(place)
    batch.run()
    last = max(batch.first[place] for place in (2, 3))
    assert batch.scheduled[1] > last - batch.engine.settings.overlapped


def test_a_clock_that_stands_still_keeps_nobody_waiting_once_all_have_landed(make: Engines) -> None:
    engine = make(step_seconds=1e-9)
    batch = Batch(engine, [1, 2, 3])
    batch.run()
    assert max(batch.first.values()) < 20


@pytest.mark.parametrize("is_sooner", [False, True])
def test_restores_that_follow_each_other_for_ever_starve_nobody(make: Engines, is_sooner: bool) -> None:
    """Its patience ends; and it waits for those only that came with it, or are sooner by priority."""
    copies = CopySchedule(longest_delay=6 if is_sooner else 1)
    engine = make(gpu_blocks=1000, cpu_slots=1000, max_num_seqs=64, copies=copies, policy="priority")
    documents = [tokens(LENGTH, first) for first in range(10, 26)]
    for document in documents:
        serve(engine, document)
    batch = Batch(engine, [], order=[0])
    began = engine.clock()
    for number in range(100):
        for document in documents[number % 8 :: 8]:
            engine.add([*document, 7], 1, priority=-1 if is_sooner else 0)
        batch.step()
        forget_gpu_while_held(engine)
        if batch.scheduled.get(0):
            break
    assert batch.scheduled.get(0), "it waits for whoever comes"
    waited = engine.clock() - began
    if is_sooner:
        assert PATIENCE / 2 < waited <= PATIENCE + 5 * SOON
    else:
        assert waited <= PATIENCE / 2 + 3 * SOON
    batch.run()


def test_who_comes_later_is_not_waited_for(make: Engines) -> None:
    engine = make()
    batch = Batch(engine, [1, 2], order=[0, 1])
    hold(engine, LOAD)
    while engine.clock() - batch.began <= WITH_IT + SOON:
        batch.step()
    batch.add(2)
    batch.step()
    engine.abort(batch.requests[1].request_id)
    began = engine.clock()
    step_until(engine, lambda: batch.requests[0].num_computed_tokens > 0)
    assert engine.clock() - began <= 3 * SOON
    release(engine)
    batch.run()


def test_who_comes_behind_and_is_computed_anyway_does_not_pass(make: Engines) -> None:
    """The pool has the KV of three, and restores none."""
    batch = Batch(make(restore="never"), [1, 2, 3])
    batch.step()
    assert batch.requests[0].num_computed_tokens == 48
    batch.run()
    assert batch.first[0] < min(batch.first[place] for place in (1, 2, 3))


def test_who_comes_behind_and_is_on_the_gpu_passes_though_nothing_is_restored(make: Engines) -> None:
    """The GPU has what the pool has, too."""
    engine = make(restore="never")
    batch = Batch(engine, [], order=[])
    for place in (1, 2, 3):
        serve(engine, PROMPTS[place][:LENGTH])
    for place in range(4):
        batch.add(place)
    batch.step()
    assert not batch.requests[0].num_computed_tokens
    batch.run()
    assert all(batch.first[place] < batch.first[0] for place in (1, 2, 3))


class Late(Batch):
    """The first of four is asked when another prompt was computed for four steps; three wait behind it."""

    def __init__(self, engine: VirtualEngine, *, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own prefill is believed to take ``num_steps``. The GPU and the pool have what the three ask."""
        super().__init__(engine, [], order=[])
        for place in (1, 2, 3):
            serve(engine, PROMPTS[place][:LENGTH])
        seconds = num_steps * engine.settings.step_seconds
        monkeypatch.setattr(engine.side.costs.prefill, "expected", lambda first, stop: seconds)

    def come(self) -> None:
        other = self.engine.add(tokens(5 * 48, 9), 4)
        self.step()
        for place in range(4):
            self.add(place)
        for _ in range(20):
            if not self.scheduled:
                self.step()
        assert other.num_computed_tokens >= 5 * 48


@pytest.mark.parametrize("num_steps", [2, 8])
def test_who_has_waited_lets_nobody_pass_for_what_the_gpu_has(
    make: Engines, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    batch = Late(make(gpu_blocks=240, restore="never"), num_steps=num_steps, monkeypatch=monkeypatch)
    batch.come()
    assert (0 in batch.scheduled) == (num_steps == 2)
    batch.run()


def test_who_has_waited_lets_those_pass_that_are_restored(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(gpu_blocks=240)
    batch = Late(engine, num_steps=2, monkeypatch=monkeypatch)
    forget_gpu(engine)
    batch.come()
    assert 0 not in batch.scheduled
    batch.run()


def test_who_lacks_little_lets_nobody_pass(make: Engines) -> None:
    engine = make()
    Batch(engine, [1, 2, 3], order=[])
    short = engine.add(tokens(5, 9), 1)
    for prompt in PROMPTS[1:]:
        engine.add(prompt, 1)
    engine.step()
    engine.flush()
    assert short.num_computed_tokens == 5
    engine.drain()


@pytest.mark.parametrize("is_sooner", [False, True])
def test_who_comes_first_by_priority_lets_nobody_pass_that_comes_behind(
    make: Engines, is_sooner: bool
) -> None:
    engine = make(policy="priority")
    batch = Batch(engine, [1, 2, 3], order=[])
    for place in (1, 2, 3, 0):
        batch.add(place, priority=-1 if is_sooner and place == 0 else 0)
    batch.step()
    assert (batch.requests[0].num_computed_tokens == 48) is is_sooner
    batch.run()
    assert is_sooner or all(batch.first[place] < batch.first[0] for place in (1, 2, 3))


def test_a_restore_that_fails_is_computed_after_those_that_arrived(make: Engines) -> None:
    engine = make()
    batch = Batch(engine, range(4), order=[])
    engine.copiers[0].force(LOAD, Fault.FAIL)
    for place in range(4):
        batch.add(place)
    batch.run()
    assert all(batch.first[place] <= batch.first[0] for place in (1, 2, 3))


def test_whoever_waits_may_go_away(make: Engines) -> None:
    engine = make()
    batch = Batch(engine, [1, 2, 3])
    hold(engine, LOAD)
    batch.step()
    engine.abort(batch.requests[0].request_id)
    engine.abort(batch.requests[1].request_id)
    release(engine)
    batch.run()
