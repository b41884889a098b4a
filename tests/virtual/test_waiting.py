"""Requests that wait for restores of others, on vLLM's real scheduler: who they wait for is found once."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import LOAD
from offload.scheduler.offer import NOTHING, Why
from offload.scheduler.restore import Restore
from offload.scheduler.restore_index import RestoreIndex
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine, run_seed
from tests.virtual.driver import (
    LOADING,
    come_to_rest,
    depth_of,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
    watch,
)

SYSTEM = tokens(16)
DOCUMENTS = [SYSTEM + tokens(40, first) for first in range(1, 6)]


def restoring(
    engines: Callable[..., VirtualEngine], faults: Sequence[Fault] = (), **settings: Any
) -> tuple[VirtualEngine, list[Request]]:
    """The pool has the documents, the GPU only how they begin; all of them are being restored."""
    engine = engines(gpu_blocks=160, cpu_slots=160, max_num_seqs=40, **settings)
    for document in DOCUMENTS:
        serve(engine, document)
    warm(engine, SYSTEM)
    serve(engine, [*SYSTEM, 1])
    hold(engine, LOAD)
    engine.copiers[0].force(LOAD, *faults)
    restored = [engine.add([*document, 2], 3) for document in DOCUMENTS]
    step_until(engine, lambda: all(request.status == LOADING for request in restored))
    return engine, restored


@pytest.fixture
def engine(engines: Callable[..., VirtualEngine]) -> VirtualEngine:
    return restoring(engines)[0]


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that were looked up in the index."""
    positions: list[int] = []
    find = RestoreIndex.find

    def watched(index: RestoreIndex, chain: Sequence[bytes], position: int) -> Restore | None:
        positions.append(position)
        return find(index, chain, position)

    monkeypatch.setattr(RestoreIndex, "find", watched)
    return positions


def test_a_request_that_waits_is_looked_up_once(engine: VirtualEngine, finds: list[int]) -> None:
    num_loads = engine.counts["loads"]
    waiting = [engine.add([*document, number], 1) for document in DOCUMENTS for number in (3, 4, 5)]
    engine.step()
    assert len(finds) == len(waiting)
    for _ in range(10):
        engine.step()
    assert len(finds) == len(waiting)
    release(engine)
    step_until(engine, lambda: all(request.is_finished() for request in waiting))
    assert engine.counts["loads"] == num_loads, "somebody loaded what was on its way"
    come_to_rest(engine)


def test_requests_that_give_up_waiting_leave_nothing(engine: VirtualEngine, finds: list[int]) -> None:
    waiting = [engine.add([*document, 3], 1) for document in DOCUMENTS]
    step_until(engine, lambda: len(finds) == len(waiting))
    for request in waiting:
        engine.abort(request.request_id)
    come_to_rest(engine)  # which looks for what they left


def test_a_follower_of_a_restore_that_is_reset_loads_nothing_of_it(engine: VirtualEngine) -> None:
    waiting = engine.add([*DOCUMENTS[0], 3], 1)
    engine.step()
    engine.reset()
    num_loads = engine.counts["loads"]
    release(engine)
    step_until(engine, waiting.is_finished)
    assert engine.counts["loads"] == num_loads
    come_to_rest(engine)


