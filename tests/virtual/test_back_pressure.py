"""Restores that wait for a busy link without GPU blocks, on vLLM's real scheduler."""

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import LOAD, StepPlan
from offload.scheduler import back_pressure, costs
from offload.scheduler.back_pressure import BackPressure
from offload.scheduler.costs import LinkCost
from offload.scheduler.offer import QUEUED
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, run_seed
from offload.testing.virtual.run import draw_kind
from tests.virtual.driver import (
    LOADING,
    Counts,
    Engines,
    come_to_rest,
    forget_gpu,
    hold,
    serve,
    step_until,
    tokens,
)
from tests.virtual.test_why import note_of

BLOCK = 4
LENGTH = 30
"""Blocks of a prompt: a fifth of the GPU's. A step computes eight blocks, and takes a second."""
SECONDS_PER_BLOCK = 0.12
"""Of a load; to compute a block takes a little longer."""


@pytest.fixture(autouse=True)
def _short_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_TOKENS", 8 * BLOCK)


@pytest.fixture(params=[False, True], ids=["in step", "overlapped"])
def make(request: pytest.FixtureRequest, engines: Engines) -> Engines:
    """The pool has six prompts and the GPU none; what loads and steps take is known."""

    def made(num: int = 6, **settings: Any) -> VirtualEngine:
        defaults = {"gpu_blocks": 151, "cpu_slots": 300, "chunk": 8 * BLOCK, "restore": "auto"}
        engine = engines(**defaults | settings, overlapped=request.param)
        for number in range(num):
            serve(engine, prompt(number))
        forget_gpu(engine)
        link, block_bytes = engine.side.costs.link(LOAD), engine.side._common.block_bytes
        for num_blocks in (1, 4) * 20:
            link.add(num_blocks * block_bytes, num_blocks * SECONDS_PER_BLOCK, engine.clock())
        return engine

    return made


def prompt(number: int) -> list[int]:
    return tokens(LENGTH * BLOCK + 1, 1 + number)


def come(engine: VirtualEngine, num: int = 6, **options: Any) -> list[Request]:
    return [engine.add(prompt(number), 1, **options) for number in range(num)]


def loading(requests: list[Request]) -> list[int]:
    return [number for number, request in enumerate(requests) if request.status is LOADING]


def watch_restores(engine: VirtualEngine) -> list[str]:
    """Whose restores begin from now on."""
    begun: list[str] = []
    build = engine.side.build_plan

    def watched(step: Any) -> StepPlan:
        plan = build(step)
        begun.extend(order.request_id or "" for order in plan.orders if order.route == LOAD)
        return plan

    engine.side.build_plan = watched  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("hints", [{}, {"cpu_offload_load": True}], ids=["chosen", "asked for"])
def test_while_the_link_is_busy_others_wait_without_blocks(make: Engines, hints: dict[str, Any]) -> None:
    engine = make()
    counts, begun = Counts(engine), watch_restores(engine)
    hold(engine, LOAD)
    requests = come(engine, hints=hints)
    other = engine.add(tokens(2 * BLOCK, 99), 1)
    engine.step()
    assert loading(requests) == [0, 1]
    assert engine.side.offer(requests[2], 0) == QUEUED
    assert other.num_computed_tokens, "who is to compute goes on"
    step_until(engine, lambda: len(loading(requests)) > 2)
    assert loading(requests) == [0, 1, 2], "when the link has five steps left"
    come_to_rest(engine)
    restored = [request for request in requests if request.request_id in begun]
    assert begun == [request.request_id for request in restored], "their order is that in which they came"
    assert requests[:3] == restored[:3] and (not hints or restored == requests)
    assert counts["restored_tokens"] == len(restored) * LENGTH * BLOCK
    held = [note_of(engine, request).held for request in restored]
    assert held[:2] == [0, 0] and held[2] > 0 and (not hints or held == sorted(held))


def test_what_is_always_loaded_takes_what_there_is(make: Engines) -> None:
    engine = make(restore="always")
    hold(engine, LOAD)
    requests = come(engine)
    engine.step()
    assert loading(requests) == [0, 1, 2, 3]
    come_to_rest(engine)


