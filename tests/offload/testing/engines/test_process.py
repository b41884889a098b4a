"""What lives in a process of its own is called, tells, fails and ends as promised; here, without vLLM."""

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from offload.testing.engines import process
from offload.testing.engines.process import EngineError, EngineProcess

pytestmark = pytest.mark.timeout(120)


class Adder:
    """Stands for an engine."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError(f"start={start}: must be at least 0")
        print("adder started", flush=True)
        self._sum = start

    def add(self, number: int) -> int:
        self._sum += number
        return self._sum

    def add_all(self, numbers: list[int], on_done: Callable[[], None]) -> int:
        for number in numbers:
            self.add(number)
            on_done()
        return self._sum

    def fail(self) -> None:
        raise LookupError("nothing to add")

    def die(self) -> None:
        os._exit(3)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def leave_a_child(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def close(self) -> None:
        print("adder closed", flush=True)


def test_calls_are_made_over_there_and_progress_is_told_here(tmp_path: Path) -> None:
    told: list[None] = []
    with EngineProcess(partial(Adder, 1), log=tmp_path / "log", must_end_well=True) as adder:
        assert adder.run(Adder.add, 2) == 3
        assert adder.run_told(lambda: told.append(None), Adder.add_all, [4, 5]) == 12
        assert len(told) == 2
        assert list(adder.processes()) == [adder.pid] != [os.getpid()]
    assert not adder.processes()
    assert adder.log().split("\n")[:2] == ["adder started", "adder closed"]


def test_what_a_call_raises_is_told_and_the_next_call_is_answered(tmp_path: Path) -> None:
    with EngineProcess(partial(Adder, 1), "adder", log=tmp_path / "log", must_end_well=True) as adder:
        with pytest.raises(EngineError, match="engine 'adder' failed: LookupError: nothing to add") as error:
            adder.run(Adder.fail)
        assert "in fail" in str(error.value), "the traceback is in the log, whose end is shown"
        assert adder.run(Adder.add, 1) == 2


def test_what_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    adder = EngineProcess(partial(Adder, -1), log=tmp_path / "log")
    with pytest.raises(EngineError, match="ValueError: start=-1: must be at least 0"), adder:
        pass
    assert not adder.processes() and not adder.num_killed


def test_a_death_is_noticed(tmp_path: Path) -> None:
    adder = EngineProcess(partial(Adder, 1), log=tmp_path / "log")
    with pytest.raises(EngineError, match="its process has ended"), adder:
        adder.run(Adder.die)


def test_what_is_left_behind_is_killed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.1)
    adder = EngineProcess(partial(Adder, 1), log=tmp_path / "log", must_end_well=True)
    with pytest.raises(EngineError, match="1 of its processes had to be killed"), adder:
        assert adder.run(Adder.leave_a_child) in adder.processes()
    assert not adder.processes()


def test_variables_are_set_over_there_alone() -> None:
    with EngineProcess(partial(Adder, 1), variables={"KV_OFFLOAD_ADDER": "yes"}) as adder:
        assert adder.run(Adder.variable, "KV_OFFLOAD_ADDER") == "yes"
    assert "KV_OFFLOAD_ADDER" not in os.environ


def test_a_log_of_its_own_is_kept_if_anything_fails() -> None:
    with EngineProcess(partial(Adder, 1)) as adder:
        pass
    with pytest.raises(FileNotFoundError):
        adder.log()
    with pytest.raises(EngineError) as error, EngineProcess(partial(Adder, 1)) as adder:
        adder.run(Adder.fail)
    assert "nothing to add" in adder.log()
    log = Path(str(error.value).splitlines()[1].removeprefix("  from ").removesuffix(":"))
    assert log.exists()
    log.unlink()
