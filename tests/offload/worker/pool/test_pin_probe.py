"""The question whether memory can be pinned, with children that answer what a GPU machine's might."""

import subprocess
import sys
from typing import Any

import pytest

from offload import HostMemoryError
from offload.worker.pool import pin_probe
from offload.worker.pool.pin_probe import check_pinning


class Child:
    """Stands in for ``subprocess.run``."""

    def __init__(self, returncode: int = 0, stderr: str = "", error: Exception | None = None) -> None:
        self._answer = subprocess.CompletedProcess([], returncode, "", stderr)
        self._error = error
        self.command: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] > 0
        self.command = command
        if self._error is not None:
            raise self._error
        return self._answer


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**options: Any) -> Child:
        child = Child(**options)
        monkeypatch.setattr(subprocess, "run", child)
        return child

    return install


def test_the_question_is_put_by_another_process(answer: Any) -> None:
    child = answer(returncode=0)
    check_pinning()
    assert child.command == [sys.executable, "-m", "offload.worker.pool.pin_probe"]


def test_a_clear_no_is_passed_on(answer: Any) -> None:
    answer(returncode=3, stderr="a warning of CUDA's\ncannot pin 64 MiB; raise the limit\n")
    with pytest.raises(HostMemoryError) as refused:
        check_pinning()
    assert str(refused.value) == "cannot pin 64 MiB; raise the limit"


@pytest.mark.parametrize(
    "unclear",
    [
        {"returncode": 1, "stderr": "Traceback ..."},
        {"returncode": -9},
        {"error": OSError("no such file")},
        {"error": subprocess.TimeoutExpired("python", 60)},
    ],
    ids=str,
)
def test_only_a_clear_no_counts(answer: Any, unclear: dict[str, Any]) -> None:
    answer(**unclear)
    check_pinning()


def test_the_child_pins_and_unpins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned: dict[int, int] = {}
    monkeypatch.setattr(pin_probe, "register_host_memory", pinned.__setitem__)
    monkeypatch.setattr(pin_probe, "unregister_host_memory", pinned.pop)
    assert pin_probe.main() == 0
    assert pinned == {}
    assert capsys.readouterr().err == ""


def test_the_child_says_no_in_its_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError("CUDA error 2")

    monkeypatch.setattr(pin_probe, "register_host_memory", refuse)
    assert pin_probe.main() == 3
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "cannot pin 67,108,864 bytes" in last
    assert "CUDA error 2" in last
    assert "ulimit -l unlimited" in last
