"""Steps that are skipped: they would have done nothing, and whatever happens ends them."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import StepPlan
from offload.scheduler.engine import Step
from offload.scheduler.gauges import Gauges
from offload.scheduler.quiet import QuietSide
from offload.scheduler.side import SchedulerSide
from offload.testing.virtual import VirtualEngine, run_seed
from offload.testing.virtual.resizes import Resizes
from offload.testing.virtual.run import draw_kind
from tests.virtual.driver import Engines, step_until, tokens

FAST = 0.001
"""Seconds of a step, so that many go by before one is planned only for the time."""


class Watch:
    """Which steps were quiet, of all engines since this was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[bool] = []
        build_plan, of_quiet = SchedulerSide.build_plan, QuietSide.build_plan

        def planned(side: SchedulerSide, step: Step) -> StepPlan:
            self.steps[-1] = False
            return build_plan(side, step)

        def begun(side: QuietSide, step: Step) -> StepPlan:
            self.steps.append(True)
            return of_quiet(side, step)

        patch.setattr(SchedulerSide, "build_plan", planned)
        patch.setattr(QuietSide, "build_plan", begun)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def shape_of(side: SchedulerSide) -> Any:
    """What a step may change, other than by the time."""
    later, backlog, allocator = side.stores.later, side.stores.backlog, side.allocator
    left = () if later is None else (list(later._left.line), list(later._left.due), later._left.num_due)
    pool = allocator.num_free, allocator.num_resident, allocator.num_filling, allocator.num_leaving
    queue = backlog.num_queued, list(backlog._line), backlog._steps_to_turn, dict(backlog._lookout._due_in)
    held = side.stores.holds.num_held, side.stores.holds.to_run_with, side.stores.holds.is_short
    free = side._engine.num_free, side._engine.next_free
    waits = side.restores._waiting._offered, side.restores._waiting.refused, side.aside._going.names()
    counts = {name: num for name, num in side.metrics.totals.items() if not name.endswith("seconds")}
    return left, pool, queue, held, free, waits, counts, side.left_over()


def check_quiet_steps(patch: pytest.MonkeyPatch) -> list[int]:
    """Each step that would be skipped is planned as well. Returns how many requests each of them computes."""
    seen: list[int] = []
    is_quiet = QuietSide._is_quiet

    def planned_as_well(side: QuietSide, step: Step) -> bool:
        if not is_quiet(side, step):
            return False
        seen.append(len(step.num_scheduled_tokens))
        backlog = side.stores.backlog
        now, turn = backlog._lookout._step, backlog._steps_to_turn
        before = shape_of(side)
        backlog._lookout._step -= 1  # as if it had not been skipped
        plan = SchedulerSide.build_plan(side, step)
        assert plan == StepPlan(side._fingerprint), plan
        backlog._steps_to_turn = turn
        assert backlog._lookout._step == now
        assert shape_of(side) == before
        side._num_left += 1
        return True

    patch.setattr(QuietSide, "_is_quiet", planned_as_well)
    return seen


def drive(engine: VirtualEngine, rng: random.Random, num_steps: int) -> None:
    """Few requests, with long answers, about few documents; now and then one is aborted, or all is reset."""
    for _ in range(num_steps):
        if rng.random() < 0.06:
            document = tokens(rng.randrange(4, 60), 1000 * rng.randrange(4))
            question = tokens(rng.randrange(9), rng.randrange(10**6))
            engine.add(document + question, rng.randrange(1, 90))
        running = [request.request_id for request in engine.scheduler.running]
        if running and rng.random() < 0.01:
            engine.abort(rng.choice(running))
        if rng.random() < 0.005:
            engine.reset()
        engine.step()
    engine.drain(1000)
    engine.audit.check_drained()


