"""A trace recorded from vLLM's real scheduler is what was asked, with equal ids where prefixes are equal."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offload import ConfigError
from offload.observe.trace import read_trace
from offload.sizing.capacity import size_pool
from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import serve, step_until, tokens

SIZES = {"gpu_blocks": 100, "cpu_slots": 200, "block_size": 64, "chunk": 512}


def test_recorded_requests_share_ids_where_they_share_prefixes(
    tmp_path: Path, engines: Callable[..., VirtualEngine]
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = engines(record_trace=str(path), **SIZES)
    shared, other = tokens(1024), tokens(600, first=9)
    serve(engine, shared + tokens(700, first=1), 70)
    serve(engine, shared + tokens(100, first=2), 5)
    serve(engine, other, 3)
    serve(engine, shared, 1, salt="another tenant")
    gone = engine.add(shared + other, 20)
    step_until(engine, lambda: gone.num_computed_tokens > 0)
    engine.abort(gone.request_id)
    waiting = engine.add(shared, 20)
    engine.abort(waiting.request_id)  # was never admitted
    engine.drain()
    engine.close()

    trace = read_trace(path)
    lengths = [(each.input_length, each.output_length) for each in trace]
    assert lengths == [(1724, 70), (1124, 5), (600, 3), (1024, 1), (1624, 1)]
    stops = [each.stop for each in trace]
    assert stops[0] is not None and stops == [stops[0]] * 4 + [None], "the last one had no answer yet"
    first, second, third, salted, aborted = (each.hash_ids for each in trace)
    assert [len(first), len(second), len(third), len(salted), len(aborted)] == [3, 2, 1, 2, 3]
    assert first[:2] == second == aborted[:2]
    assert len({*first, *third, *salted, aborted[2]}) == 3 + 1 + 2 + 1
    assert size_pool(trace, 64).rows[-1].hit_rate == 4 / 11
    assert set(path.read_text()) <= set('{}[]":, 0123456789\n_abcdefghijklmnopqrstuvwxyz')


def test_a_block_size_that_does_not_divide_is_refused_at_start(
    tmp_path: Path, engines: Callable[..., VirtualEngine]
) -> None:
    with pytest.raises(ConfigError, match=r"the block size is 48, .* use --block-size 16"):
        engines(record_trace=str(tmp_path / "t.jsonl"), **{**SIZES, "block_size": 48})
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_refused_at_start(engines: Callable[..., VirtualEngine]) -> None:
    with pytest.raises(ConfigError, match="there is no directory /nowhere"):
        engines(record_trace="/nowhere/t.jsonl", **SIZES)
