"""``kv-offload doctor`` as a command: which engines it finds, and what its exit status says."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.cli import main
from offload.operator import client
from offload.operator.client import engines_in

ROOT = Path(__file__).parents[3]
START = (
    "import os, sys; from pathlib import Path; from offload.operator.server import OperatorSocket; "
    "OperatorSocket(Path(sys.argv[1]), {}); print(os.getpid(), flush=True); sys.stdin.read()"
)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        yield Path(path) / "run"


@pytest.fixture
def other(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine's process, with a socket that answers."""
    command = [sys.executable, "-c", START, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def doctor(directory: Path, *arguments: str) -> int:
    return main(["doctor", "--operator-socket", str(directory), *arguments])


def test_without_engines_it_could_not_look(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(directory) == 2
    assert "could not look: no engine answers in" in capsys.readouterr().err


def test_an_engine_that_was_killed(
    other: subprocess.Popen[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other.kill()
    other.wait()
    assert doctor(directory, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["findings"]] == ["stale-socket"]
    assert told["engines"] == []
    name = told["findings"][0]["engine"]
    assert doctor(directory, "--engine", name) == 1
    assert doctor(directory, "--engine", "x") == 2


def test_an_engine_that_is_stopped_is_not_taken_for_one_that_was_killed(directory: Path) -> None:
    """Whoever asks often fills its backlog."""
    directory.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stopped.bind(str(directory / "1-a.sock"))
        stopped.listen(1)
        for _ in range(4):
            other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            other.setblocking(False)
            other.connect_ex(str(directory / "1-a.sock"))
        assert [engine.name for engine in engines_in(directory)] == ["1-a"]


def test_an_engine_that_does_not_answer(
    other: subprocess.Popen[str],
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [engine] = engines_in(directory)
    os.kill(other.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all its threads
    monkeypatch.setattr(client, "_SECONDS", 0.2)
    assert doctor(directory, "--engine", engine.name[:-1]) == 1
    out = capsys.readouterr().out
    assert f"engine   {engine.name}: 1 finding\nfinding  engine-silent" in out


def test_an_engine_of_another_release_is_not_looked_at(
    other: subprocess.Popen[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that tells less than is asked of it here."""
    assert doctor(directory) == 2
    assert "unseen   " in capsys.readouterr().out
    assert main(["top", "--operator-socket", str(directory), "--once"]) == 1
    assert "runs another release" in capsys.readouterr().err


def test_operations_has_every_finding() -> None:
    """What each means and what to do is on that page, in the order of their names."""
    source = "".join(path.read_text() for path in (ROOT / "offload" / "doctor").glob("*.py"))
    names = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = re.findall(r"^\| `([a-z]+(?:-[a-z]+)+)` \|", page, re.MULTILINE)
    assert len(names) > 20
    assert listed == sorted(names)
