"""Does the replay of a small trace, and of a few documents, count what it should?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_replay import ReplayEngine, ReplaySettings
from benchmarks.engine_replay import __main__ as engine_replay
from benchmarks.engine_replay.driver import replay
from benchmarks.engine_replay.workloads import ReplayRequest, fits, of_trace
from offload.observe.trace import TraceRequest
from tests.benchmarks.conftest import Ran, Refusal, Run

COLUMNS = [
    *("connector", "workload", "requests", "steps", "scheduler_ms_per_request"),
    *("step_ms_p50", "step_ms_p99", "step_ms_max"),
    *("hit_tokens_gpu", "hit_tokens_cpu", "prompt_tokens", "ttft_p50", "ttft_p99"),
]
LINE = {"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]}
USERS, TURNS = 6, 4


def conversations() -> Iterator[dict[str, Any]]:
    """Users take turns; each prompt is 512 tokens longer than the same user's last one."""
    for turn in range(TURNS):
        for user in range(USERS):
            yield {
                "timestamp": 1000 * (turn * USERS + user),
                "input_length": 512 * (turn + 1) + 100,
                "output_length": 20,
                "hash_ids": [100 * user + block for block in range(turn + 2)],
            }


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def by_connector(ran: Ran) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["workload"], row["connector"]): row for row in ran.rows}


def test_a_trace_through_every_connector(tmp_path: Path, run: Run) -> None:
    too_long = {**LINE, "timestamp": 99_000, "input_length": 9000, "hash_ids": list(range(17))}
    trace = write(tmp_path / "small.jsonl", *conversations(), too_long)
    sizes = ["--gpu-blocks", "300", "--cpu-blocks", "2000", "--max-model-len", "8192"]
    ran = run(engine_replay, "--workload", str(trace), "--same-process", *sizes)
    assert "1 of 25 requests are skipped" in ran.out

    rows = by_connector(ran)
    assert [connector for _, connector in rows] == ["none", "native", "simple", "offload"]
    for row in rows.values():
        assert list(row)[: len(COLUMNS)] == COLUMNS
        assert row["requests"] == USERS * TURNS and row["skipped"] == 1
        assert row["prompt_tokens"] == sum(line["input_length"] for line in conversations())
        assert 0 < row["ttft_p50"] <= row["ttft_p99"] < row["virtual_seconds"]
        assert row["virtual_seconds"] >= USERS * TURNS - 1  # arrivals are a second apart
        assert row["most_waiting"] == 1

    none = rows.pop(("small", "none"))
    assert none["hit_tokens_cpu"] == 0 and none["connector_ms_per_request"] is None
    reusable = 512 * USERS * sum(range(TURNS))
    for row in rows.values():
        assert row["hit_tokens_gpu"] + row["hit_tokens_cpu"] == reusable > none["hit_tokens_gpu"]
        assert row["connector_step_ms_max"] > 0
        assert row["ttft_p50"] < none["ttft_p50"]  # a copy is faster than computing


def test_long_documents_stay_on_the_gpu_or_come_back(run: Run) -> None:
    sizes = ["--documents", "3", "--gpu-documents", "1", "--document-tokens", "1600", "--warm-passes", "2"]
    rows = by_connector(run(engine_replay, "--connector", "none,offload", "--rounds", "1", *sizes))
    documents = 3 * 2 * 1600
    for (workload, connector), row in rows.items():
        assert row["requests"] == (6 if workload.endswith("/warm") else 3)
        fitting, restored = workload == "longdoc-fits/warm", workload == "longdoc/warm"
        assert row["hit_tokens_gpu"] == documents * fitting
        assert row["hit_tokens_cpu"] == documents * (restored and connector == "offload")
    assert rows["longdoc/warm", "none"]["times_none"] == 1
    assert rows["longdoc/warm", "offload"]["added_ms_per_request"] is not None
    assert len(rows) == 8


def test_time_goes_by_as_the_model_says() -> None:
    engine = ReplayEngine(ReplaySettings(connector="none", gpu_blocks=100, cpu_blocks=1, max_model_len=1024))
    requests = [
        ReplayRequest("first", [], 400, 3, arrival=1.0),
        ReplayRequest("late", [], 40, 1, arrival=9.0),
    ]
    try:
        result = replay(engine, iter(requests))
    finally:
        engine.close()
    model = engine.settings.time
    prefills = [model.step_seconds + tokens / model.tokens_per_second for tokens in (400, 40)]
    assert list(result.ttft) == pytest.approx(prefills)
    assert len(result.step_ns) == 3 + 1 + 1 + 1  # a step after each request tells the worker of its end
    assert result.virtual_seconds == pytest.approx(9.0 + prefills[1], abs=0.01)


def test_equal_ids_are_equal_hashes() -> None:
    trace = [TraceRequest(8.0, 1030, 1, (7, 8)), TraceRequest(9.0, 1560, 1, (7, 8, 9))]
    first, second = of_trace(trace, 16, speed=2.0)
    assert len(first.hashes) == 64 and len(second.hashes) == 97  # one block after the last id
    assert first.hashes == second.hashes[:64]
    assert len(set(second.hashes)) == 97 and {len(each) for each in second.hashes} == {32}
    assert (first.arrival, second.arrival) == (4.0, 4.5)
    assert fits(trace[0], 1031, 100, 16) and not fits(trace[0], 1030, 100, 16)
    assert not fits(trace[0], 2000, 65, 16)


def test_an_unknown_connector_is_refused(refusal: Refusal) -> None:
    assert "'ours': must be one of none, native" in refusal(engine_replay, "--connector", "none,ours")


def test_an_empty_trace_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    empty = str(write(tmp_path / "empty.jsonl"))
    assert "has no requests" in refusal(engine_replay, "--workload", empty)
