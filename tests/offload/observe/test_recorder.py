"""Recorded traces read back as what was served, and no fault in writing is anybody's but the recorder's."""

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from offload import ConfigError
from offload.observe import trace_writer
from offload.observe.recorder import TraceRecorder
from offload.observe.trace import TraceRequest, read_trace

BLOCK = 16
LONG = 60.0
"""Seconds within which a thread has its turn on any machine."""


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
def recorder(tmp_path: Path, clock: Clock) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK, clock)
    yield recorder
    recorder.close(LONG)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A file system that does not answer before this is set."""
    answers = Event()
    append = trace_writer._append

    def hang(path: Path, content: bytes) -> None:
        answers.wait()
        append(path, content)

    monkeypatch.setattr(trace_writer, "_append", hang)
    yield answers
    answers.set()


def hashes(num_tokens: int, first: int = 0) -> list[bytes]:
    return [(first + index).to_bytes(8, "big") * 4 for index in range(num_tokens // BLOCK)]


def write(recorder: TraceRecorder) -> None:
    """All that was recorded, and have it written."""
    recorder.flush()
    assert recorder.wait(LONG)
    recorder.check_invariants()


def record(recorder: TraceRecorder, num_prompt: int, first: int = 0, arrival: float = 100.0) -> None:
    recorder.record(arrival, num_prompt, 7, hashes(num_prompt + 7, first))
    recorder.check_invariants()


def test_a_recorded_trace_is_read_back(recorder: TraceRecorder, clock: Clock) -> None:
    clock.now = 102.0
    record(recorder, 1030, arrival=101.5)
    record(recorder, 511, arrival=100.25)
    recorder.record(102.0, 512, 0, hashes(512))  # aborted before its first token
    write(recorder)
    ids = (31 >> 1, 63 >> 1)
    assert read_trace(recorder.path) == [
        TraceRequest(0.25, 511, 7, (), None, 1.75),
        TraceRequest(1.5, 1030, 7, ids, None, 0.5),
        TraceRequest(2.0, 512, 1, ids[:1]),
    ]


def test_answers_that_ended_alike_have_one_name(tmp_path: Path, clock: Clock) -> None:
    """It is another one in another recording: nobody who tries tokens finds those that it stands for."""
    names = []
    for path in (tmp_path / "one.jsonl", tmp_path / "other.jsonl"):
        recorder = TraceRecorder(path, BLOCK, clock)
        for ending in (((5, 7), None), ((5, 8), None), ((5, 7), None), None):
            recorder.record(100.0, 512, 1, hashes(512), ending)
        write(recorder)
        names.append([each.stop for each in read_trace(path)])
    for first, second, again, unknown in names:
        assert first is not None and second is not None and unknown is None
        assert first == again != second
    assert names[0][0] != names[1][0]


@pytest.mark.parametrize("block_size", [1, 16, 128, 256, 512])
def test_an_id_is_the_hash_at_its_end(block_size: int, tmp_path: Path, clock: Clock) -> None:
    chain = [bytes([255, 255]) + index.to_bytes(30, "little") for index in range(1600 // block_size)]
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_size, clock)
    recorder.record(100.0, 1100, 500, chain)
    write(recorder)
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
    write(recorder)
    assert not recorder.path.exists()


def test_an_arrival_before_the_recording_counts_as_its_beginning(recorder: TraceRecorder) -> None:
    record(recorder, 600, arrival=99.0)
    write(recorder)
    assert read_trace(recorder.path)[0].timestamp_seconds == 0


def test_lines_are_written_together_every_few_seconds(recorder: TraceRecorder, clock: Clock) -> None:
    record(recorder, 600)
    clock.now += 4.9
    record(recorder, 600)
    assert recorder.wait(LONG)
    assert not recorder.path.exists()
    clock.now += 0.2
    record(recorder, 600)
    assert recorder.wait(LONG)
    assert len(read_trace(recorder.path)) == 3
    record(recorder, 600)
    assert recorder.wait(LONG)
    assert len(read_trace(recorder.path)) == 3
    clock.now -= 1000  # somebody set the clock back
    record(recorder, 600)
    assert recorder.wait(LONG)
    assert len(read_trace(recorder.path)) == 5


def test_an_existing_file_is_left_alone(
    recorder: TraceRecorder, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.path.write_text("an earlier run")
    second = TraceRecorder(recorder.path, BLOCK, clock)  # another replica
    for each in (recorder, second):
        record(each, 600)
        write(each)
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
    write(recorder)
    fault(recorder.path)
    for _ in range(3):
        clock.now += 10
        record(recorder, 600)
        write(recorder)
    levels = [entry.levelname for entry in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert str(recorder.path) in caplog.text
    assert "has ended" in caplog.text


def test_a_directory_that_went_away_is_a_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(tmp_path / "gone" / "t.jsonl", BLOCK, clock)
    record(recorder, 600)
    write(recorder)
    recorder.check_invariants()
    assert "has ended" in caplog.text


def test_a_write_that_ends_short_leaves_whole_lines(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(recorder, 600)
    write(recorder)
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
        write(recorder)
    assert recorder.path.read_bytes() == before
    assert "No space left" in caplog.text


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_trace_is_its_owners_alone(recorder: TraceRecorder, umask: int) -> None:
    before = os.umask(umask)
    try:
        record(recorder, 600)
        write(recorder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600


def test_a_file_system_that_hangs_holds_up_nobody(
    recorder: TraceRecorder, stalled: Event, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        clock.now += 10
        record(recorder, 600)
    recorder.close(timeout=0)
    assert "is not written to its end" in caplog.text
    stalled.set()
    assert recorder.wait(LONG), "what was handed over is written all the same"
    assert len(read_trace(recorder.path)) == 3


def test_what_waits_is_bounded(
    recorder: TraceRecorder,
    stalled: Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING_BYTES", 1000)
    for number in range(50):
        record(recorder, 600, number)
        recorder.flush()
        recorder.check_invariants()
    assert 0 < recorder.num_dropped < 50
    stalled.set()
    assert recorder.wait(LONG)
    record(recorder, 600, 50)
    recorder.close(LONG)
    recorder.close(LONG)
    assert len(read_trace(recorder.path)) == 51 - recorder.num_dropped, "it goes on once there is room"
    warnings = [entry.getMessage() for entry in caplog.records]
    assert len(warnings) == 2
    assert "written too slowly" in warnings[0]
    assert f"lacks {recorder.num_dropped} requests" in warnings[1]


def test_much_in_a_short_time_does_not_gather(recorder: TraceRecorder) -> None:
    for number in range(20):
        record(recorder, 512 * 5000, number)  # which looks at how much has gathered
    write(recorder)
    assert len(read_trace(recorder.path)) == 20


def test_the_end_writes_what_there_is(recorder: TraceRecorder) -> None:
    record(recorder, 600)
    recorder.close(LONG)
    record(recorder, 600)
    recorder.close(LONG)
    assert len(read_trace(recorder.path)) == 1


def test_a_process_without_another_thread_goes_on(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        record(recorder, 600)
        recorder.flush()
    record(recorder, 600)
    recorder.close(LONG)
    (entry,) = caplog.records
    assert "has ended" in entry.getMessage()
    assert not recorder.path.exists()


_ENDS_WHILE_WRITING = """
from pathlib import Path
from threading import Event
from offload.observe import recorder
from offload.observe import trace_writer
began = Event()
def hang(path, content):
    began.set()
    Event().wait()
trace_writer._append = hang
writing = recorder.TraceRecorder(Path("trace.jsonl"), 16)
writing.record(0.0, 1, 1, [])
writing.flush()
began.wait()
writing.close(timeout=0)
print("over")
"""


def test_a_process_ends_though_its_file_system_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ENDS_WHILE_WRITING]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG, check=True
    )
    assert ended.stdout == "over\n"