class TestManyEndInOneStep:
    """What they leave to do is bounded per step, and the rest is carried over."""

    @pytest.fixture
    def restored(self, engines: Callable[..., VirtualEngine]) -> tuple[VirtualEngine, list[Request]]:
        return restoring(engines, step_restores=1)

    def test_so_many_blocks_are_handed_over_and_nobody_loads_them_again(
        self, restored: tuple[VirtualEngine, list[Request]]
    ) -> None:
        engine, _ = restored
        waiting = [engine.add([*document, number], 1) for document in DOCUMENTS for number in (3, 4)]
        engine.step()
        restores = list(engine.side.restores)
        num_shared = sampled(engine, lambda: sum(restore.num_shared for restore in restores))
        num_loads = engine.counts["loads"]
        release(engine)
        step_until(engine, lambda: all(request.is_finished() for request in waiting))
        steps = [after - before for before, after in pairwise(num_shared)]
        assert max(steps) == 1, f"{steps} blocks were handed over in a step"
        assert engine.counts["loads"] == num_loads, "somebody loaded what had arrived"
        come_to_rest(engine)

    def test_who_asks_before_the_restored_request_goes_on_waits_for_it(
        self, restored: tuple[VirtualEngine, list[Request]]
    ) -> None:
        engine, requests = restored
        waiting = [engine.add([*document, 3], 1) for document in DOCUMENTS]
        engine.step()
        release(engine)
        step_until(engine, lambda: len(engine.side.restores._landed) > 1)
        landed = [request.request_id in engine.side.restores._landed for request in requests]
        answers = [engine.side.offer(request, len(SYSTEM)).tokens for request in waiting]
        assert [answer is None for answer in answers] == landed
        come_to_rest(engine)

    def test_so_many_pins_end(self, restored: tuple[VirtualEngine, list[Request]]) -> None:
        engine, _ = restored
        num_pins = sampled(engine, lambda: len(engine.side.allocator._pins))
        come_to_rest(engine)
        num_pins.append(len(engine.side.allocator._pins))
        steps = [before - after for before, after in pairwise(num_pins)]
        assert steps.count(1) == len(DOCUMENTS) and max(steps) == 1, f"{steps} pins ended in a step"

    def test_so_many_of_them_are_told(self, engines: Callable[..., VirtualEngine]) -> None:
        """And no more requests than these go on in the step after it."""
        engine, requests = restoring(engines, step_landed=2, num_ranks=2)
        num_jobs = sampled(engine, lambda: len(engine.jobs))
        num_loading = sampled(engine, lambda: sum(request.status == LOADING for request in requests))
        come_to_rest(engine)
        steps = [before - after for before, after in pairwise(num_jobs)]
        assert max(steps) == 2, f"{steps} loads ended in a step"
        steps = [before - after for before, after in pairwise(num_loading)]
        assert steps.count(2) == 2 and max(steps) == 2, f"{steps} requests went on in a step"

    def test_what_was_not_told_before_a_reset_is_not_served(
        self, engines: Callable[..., VirtualEngine]
    ) -> None:
        engine, requests = restoring(engines, step_landed=1)
        release(engine)
        step_until(engine, lambda: len(list(engine.side.restores)) < len(requests))
        waiting = [restore.request for restore in engine.side.restores]
        assert waiting, "all were told at once"
        engine.reset()
        computed = watch(engine)
        step_until(engine, lambda: all(request.is_finished() for request in waiting))
        num_restored = len(DOCUMENTS[0]) - len(SYSTEM)
        assert all(computed[request.request_id] > num_restored for request in waiting)
        come_to_rest(engine)

    def test_nobody_is_offered_kv_while_bad_slots_are_yet_to_be_dropped(
        self, engines: Callable[..., VirtualEngine]
    ) -> None:
        engine, requests = restoring(engines, [Fault.FAIL] * len(DOCUMENTS), step_restores=1)
        release(engine)
        step_until(engine, lambda: engine.side.restores.carryover.has_drops)
        late = engine.add([*DOCUMENTS[-1], 9], 1)
        offer = engine.side.offer(late, len(SYSTEM))
        assert offer == NOTHING[Why.DROPPING], "it was offered what has just failed"
        come_to_rest(engine)
        assert all(request.is_finished() for request in requests)

    def test_what_a_request_stores_behind_a_slot_that_is_dropped_later_is_stored_again(
        self, engines: Callable[..., VirtualEngine]
    ) -> None:
        """It computes all by itself, behind a document that turns out to be bad, and stores at each step."""
        engine, _ = restoring(engines, [Fault.FAIL] * len(DOCUMENTS), step_restores=1)
        ours = engine.add([*DOCUMENTS[-1], *tokens(200, first=9)], 1, hints={"cpu_offload_load": False})
        step_until(engine, lambda: ours.num_computed_tokens > len(DOCUMENTS[-1]))
        release(engine)
        pending, carryover = engine.side.stores.backlog.get(ours.request_id), engine.side.restores.carryover
        assert pending is not None

        def stores_meanwhile() -> bool:
            has_document = depth_of(engine, ours) * engine.settings.block_size >= len(DOCUMENTS[-1])
            return carryover.has_drops and has_document and pending.num_planned > 0

        step_until(engine, stores_meanwhile)
        step_until(engine, ours.is_finished)
        come_to_rest(engine)
        assert depth_of(engine, ours) == (ours.num_tokens - 1) // engine.settings.block_size

    def test_a_request_that_ends_before_it_went_on_hands_nothing_over(
        self, restored: tuple[VirtualEngine, list[Request]]
    ) -> None:
        engine, requests = restored
        waiting = [engine.add([*document, 3], 1) for document in DOCUMENTS]
        engine.step()
        release(engine)
        step_until(engine, lambda: len(engine.side.restores._landed) > 1)
        for request in requests:
            engine.abort(request.request_id)
        assert not engine.side.restores._landed
        step_until(engine, lambda: all(request.is_finished() for request in waiting))
        come_to_rest(engine)

    def test_a_request_that_went_on_is_forgotten(self, restored: tuple[VirtualEngine, list[Request]]) -> None:
        engine, _ = restored
        for document in DOCUMENTS:
            engine.add([*document, 3], 1)
        engine.step()
        release(engine)
        step_until(engine, lambda: len(engine.side.restores._landed) > 1)
        engine.step()
        assert not engine.side.restores._landed, "vLLM has handed over what they brought"
        come_to_rest(engine)


def sampled(engine: VirtualEngine, count: Callable[[], int]) -> list[int]:
    """What ``count`` says at the begin of each step's budget from now on."""
    numbers: list[int] = []
    tidy = engine.side.restores.tidy

    def watched() -> None:
        numbers.append(count())
        tidy()

    engine.side.restores.tidy = watched  # type: ignore[method-assign]
    return numbers


def test_a_request_is_computed_if_the_scheduler_keeps_its_blocks_for_one_behind_it() -> None:
    """vLLM keeps blocks for a request whose restore failed. With priorities its turn may come last of all."""
    assert run_seed(40611033, turns=1000, kind="region").counts["preemptions"]
