"""Engines answer at their operator sockets, and the command finds them there."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OperatorError
from offload.operator import directory as places
from offload.operator.client import choose, engines_in
from offload.operator.directory import MOST_DIRECTORY_BYTES, runtime_directory
from offload.operator.server import MOST_BYTES, OperatorSocket

TOLD = {"about": {"model": "a"}, "tiers": [1, 2]}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one: paths of sockets are."""
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        yield Path(path) / "run"


@pytest.fixture
def engine(directory: Path) -> Iterator[OperatorSocket]:
    engine = OperatorSocket(directory, TOLD)
    yield engine
    engine.close()


def raw(path: Path, *sent: bytes) -> list[Any]:
    """What is answered to these bytes, until the connection ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        received = b""
        try:
            for each in sent:
                connection.sendall(each)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                received += part
        except ConnectionError:
            pass
        return [json.loads(line) for line in received.splitlines()]


def test_it_answers_what_was_published_last(engine: OperatorSocket, directory: Path) -> None:
    [found] = choose(directory, None)
    assert found.name == engine.name
    told = found.ask("status")
    assert told["about"] == {"model": "a"}
    assert told["pid"] == os.getpid()
    assert found.ask("tiers") == [1, 2]
    engine.publish({"tiers": [3]})
    assert found.ask("tiers") == [3]
    later = found.ask("status")
    assert "about" not in later
    assert later["uptime_seconds"] >= told["uptime_seconds"] >= 0
    with pytest.raises(OperatorError, match="verbs are: status, tiers"):
        found.ask("about")


def test_only_its_user_can_come_near(engine: OperatorSocket, directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(engine.path.stat().st_mode) == 0o600


def test_several_requests_on_one_connection(engine: OperatorSocket) -> None:
    status, tiers = raw(engine.path, b'{"verb": "status"}\n{"verb": "ti', b'ers"}\n')
    assert status["ok"] and tiers == {"ok": True, "result": [1, 2]}
    assert len(raw(engine.path, b'{"verb": "tiers"}\n' * 100)) == 64


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"no", b'"status"', b'{"verb": 3}', b"\xff\xfe", b"[" * 4000, b'{"verb": "x"}'],
)
def test_what_is_no_request_is_refused(engine: OperatorSocket, line: bytes) -> None:
    [answer] = raw(engine.path, line + b"\n")
    assert answer["ok"] is False and answer["error"]
    assert choose(engine.path.parent, None)[0].ask("tiers") == [1, 2]


def test_a_line_that_does_not_end_is_not_kept(engine: OperatorSocket) -> None:
    assert raw(engine.path, b"x" * (2 * MOST_BYTES)) == []
    assert choose(engine.path.parent, None)[0].ask("tiers") == [1, 2]


def test_who_says_nothing_keeps_others_waiting_for_a_while_only(engine: OperatorSocket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(engine.path))
        assert choose(engine.path.parent, None)[0].ask("tiers") == [1, 2]


def test_it_answers_while_the_engine_hangs(directory: Path) -> None:
    """The engine's thread does not come back to publish anything."""
    is_open, is_over = threading.Event(), threading.Event()

    def run() -> None:
        engine = OperatorSocket(directory, TOLD)
        is_open.set()
        is_over.wait()
        engine.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_open.wait(10)
    [found] = engines_in(directory)
    assert found.ask("tiers") == [1, 2]
    is_over.set()
    thread.join()
    assert engines_in(directory) == []


def test_two_engines_of_one_user(engine: OperatorSocket, directory: Path) -> None:
    other = OperatorSocket(directory, {"tiers": ["other"]})
    assert {each.name for each in choose(directory, None)} == {engine.name, other.name}
    assert choose(directory, other.name)[0].ask("tiers") == ["other"]
    with pytest.raises(OperatorError, match="several engines are named"):
        choose(directory, str(os.getpid()))
    with pytest.raises(OperatorError, match=f"no engine is named 'x'; there are: .*{engine.name}"):
        choose(directory, "x")
    other.close()
    other.close()
    assert [each.name for each in choose(directory, None)] == [engine.name]
    assert choose(directory, engine.name[:-1])[0].name == engine.name


def test_without_engines_it_says_what_to_do(directory: Path) -> None:
    with pytest.raises(OperatorError, match=r"no engine answers in .*--operator-socket"):
        choose(directory, None)


