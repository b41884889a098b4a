"""Traces: what is read, and that every malformed line is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OffloadError
from offload.observe.trace import TraceError, TraceRequest, read_trace

LINE = {"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", errors="surrogateescape")
    return path


def test_partial_blocks_of_a_trace_have_no_id(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path / "t.jsonl", {**LINE, "timestamp": 1500}))
    assert request == TraceRequest(1.5, 1030, 3, (1, 2))
    assert len(read_trace(write(tmp_path / "t.jsonl", LINE, LINE, "", "never read"), limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("{", "'{' is not JSON"),
        ("\udcff\udcfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must be a JSON object"),
        ({**LINE, "timestamp": "soon"}, "timestamp='soon'"),
        ({**LINE, "timestamp": -1}, "timestamp=-1"),
        ({**LINE, "timestamp": 10**400}, "timestamp=1000"),
        ({**LINE, "timestamp": float("nan")}, "timestamp=nan"),
        ({**LINE, "input_length": 1.5}, "input_length=1.5"),
        ({**LINE, "input_length": True}, "input_length=True"),
        ({**LINE, "output_length": 0}, "output_length=0"),
        ({**LINE, "hash_ids": [1, "2"]}, "hash_ids="),
        ({**LINE, "hash_ids": [1]}, "has 1 ids"),
        ({**LINE, "stop": 7}, "stop='7': must be text"),
        ({**LINE, "api_ms": -1}, "api_ms=-1"),
        ({**LINE, "session": [1]}, "session='[1]': must be a whole number or text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: dict[str, Any] | str, value: str) -> None:
    path = write(tmp_path / "bad.jsonl", LINE, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}, line 2: " in str(caught.value) and value in str(caught.value)


def test_how_and_when_answers_ended_is_read(tmp_path: Path) -> None:
    told, silent = read_trace(write(tmp_path / "t.jsonl", {**LINE, "stop": "tool", "api_ms": 2500}, LINE))
    assert (told.stop, told.answer_seconds) == ("tool", 2.5)
    assert (silent.stop, silent.answer_seconds, silent.session) == (None, 0, None)


@pytest.mark.parametrize("session", [690, "a"])
def test_sessions_are_read(tmp_path: Path, session: int | str) -> None:
    (request,) = read_trace(write(tmp_path / "t.jsonl", {**LINE, "session": session}))
    assert request.session == session


@pytest.mark.parametrize("key", LINE)
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "bad.jsonl", {name: value for name, value in LINE.items() if name != key})
    with pytest.raises(TraceError, match=f"line 1 lacks {key}; give a trace of record_trace"):
        read_trace(path)


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    lines = [{**LINE, "timestamp": timestamp} for timestamp in (30, 10, 20.5)]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert [request.timestamp_seconds for request in trace] == [0.01, 0.0205, 0.03]


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no requests") as caught:
        read_trace(write(tmp_path / "t.jsonl", ""))
    assert isinstance(caught.value, OffloadError)
