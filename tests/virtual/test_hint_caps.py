"""``max_load_tokens`` and ``max_offload_tokens`` beside vLLM's own connector, on vLLM's real scheduler."""

from typing import Any

import pytest

from offload.messages import LOAD, STORE
from offload.testing.virtual import VirtualEngine, VirtualSettings
from tests.virtual.driver import (
    Engines,
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

BLOCK = 4
BLOCK_BYTES = VirtualSettings().slot_bytes
PROMPT = 41
CONNECTORS = ["offload", "native"]
ROOM = {"gpu_blocks": 40, "cpu_slots": 80, "block_size": BLOCK, "chunk": 16}


def copied(engine: VirtualEngine, way: Any) -> int:
    """Blocks so far."""
    (copier,) = engine.copiers
    return copier.copied[way] // BLOCK_BYTES


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("num_local", [0, 8])
@pytest.mark.parametrize("most", [0, 1, 3, 4, 7, 8, 31, 32, 33, 40, 10**6, 2**63])
def test_so_much_is_restored(connector: str, num_local: int, most: int, engines: Engines) -> None:
    """Counted from what the GPU has, rounded down to blocks."""
    engine = engines(connector=connector, **ROOM)
    warm(engine, tokens(PROMPT))
    if num_local:
        serve(engine, tokens(num_local + 1))
    loaded, computed = copied(engine, LOAD), watch(engine)
    request = serve(engine, tokens(PROMPT), hints={"max_load_tokens": most})
    expected = min(most // BLOCK, (PROMPT - num_local) // BLOCK)
    assert copied(engine, LOAD) - loaded == expected
    assert computed[request.request_id] == PROMPT - num_local - expected * BLOCK
    engine.audit.check_drained()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("store_decode_blocks", [False, True])
@pytest.mark.parametrize("most", [0, 1, 3, 4, 7, 8, 39, 40, 41, 44, 60, 69, 10**6, 2**63])
def test_so_much_is_stored(connector: str, store_decode_blocks: bool, most: int, engines: Engines) -> None:
    """Leading tokens of prompt and answer, rounded down to blocks."""
    engine = engines(connector=connector, store_decode_blocks=store_decode_blocks, **ROOM)
    request = serve(engine, tokens(PROMPT), 30, hints={"max_offload_tokens": most})
    whole = request.num_tokens - 1 if store_decode_blocks else PROMPT
    assert copied(engine, STORE) == min(most, whole) // BLOCK
    engine.audit.check_drained()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("value", [True, -1, "8", 8.0, [8]], ids=str)
@pytest.mark.parametrize("key", ["max_load_tokens", "max_offload_tokens"])
def test_a_wrong_value_is_none(connector: str, key: str, value: Any, engines: Engines) -> None:
    engine = engines(connector=connector, **ROOM)
    serve(engine, tokens(PROMPT), hints={key: value})
    assert copied(engine, STORE) == PROMPT // BLOCK
    assert engine.reset(connector=False)
    serve(engine, tokens(PROMPT), hints={key: value})
    assert copied(engine, LOAD) == PROMPT // BLOCK


@pytest.mark.parametrize("most", [8, 24])
def test_an_answer_is_stored_up_to_there_whatever_its_runs(most: int, engines: Engines) -> None:
    """Runs of 3 blocks do not divide what may be stored: the rest of it is, when the request ends."""
    engine = engines(answer_run=3, answer_interval=2, **ROOM)
    request = serve(engine, tokens(5), 60, hints={"max_offload_tokens": most})
    assert depth_of(engine, request) == most // BLOCK


def test_a_request_with_all_it_may_store_is_not_looked_at(engines: Engines) -> None:
    engine = engines(answer_run=3, **ROOM)
    backlog = engine.side.stores.backlog
    request = engine.add(tokens(PROMPT), 60, hints={"max_offload_tokens": 30})
    step_until(engine, lambda: depth_of(engine, request) == 7 and request.num_output_tokens > 1)
    num_looks = 0
    look = backlog.look

    def counted(*args: Any, **options: Any) -> None:
        nonlocal num_looks
        num_looks += 1
        look(*args, **options)

    backlog.look = counted  # type: ignore[method-assign]
    step_until(engine, request.is_finished)
    assert num_looks == 0
    come_to_rest(engine)
    assert depth_of(engine, request) == 7


def test_nobody_waits_for_what_it_may_not_load(engines: Engines) -> None:
    """Another request's restore is bringing the same blocks, and does not end."""
    engine = engines(**ROOM)
    warm(engine, tokens(PROMPT))
    hold(engine, LOAD)
    first = engine.add(tokens(PROMPT), 1)
    step_until(engine, lambda: bool(engine.jobs))
    engine.add(tokens(PROMPT), 1, hints={"max_load_tokens": BLOCK - 1})
    capped = engine.add(tokens(PROMPT), 1, hints={"max_load_tokens": BLOCK - 1})
    step_until(engine, capped.is_finished)
    assert not first.is_finished()
    release(engine)
    step_until(engine, first.is_finished)
    come_to_rest(engine)


def test_what_was_not_restored_is_not_stored_again(engines: Engines) -> None:
    engine = engines(**ROOM)
    warm(engine, tokens(PROMPT))
    stored = copied(engine, STORE)
    serve(engine, tokens(PROMPT), hints={"max_load_tokens": 8})
    assert copied(engine, STORE) == stored
