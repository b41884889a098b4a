"""``kv-offload top``: views of an engine's own words, in terminals of any size and outside of them."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from offload.cli import main
from offload.operator.server import OperatorSocket
from offload.top_view import flow_between, lines_of

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60.0
TOLD: dict[str, Any] = {
    "about": {"model": "m" * 60, "vllm": "0.32.0", "vllm_is_tested": True, "kv_offload": "0", "num_ranks": 1},
    "settings": {
        "num_gpu_blocks": 10,
        "cpu_gib": 1,
        "hash_algorithm": "sha256",
        "record_trace": None,
        "is_in_clear": False,
    },
    "memory": [],
    "counters": {
        "total": {
            "prompt_tokens": 1000,
            "local_tokens": 200,
            "restored_tokens": 500,
            "route_bytes:gpu_to_pool": 4e6,
        },
        "lately": {
            "prompt_tokens": 1000,
            "local_tokens": 200,
            "restored_tokens": 500,
            "route_bytes:gpu_to_pool": 4e6,
        },
        "lately_seconds": 10.0,
    },
    "pool": {"num_blocks": 100, "num_used_blocks": 50, "num_bytes": 1 << 30, "num_tokens": 1600},
    "jobs": {"num_in_flight": 3, "num_stuck": 0, "num_queued_blocks": 7},
    "routes": [{"route": "gpu_to_pool", "is_paused": False}],
    "prefill": [],
    "tiers": [{"tier": "disk", "kind": "disk", "path": "/cache", "num_extents": 5, "num_places": 50}],
    "peers": [{"address": "a:1", "state": "connected"}],
    "leases": {"num_leases": 2},
}
"""As engines tell it; tests/virtual/test_doctor.py has a real one's."""


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine's terminals."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def engine() -> Iterator[OperatorSocket]:
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        engine = OperatorSocket(Path(path) / "run", TOLD)
        yield engine
        engine.close()


def top(engine: OperatorSocket, *arguments: str) -> list[str]:
    return ["top", "--operator-socket", str(engine.path.parent), *arguments]


