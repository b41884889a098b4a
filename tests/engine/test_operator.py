"""A real engine answers at its operator socket, whatever it is doing."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.operator.client import engines_in
from tests.engine.answers import BLOCK_SIZE, prompt_of
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(5 * 8 * BLOCK_SIZE + 20, seed=1)
WHOLE = 2 * 16 * BLOCK_SIZE
"""Tokens of its whole extents."""
_WAIT_SECONDS = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        yield Path(path) / "run"


def start(path: Path, directory: Path, number: int, **arguments: Any) -> EngineProcess:
    tier = {"kind": "disk", "path": str(path / "tier"), "gib": 0.1}
    settings = {"cpu_gib": 0.0625, "tiers": [tier], "operator_socket": str(directory)}
    return EngineProcess(path / f"engine{number}.log", settings, **{"fork": True} | arguments)


def status(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["status", "--operator-socket", str(directory), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["engines"]
    return found


def test_status_of_an_engine(tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, directory, 1) as engine:
        [told] = status(directory, capsys)
        assert told["pool"] is None, "no step has begun"
        until = time.monotonic() + _WAIT_SECONDS
        number = 0
        while not told["tiers"] or told["tiers"][0].get("num_extents", 0) < 2:
            assert time.monotonic() < until, engine.log()
            engine.run(Engine.ask, [PROMPT[: len(PROMPT) - number % 7]])
            number += 1
            [told] = status(directory, capsys)
        assert told["pool"]["num_used_blocks"] >= 5 * 8
        assert told["pool"]["num_bytes"] > 0
        [tier] = told["tiers"]
        assert tier["path"] == str(tmp_path / "tier")
        assert tier["num_extents"] <= tier["num_places"]
        assert tier["epoch"] == 1 and not tier["is_private"]
        assert {each["route"] for each in told["routes"]} >= {"pool_to_disk", "disk_to_pool"}
        assert main(["status", "--operator-socket", str(directory), "--engine", told["engine"]]) == 0
        out = capsys.readouterr().out
        assert f"engine   {told['engine']}" in out and "tier     disk at" in out
        assert "; stored eagerly" in out, "a tier reads chains from their beginning on"
        assert "link     gpu_to_pool: " in out and " tokens/s from token 0 on" in out
        assert next(each for each in told["routes"] if each["route"] == "gpu_to_pool")["seconds_per_byte"] > 0
        assert main(["doctor", "--operator-socket", str(directory), "--json"]) in (0, 1)
        examined = json.loads(capsys.readouterr().out)
        assert (examined["engines"], examined["unseen"]) == ([told["engine"]], [])
        assert {each["name"] for each in examined["findings"]} <= {"memory-short", "tier-disk-full"}, examined
        os.killpg(engine.pid, signal.SIGSTOP)  # it hangs: nobody answers, and nobody waits for ever
        try:
            assert main(["status", "--operator-socket", str(directory)]) == 1
            assert "does not answer" in capsys.readouterr().err
        finally:
            os.killpg(engine.pid, signal.SIGCONT)
    assert engines_in(directory) == []
    assert main(["status", "--operator-socket", str(directory)]) == 1
    assert "no engine answers" in capsys.readouterr().err


def test_weights_with_a_name_find_what_they_have_written(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's loop: what was computed under a name is served under it, and under no other."""

    def reset(version: str, *, status: int = 0) -> dict[str, Any]:
        arguments = ["reset", "--operator-socket", str(directory), "--weights-version", version, "--json"]
        assert main(arguments) == status
        [told] = json.loads(capsys.readouterr().out)["engines"]
        return dict(told)

    def ask(engine: EngineProcess) -> int:
        """Tokens that no cache had. All of it is on the disk when this returns."""
        num_cached = engine.run(Engine.ask, [PROMPT])[0].num_cached
        until = time.monotonic() + _WAIT_SECONDS
        while status(directory, capsys)[0]["tiers"][0]["num_extents"] < 2:
            assert time.monotonic() < until, engine.log()
            engine.run(Engine.settle)
        return int(num_cached)

    with start(tmp_path, directory, 1) as engine:
        assert ask(engine) == 0
        assert "nothing was reset" in str(reset("one", status=1)["error"])
        for number, (version, num_cached) in enumerate((("one", 0), ("two", 0), ("one", WHOLE)), 1):
            assert engine.run(Engine.forget_all)
            assert reset(version)["num_resets"] == number
            assert ask(engine) == num_cached
            [told] = status(directory, capsys)
            assert told["weights"] == {"num_resets": number, "version": version}
            assert not told["tiers"][0]["is_private"]
            assert f"are named {version!r}" in str(reset("three", status=1)["error"])
    with start(tmp_path, directory, 2) as engine:
        assert engine.run(Engine.forget_all)
        assert reset("two")["version"] == "two"
        assert ask(engine) == WHOLE
    with start(tmp_path, directory, 3) as engine:
        assert ask(engine) == WHOLE, "by the weights that are loaded at the start"


def test_an_engine_without_a_socket_serves(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with start(tmp_path, taken, 1) as engine:
        engine.run(Engine.ask, [PROMPT])
        assert engine.log().count("no operator socket") == 1