def test_a_killed_engine_is_not_found_and_its_socket_is_removed(directory: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from offload.operator.server import OperatorSocket; "
        "OperatorSocket(Path(sys.argv[1]), {}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=False)
    [stale] = places.sockets_in(directory)
    assert engines_in(directory) == []
    alive, engine = OperatorSocket(directory, {}), OperatorSocket(directory, {})
    assert not stale.exists()
    assert {each.name for each in engines_in(directory)} == {alive.name, engine.name}
    alive.close()
    engine.close()
    assert list(directory.iterdir()) == []


def test_a_child_does_not_keep_the_socket_of_its_parent(directory: Path) -> None:
    """Workers may be forked, and outlive a scheduler that was killed."""
    code = (
        "import os, signal, sys, time; from pathlib import Path; "
        "from offload.operator.server import OperatorSocket; "
        "OperatorSocket(Path(sys.argv[1]), {}); child = os.fork(); "
        "child or (print(os.getpid(), flush=True), time.sleep(60)); "
        "child and os.kill(os.getpid(), signal.SIGKILL)"
    )
    started = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.wait()
    try:
        assert engines_in(directory) == []
    finally:
        os.kill(child, 9)
        started.stdout.close()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"too long for a socket's path; set operator_socket"):
        OperatorSocket(tmp_path / ("x" * 100), TOLD)


def test_the_longest_directory_that_may_be_set_has_room_for_any_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the largest process id there is; a byte more is too much."""
    monkeypatch.setattr(os, "getpid", lambda: (1 << 22) - 1)
    with tempfile.TemporaryDirectory(prefix="kvo") as base:
        room = MOST_DIRECTORY_BYTES - len(os.fsencode(base)) - 1
        opened = OperatorSocket(Path(base, "x" * room), TOLD)
        assert opened.path.exists()
        opened.close()
        with pytest.raises(OperatorError, match=f"of at most {MOST_DIRECTORY_BYTES} bytes"):
            OperatorSocket(Path(base, "x" * (room + 1)), TOLD)


def test_directories_that_are_not_ours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OperatorError, match="is no directory"):
        OperatorSocket(file, TOLD)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OperatorError, match="is no directory"):
        OperatorSocket(link, TOLD)
    with pytest.raises(OperatorError, match="set operator_socket to a directory in one that is there"):
        OperatorSocket(tmp_path / "not" / "there", TOLD)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OperatorError, match="belongs to user"):
        OperatorSocket(tmp_path, TOLD)


def test_a_directory_of_ours_that_is_open_is_closed_to_others(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    engine = OperatorSocket(directory, TOLD)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    engine.close()


def test_other_users_are_not_answered(engine: OperatorSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file's mode does not keep them away, as on some network file systems."""
    credentials = type("Credentials", (), {"size": 12, "unpack": lambda self, data: (1, 12345, 1)})()
    monkeypatch.setattr("offload.operator.server._CREDENTIALS", credentials)
    assert raw(engine.path, b'{"verb": "status"}\n') == []


def test_where_sockets_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory(None) == tmp_path / "kv-offload"
    assert runtime_directory("/run/kv") == Path("/run/kv")
    for wrong in ("relative", str(tmp_path / "gone"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", wrong)
        assert runtime_directory(None).name == f"kv-offload-{os.geteuid()}"
        assert runtime_directory(None).parent == Path(tempfile.gettempdir())


def test_publishing_waits_for_nobody(engine: OperatorSocket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(engine.path))
        for number in range(1000):
            engine.publish({"tiers": [number]})
    assert choose(engine.path.parent, None)[0].ask("tiers") == [999]


def test_verbs_with_a_handler_answer_or_refuse(directory: Path) -> None:
    def handle(request: Any) -> Any:
        if "number" not in request:
            raise OperatorError("give a number")
        return request["number"] + 1

    engine = OperatorSocket(directory, TOLD, {"next": handle})
    [found] = engines_in(directory)
    with pytest.raises(OperatorError, match="give a number"):
        found.ask("next")
    assert found.ask("next", number=3) == 4
    engine.close()


def test_a_fault_in_an_answer_is_not_the_last_word(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def handle(request: Any) -> Any:
        return {"what is no JSON": object()}

    engine = OperatorSocket(directory, TOLD, {"odd": handle})
    [found] = engines_in(directory)
    with pytest.raises(OperatorError):
        found.ask("odd")
    assert found.ask("status")["engine"] == engine.name
    assert "was not answered" in caplog.text
    engine.close()