def test_the_link_has_something_to_do_as_long_as_anybody_waits(make: Engines) -> None:
    engine = make()
    for copier in engine.copiers:
        copier._schedule = CopySchedule(bytes_per_poll=8 * engine.side._common.block_bytes)
    requests = come(engine)
    engine.step()
    most = idle = 0
    while any(request.status is not LOADING and not request.num_computed_tokens for request in requests):
        engine.step()
        most = max(most, len(loading(requests)))
        idle += not loading(requests)
    assert most <= 3 and not idle
    come_to_rest(engine)


@pytest.mark.parametrize("blocks_per_step", [17, 30, 44])
def test_a_burst_is_over_as_soon_as_if_nobody_waited(
    engines: Engines, blocks_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link moves so many blocks in a step, and the GPU computes eight: both have some to do."""
    num, ended = 40, []
    for least in (back_pressure._MOST_FILLING, inf):
        monkeypatch.setattr(back_pressure, "_MOST_FILLING", least)
        engine = engines(gpu_blocks=480, cpu_slots=2000, chunk=8 * BLOCK, restore="auto", max_num_seqs=64)
        rngs = [random.Random(number) for number in range(num)]
        prompts = [[rng.randrange(512) for _ in range(16 * BLOCK + 1)] for rng in rngs]
        for each in prompts:
            serve(engine, each)
        forget_gpu(engine)
        link, block_bytes = engine.side.costs.link(LOAD), engine.side._common.block_bytes
        pace = CopySchedule(bytes_per_poll=blocks_per_step * block_bytes)
        engine.copiers[0]._schedule = pace
        for num_blocks in (1, 4) * 20:
            link.add(num_blocks * block_bytes, num_blocks / blocks_per_step, engine.clock())
        monkeypatch.setattr(link, "add", lambda *_, link=link, now=engine.clock: tell_time(link, now()))
        began, counts = engine.clock(), Counts(engine)
        requests = [engine.add(each, 1) for each in prompts]
        times: dict[str, float] = {}
        while len(times) < num:
            engine.step()
            now = engine.clock() - began
            times |= {
                each.request_id: times.get(each.request_id, now) for each in requests if each.is_finished()
            }
        ended.append((sum(times.values()), max(times.values())))
        assert counts["restored_tokens"], "nothing was loaded"
        assert any(note_of(engine, each).held for each in requests) is (least is not inf)
        come_to_rest(engine)
    assert all(waiting <= free for waiting, free in zip(*ended, strict=True)), ended


def tell_time(link: LinkCost, now: float) -> None:
    """A load has ended; how fast the link is stays as it was."""
    link.measured_at = now


def test_where_too_many_wait_they_take_gpu_blocks_as_they_come(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With six that have come the third of them waits, as four wait with it; with seven it does not."""
    monkeypatch.setattr(back_pressure, "_MOST_BLOCKS", 4 * back_pressure._EACH)
    engine = make()
    hold(engine, LOAD)
    requests = come(engine, hints={"cpu_offload_load": True})
    engine.step()
    assert loading(requests) == [0, 1]
    engine.add(tokens(2 * BLOCK, 99), 1)
    engine.step()
    assert loading(requests) == [0, 1, 2, 3]
    come_to_rest(engine)
    assert all(request.is_finished() for request in requests)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STUCK, Fault.END_SHORT])
def test_after_a_fault_nobody_waits_for_what_is_over(make: Engines, fault: Fault) -> None:
    engine = make()
    engine.copiers[0].force(LOAD, fault)
    requests = come(engine)
    engine.step()
    assert loading(requests) == [0, 1]
    come_to_rest(engine)
    assert note_of(engine, requests[2]).held, "it waited until the fault was known"
    assert all(request.is_finished() for request in requests)


@pytest.mark.parametrize("kind", ["plain", "draft", "replica", "tier", "hand-offs"])
def test_however_long_they_wait_all_come_to_an_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one restore is under way at a time."""
    num_told = 0

    def is_busy(self: BackPressure) -> bool:
        nonlocal num_told
        num_told += self._num_filling > 0
        return self._num_filling > 0

    monkeypatch.setattr(BackPressure, "_is_busy", is_busy)
    for seed in (4202, 4204, 4205):
        settings = replace(draw_kind(kind, seed, random.Random(seed)), restore="auto")
        run_seed(seed, turns=100, settings=settings)
    assert num_told