def check_engine(engines: Engines, patch: pytest.MonkeyPatch, seed: int, **settings: Any) -> None:
    seen, rng = check_quiet_steps(patch), random.Random(seed)
    cpu_slots = rng.choice([20, 80])
    settings = {"block_size": 8, "gpu_blocks": 60, "max_model_len": 256, "cpu_slots": cpu_slots} | settings
    engine = engines(step_seconds=FAST, answer_run=2, answer_interval=6, **settings)
    drive(engine, rng, 450)
    assert len(seen) > 100 and max(seen) > 1


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_skipped_would_have_done_nothing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, overlapped: bool, seed: int
) -> None:
    check_engine(engines, monkeypatch, seed, overlapped=overlapped, store="eager")


@pytest.mark.parametrize("store", ["lazy", "auto"])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_so_it_is_where_stores_are_late(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, store: str, overlapped: bool, seed: int
) -> None:
    check_engine(engines, monkeypatch, seed, overlapped=overlapped, store=store)


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_so_it_is_where_prompts_take_full_steps(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    check_engine(engines, monkeypatch, 0, store=store, chunk=16)


@pytest.mark.parametrize("kind", ["plain", "lazy", "resize", "pipeline"])
def test_random_runs_with_quiet_steps(kind: str, watch: Watch) -> None:
    for seed in range(5100, 5140):
        if seed >= 5104 and any(watch.steps):
            break
        settings = replace(draw_kind(kind, seed, random.Random(seed)), step_seconds=FAST)
        run_seed(seed, turns=150, settings=settings)
    assert any(watch.steps)


def answering(engines: Engines, watch: Watch, **settings: Any) -> tuple[VirtualEngine, Request]:
    """An engine whose last step was quiet: it writes a long answer."""
    settings = {"step_seconds": FAST, "gpu_blocks": 200, "block_size": 16, "max_model_len": 2048} | settings
    engine = engines(**settings)
    request = engine.add(tokens(40), 1000)
    step_until(engine, lambda: watch.steps[-3:] == [True] * 3)
    return engine, request


def longest_run(watch: Watch) -> int:
    """Of quiet steps."""
    return max(len(run) for run in "".join("q" if each else " " for each in watch.steps).split())


@pytest.mark.parametrize(("block_size", "longest"), [(16, 14), (64, 16)])
def test_an_answer_is_mostly_quiet(engines: Engines, watch: Watch, block_size: int, longest: int) -> None:
    """But where it is given another block, and for one step behind 16 of them."""
    engine, _ = answering(engines, watch, block_size=block_size)
    watch.steps.clear()
    for _ in range(320):
        engine.step()
    assert longest_run(watch) == longest
    assert sum(watch.steps) / len(watch.steps) > 0.85


@pytest.mark.parametrize(("num_tokens", "num_planned"), [(40, 3), (45, 4)])
def test_no_step_is_planned_for_a_prompt_that_is_computed(
    engines: Engines, watch: Watch, num_tokens: int, num_planned: int
) -> None:
    """But for those in which it comes and goes on. Of a step that is full nobody knows whether it does."""
    engine, _ = answering(engines, watch, block_size=64, chunk=16)
    watch.steps.clear()
    engine.add(tokens(num_tokens, 900), 20)
    for _ in range(6):
        engine.step()
    assert watch.steps == [False] * num_planned + [True] * (6 - num_planned)


def test_steps_are_quiet_beside_a_session_that_rests(engines: Engines, watch: Watch) -> None:
    """It is not over, and has no turn: its client has sent nothing more."""
    engine, _ = answering(engines, watch, block_size=64)
    session = engine.add(tokens(20, 900), 4, resumable=True)
    step_until(engine, lambda: session.num_output_tokens == 4)
    watch.steps.clear()
    for _ in range(100):
        engine.step()
    assert session.request_id in engine.side._turns
    assert sum(watch.steps) > 85
    engine.abort(session.request_id)


def test_nothing_is_left_to_be_told_where_only_a_session_is_left(engines: Engines) -> None:
    engine = engines(step_seconds=FAST, gpu_blocks=200, block_size=16, max_model_len=2048)
    session = engine.add(tokens(20, 900), 4, resumable=True)
    step_until(engine, lambda: session.num_output_tokens == 4)
    step_until(engine, engine.add(tokens(40), 40).is_finished)
    while engine.scheduler.has_requests() or engine.side.has_pending_work:
        engine.step()
    assert engine.side._turns and not engine.side.metrics.has_counts and not engine.side._has_news
    engine.abort(session.request_id)


def test_no_step_is_quiet_in_which_somebody_asks_in_vain(engines: Engines, watch: Watch) -> None:
    """It has no blocks for the time being."""
    engine, request = answering(engines, watch, gpu_blocks=70, max_model_len=1100)
    engine.add(tokens(engine.settings.longest - 1, 900), 1)
    watch.steps.clear()
    for _ in range(10):
        engine.step()
    assert len(engine.scheduler.waiting) == 1 and not any(watch.steps)
    engine.abort(request.request_id)


def test_metrics_are_told_once_a_second_and_when_nobody_runs(
    engines: Engines, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = answering(engines, watch, step_seconds=0.01)
    clock, told = engine.side._clock, []
    take = Gauges.take

    def taken(gauges: Gauges) -> dict[str, float]:
        told.append(clock())
        return take(gauges)

    monkeypatch.setattr(Gauges, "take", taken)
    for _ in range(650):
        engine.step()
    gaps = [after - before for before, after in pairwise(told)]
    assert len(gaps) >= 4 and min(gaps) >= 1.0 and max(gaps) < 1.5
    aborted_at = clock()
    engine.abort(request.request_id)
    step_until(engine, engine.add(tokens(2, 900), 1).is_finished)
    assert told[-2] < told[-1] < told[-2] + 1.0
    assert aborted_at <= told[-1]


HAPPENINGS: dict[str, Callable[[VirtualEngine, Request], object]] = {
    "a request comes": lambda engine, _: engine.add(tokens(8, 900), 1),
    "a request asks": lambda engine, request: engine.side.offer(request, 0),
    "a request is aborted": lambda engine, request: engine.abort(request.request_id),
    "all is reset": lambda engine, _: engine.side.reset(),
    "a sibling's load fails": lambda engine, _: engine.side.receive(None, {1}),
}


@pytest.mark.parametrize("happening", HAPPENINGS.values(), ids=HAPPENINGS.keys())
def test_whatever_happens_ends_it(
    engines: Engines, watch: Watch, happening: Callable[[VirtualEngine, Request], object]
) -> None:
    engine, request = answering(engines, watch)
    happening(engine, request)
    engine.step()
    assert not watch.steps[-1]


def test_no_step_is_quiet_while_the_pool_is_resized(engines: Engines, watch: Watch) -> None:
    """It counts steps, also while a pin keeps it from going on."""
    engine = engines(
        step_seconds=FAST, gpu_blocks=200, cpu_slots=64, resizes=Resizes(64, 8), max_model_len=700
    )
    pinned = engine.add(tokens(80), 1, hints={"cpu_offload_pin_seconds": 60.0})
    step_until(engine, pinned.is_finished)
    engine.add(tokens(8, 900), 600)
    step_until(engine, lambda: watch.steps[-2:] == [True] * 2)
    target = engine.side._resizing._target
    with target._lock:  # as if memory were short: an operator is refused what is pinned
        target._asked = target._target = 8
    step_until(engine, lambda: engine.side._resizing.is_busy, max_steps=20)
    watch.steps.clear()
    for _ in range(50):
        engine.step()
    assert engine.side._resizing.is_busy and not any(watch.steps)


def test_it_ends_with_time(engines: Engines, watch: Watch) -> None:
    """Where steps take long, no two are quiet in a row for more than a quarter of a second."""
    engine, _ = answering(engines, watch, step_seconds=0.03)
    watch.steps.clear()
    for _ in range(100):
        engine.step()
    assert longest_run(watch) == 8