def test_one_view(engine: OperatorSocket, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, as this is no terminal."""
    assert main(top(engine, "--once")) == 0
    out = capsys.readouterr().out
    assert f"engine {engine.name}, up " in out and "m" * 60 in out
    assert "pool   ##########.......... 50.0% of 100 blocks, 1.00 GiB; 0 evicted/s" in out
    assert "tokens 100/s asked for: 20.0% on the GPU, 50.0% from the pool, 30.0% computed" in out
    assert "copies gpu_to_pool 0.4 MB/s" in out
    assert "jobs   3 in flight, 0 stuck, 7 blocks wait to be stored, 2 leases" in out
    assert "tier   disk: 5 of 50 extents" in out and "peers  1 of 1 connected" in out
    assert "wrong  other-version; kv-offload doctor says what to do" in out


def test_a_view_for_scripts(engine: OperatorSocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(top(engine, "--once", "--json", "--engine", engine.name)) == 0
    [told] = json.loads(capsys.readouterr().out)["engines"]
    assert told["flow"]["prompt_tokens"] == 1000 and told["wrong"] == ["other-version"]
    assert told["engine"] == engine.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "x"], "no engine is named 'x'"),
        (["--seconds", "0"], r"--seconds is 0; give a number from 0\.1 to 86400"),
        (["--seconds", "inf"], r"--seconds is inf; give a number"),
    ],
)
def test_what_is_refused(
    engine: OperatorSocket, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(top(engine, "--once", *arguments)) == 1
    assert re.search(message, capsys.readouterr().err)


def test_one_that_does_not_answer_hides_no_other(
    engine: OperatorSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped:
        stopped.bind(str(engine.path.parent / "0-stopped.sock"))
        stopped.listen(0)
        stopped.close()  # nobody listens: it is left out without a word
        other = OperatorSocket(engine.path.parent, {"about": {}})  # of another release
        assert main(top(engine, "--once")) == 0
        other.close()
    told = capsys.readouterr()
    assert f"engine {engine.name}, up " in told.out
    assert told.err == f"engine {other.name} runs another release; run the top of that one\n"


def test_without_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--once"], ["--json"]):
        assert main(["top", "--operator-socket", str(tmp_path), *arguments]) == 1
        assert "no engine answers" in capsys.readouterr().err


def test_figures_of_an_interval() -> None:
    """Between two answers; of one that has started again, the last minutes."""
    first = {**TOLD, "engine": "a", "uptime_seconds": 100.0, "age_seconds": 1.0}
    total = {**TOLD["counters"]["total"], "prompt_tokens": 1600, "evicted_blocks": 8}
    second = {**first, "uptime_seconds": 104.0, "counters": {**TOLD["counters"], "total": total}}
    flow = flow_between(first, second)
    assert flow == (4.0, 600, 0, 0, 8, {})
    assert ("tokens", "150/s asked for: 0.0% on the GPU, 0.0% from the pool, 100.0% computed") in lines_of(
        second, flow, []
    )
    assert flow_between(first, {**second, "engine": "b"}).seconds == 10.0
    idle = flow_between(second, {**second, "uptime_seconds": 105.0, "age_seconds": 2.0})
    assert idle.seconds == 0 and idle.per_second(5) == 0
    assert ("tokens", "none asked for") in lines_of(second, idle, [])


def test_before_the_first_step() -> None:
    told = {**TOLD, "engine": "a", "uptime_seconds": 1.0, "age_seconds": 1.0, "pool": None, "jobs": None}
    assert lines_of(told, flow_between(None, told), [])[1] == ("pool", "is yet to be made: no step has begun")


class Terminal:
    """A terminal of that size with the command in it."""

    def __init__(self, arguments: list[str], columns: int, rows: int) -> None:
        self._fd, inner = pty.openpty()
        self.resize(columns, rows)
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "offload.cli", *arguments]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self.text = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read_until(self, part: str) -> str:
        """What is shown up to and with that part."""
        until = time.monotonic() + WAIT_SECONDS
        while part not in self.text:
            assert time.monotonic() < until, self.text
            if not select.select([self._fd], [], [], 1.0)[0]:
                continue
            try:
                self.text += os.read(self._fd, 1 << 16).decode(errors="replace")
            except OSError:  # it has ended
                break
        shown, found, self.text = self.text.partition(part)
        assert found, shown
        return shown + part

    def end(self) -> int:
        """As Ctrl-C does; its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_a_small_terminal_that_becomes_larger(engine: OperatorSocket) -> None:
    """Lines are cut at its edge, and a new size shows at once, however long it is to the next view."""
    with Terminal(top(engine, "--seconds", "1000"), columns=30, rows=5) as terminal:
        first = terminal.read_until("copies")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", first)
        assert "0% of 100" not in plain and f"engine {engine.name[:5]}" in plain
        terminal.resize(120, 40)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        assert "50.0% of 100 blocks" in terminal.read_until("kv-offload doctor says")
        assert terminal.end() == 0


def test_a_new_size_while_an_engine_is_asked(engine: OperatorSocket) -> None:
    """It is not lost, whichever of its threads is told of it."""
    with Terminal(top(engine, "--seconds", "1000"), columns=30, rows=5) as terminal:
        for columns in range(60, 90):
            terminal.read_until("copies")
            terminal.resize(columns, 40)
            os.kill(terminal.process.pid, signal.SIGWINCH)  # it draws, asks, or waits
            if columns % 2:
                os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.read_until("kv-offload doctor says")
        assert terminal.end() == 0


def test_once_in_a_small_terminal(engine: OperatorSocket) -> None:
    with Terminal(top(engine, "--once"), columns=40, rows=4) as terminal:
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.read_until("wrong"))
        assert all(len(line) <= 40 for line in shown.splitlines())
        assert terminal.process.wait(WAIT_SECONDS) == 0


def test_a_pipe_gets_one_view_after_the_other(engine: OperatorSocket) -> None:
    """Until nobody reads it any more."""
    command = [sys.executable, "-m", "offload.cli", *top(engine, "--seconds", "0.1")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        names = [line.split()[0] for line in (process.stdout.readline() for _ in range(16))]
        assert names == ["engine", "pool", "tokens", "copies", "jobs", "tier", "peers", "wrong"] * 2
        process.stdout.close()
        assert process.wait(WAIT_SECONDS) == 0
