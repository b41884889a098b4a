"""Requests that wait for restores of others, on vLLM's real scheduler: who they wait for is found once."""

from collections.abc import Callable, Sequence

import pytest

from offload.ledger import Restore
from offload.restore_index import RestoreIndex
from offload.vllm.virtual import VirtualEngine
from tests.vllm.driver import LOAD, LOADING, come_to_rest, hold, release, serve, step_until, tokens, warm

SYSTEM = tokens(16)
DOCUMENTS = [SYSTEM + tokens(40, first) for first in range(1, 6)]


@pytest.fixture
def engine(engines: Callable[..., VirtualEngine]) -> VirtualEngine:
    """The pool has the documents, the GPU only how they begin; all of them are being restored."""
    engine = engines(gpu_blocks=160, cpu_slots=160, max_num_seqs=40)
    for document in DOCUMENTS:
        serve(engine, document)
    warm(engine, SYSTEM)
    serve(engine, [*SYSTEM, 1])
    hold(engine, LOAD)
    restored = [engine.add([*document, 2], 1) for document in DOCUMENTS]
    step_until(engine, lambda: all(request.status == LOADING for request in restored))
    return engine


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
