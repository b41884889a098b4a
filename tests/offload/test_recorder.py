"""Recorded traces read back as what was served, and no fault in writing is anybody's but the recorder's."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload import ConfigError
from offload.recorder import TraceRecorder
from offload.trace import TraceRequest, read_trace

BLOCK = 16


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> TraceRecorder:
    return TraceRecorder(tmp_path / "trace.jsonl", BLOCK, clock)


def hashes(num_tokens: int, first: int = 0) -> list[bytes]:
    return [(first + index).to_bytes(8, "big") * 4 for index in range(num_tokens // BLOCK)]


def record(recorder: TraceRecorder, num_prompt: int, first: int = 0, arrival: float = 100.0) -> None:
    recorder.record(arrival, num_prompt, 7, hashes(num_prompt + 7, first))
    recorder.check_invariants()


def test_a_recorded_trace_is_read_back(recorder: TraceRecorder) -> None:
    record(recorder, 1030, arrival=101.5)
    record(recorder, 511, arrival=100.25)
    recorder.record(102.0, 512, 0, hashes(512))  # aborted before its first token
    recorder.flush()
    ids = (31 >> 1, 63 >> 1)
    assert read_trace(recorder.path) == [
        TraceRequest(0.25, 511, 7, ()),
        TraceRequest(1.5, 1030, 7, ids),
        TraceRequest(2.0, 512, 1, ids[:1]),
    ]


@pytest.mark.parametrize("block_size", [1, 16, 128, 256, 512])
def test_an_id_is_the_hash_at_its_end(block_size: int, tmp_path: Path, clock: Clock) -> None:
    chain = [bytes([255, 255]) + index.to_bytes(30, "little") for index in range(1600 // block_size)]
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_size, clock)
    recorder.record(100.0, 1100, 500, chain)
    recorder.flush()
    ends = [chain[512 // block_size - 1], chain[1024 // block_size - 1]]
    ids = json.loads((tmp_path / "t.jsonl").read_text())["hash_ids"]
    assert ids == [int.from_bytes(end[:8], "big") >> 1 for end in ends]
    assert all(0 <= each < 1 << 63 for each in ids)


@pytest.mark.parametrize("block_size", [48, 1024, 500])
def test_blocks_that_do_not_end_with_ids_are_refused(block_size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the block size is {block_size}, .* use --block-size 16"):
        TraceRecorder(tmp_path / "t.jsonl", block_size)


def test_what_was_not_hashed_is_left_out(recorder: TraceRecorder) -> None:
    recorder.record(100.0, 1024, 1, hashes(1008))
    recorder.flush()
    assert not recorder.path.exists()


def test_an_arrival_before_the_recording_counts_as_its_beginning(recorder: TraceRecorder) -> None:
    record(recorder, 600, arrival=99.0)
    recorder.flush()
    assert read_trace(recorder.path)[0].timestamp_seconds == 0


def test_lines_are_written_together_every_few_seconds(recorder: TraceRecorder, clock: Clock) -> None:
    record(recorder, 600)
    clock.now += 4.9
    record(recorder, 600)
    assert not recorder.path.exists()
    clock.now += 0.2
    record(recorder, 600)
    assert len(read_trace(recorder.path)) == 3
    record(recorder, 600)
    assert len(read_trace(recorder.path)) == 3
    clock.now -= 1000  # somebody set the clock back
    record(recorder, 600)
    assert len(read_trace(recorder.path)) == 5


def test_an_existing_file_is_left_alone(
    recorder: TraceRecorder, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.path.write_text("an earlier run")
    second = TraceRecorder(recorder.path, BLOCK, clock)  # another replica
    for each in (recorder, second):
        record(each, 600)
        each.flush()
    assert (tmp_path / "trace.jsonl").read_text() == "an earlier run"
    assert [recorder.path.name, second.path.name] == ["trace.2.jsonl", "trace.3.jsonl"]
    assert len(read_trace(recorder.path)) == len(read_trace(second.path)) == 1
    assert str(recorder.path) in caplog.text and str(second.path) in caplog.text


def remove(path: Path) -> None:
    path.unlink()


def fill_disk(path: Path) -> None:
    """What /dev/full does to every write."""
    path.unlink()
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("fault", [remove, fill_disk])
def test_a_fault_ends_the_recording_with_one_warning(
    fault: Callable[[Path], None],
    recorder: TraceRecorder,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    record(recorder, 600)
    recorder.flush()
    fault(recorder.path)
    for _ in range(3):
        clock.now += 10
        record(recorder, 600)
        recorder.flush()
    levels = [entry.levelname for entry in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert str(recorder.path) in caplog.text
    assert "has ended" in caplog.text


def test_a_directory_that_went_away_is_a_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(tmp_path / "gone" / "t.jsonl", BLOCK, clock)
    record(recorder, 600)
    recorder.flush()
    recorder.check_invariants()
    assert "has ended" in caplog.text


def test_a_write_that_ends_short_leaves_whole_lines(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(recorder, 600)
    recorder.flush()
    before = recorder.path.read_bytes()
    real_open = Path.open

    class Filling:
        """The disk takes ten bytes and no more."""

        def __init__(self, path: Path) -> None:
            self.file = real_open(path, "r+b", buffering=0)
            self.room = 10
            self.seek, self.truncate = self.file.seek, self.file.truncate

        def write(self, content: bytes) -> int | None:
            taken, self.room = content[: self.room], 0
            return os.write(self.file.fileno(), taken)

        def __enter__(self) -> "Filling":
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, *args, **kwargs: Filling(path))
        record(recorder, 600)
        recorder.flush()
    assert recorder.path.read_bytes() == before
    assert "No space left" in caplog.text
