"""``kv-offload explain`` at a real socket: what it prints, and what it says where nobody is meant."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from offload.cli import main
from offload.operator import client
from offload.operator.directory import SUFFIX
from offload.operator.server import OperatorSocket
from offload.scheduler.why.note import Note
from offload.scheduler.why.reasons import Missing, Reason

ABOUT = {"model": "a", "vllm": "0", "kv_offload": "0"}
ESCAPE = "cmpl-\x1b]0;evil\x07-0-89abcdef"


def told(note: Note) -> dict[str, list[dict[str, object]]]:
    return {"requests": [note.told(10.0)]}


@pytest.fixture
def folder() -> Iterator[str]:
    """Of an engine that remembers one request, under any id but ``nobody``."""
    note = Note(ESCAPE, 4.0, 0, admitted=5.0, num_prompt=41, num_planned=16, restored={"pool": 16})
    note.missing = (Missing(16, 24, Reason.EVICTED, 3.0, whom=ESCAPE),)
    note.num_admissions, note.num_again, note.lost, note.gain = 2, 8, {"hint": 5}, -0.25
    note.hand_off = "16 tokens"
    with TemporaryDirectory(prefix="kvo") as directory:
        path = Path(directory) / "run"
        answer = {"explain": lambda request: told(note) if request["id"] != "nobody" else {"requests": []}}
        engine = OperatorSocket(path, {}, answer)
        yield str(path)
        engine.close()


def test_it_is_told_in_lines(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "it", "--operator-socket", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "request",
        "tokens",
        "waited",
        "again",
        "missing",
        "stored",
        "handed",
    ]
    assert "0 gpu, 16 pool, 25 computed" in lines[1]
    assert "lost 0.250 s" in lines[2]
    assert "24 tokens from token 16 on: it was evicted from the pool 2.0 s before, for cmpl-" in lines[4]
    assert all(line.isprintable() for line in lines), "a client's id does nothing to a terminal"


def test_it_is_told_as_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "it", "--operator-socket", folder, "--json"]) == 0
    [request] = json.loads(capsys.readouterr().out)["requests"]
    assert request["request"] == ESCAPE and request["unstored"].popitem()[1] == 5


def test_nobody_is_meant(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nobody", "--operator-socket", folder]) == 1
    assert "no request 'nobody' is remembered" in capsys.readouterr().err


def test_an_engine_that_says_nothing_hides_no_other(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Here it is one that knows no such question."""
    other = OperatorSocket(Path(folder), {}, {})
    assert main(["explain", "it", "--operator-socket", folder]) == 1
    told = capsys.readouterr()
    assert "0 gpu, 16 pool, 25 computed" in told.out and f"engine {other.name} refuses" in told.err
    assert main(["explain", "nobody", "--operator-socket", folder]) == 1
    told = capsys.readouterr()
    assert "no request 'nobody' is remembered" in told.err and f"engine {other.name} refuses" in told.err
    other.close()


@pytest.mark.parametrize("command", ["status", "peers"])
def test_nor_where_all_are_asked(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is one at whose socket nobody answers."""
    monkeypatch.setattr(client, "_SECONDS", 0.2)
    told = dict.fromkeys(("as_of", "pool", "jobs", "weights")) | {"about": ABOUT}
    told |= {"peers": [], "askers": [], "leases": {"num_leases": 0}}
    with TemporaryDirectory(prefix="kvo") as directory, socket.socket(socket.AF_UNIX) as silent:
        one = OperatorSocket(Path(directory), told)
        silent.bind(f"{directory}/silent{SUFFIX}")
        silent.listen()
        assert main([command, "--operator-socket", directory, "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert [each["engine"] for each in answer["engines"]] == [one.name]
        assert len(answer["silent"]) == 1 and "engine silent does not answer" in answer["silent"][0]
        assert main([command, "--operator-socket", directory]) == 1
        shown = capsys.readouterr()
        assert f"engine   {one.name}" in shown.out and "engine silent does not answer" in shown.err
        one.close()
