"""``kv-offload resize`` asks real operator sockets."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from offload.cli import main
from offload.operator.server import OperatorSocket


class Pool:
    """Told of a size, it is as large after so many questions."""

    def __init__(self, num_questions: int) -> None:
        self._num_left = num_questions
        self._target = 1.0

    def resize(self, request: Mapping[str, Any]) -> dict[str, object]:
        self._target = request["gib"]
        return self.size(request)

    def size(self, request: Mapping[str, Any]) -> dict[str, object]:
        gib = 1.0 if self._num_left else self._target
        self._num_left = max(0, self._num_left - 1)
        return {"gib": gib, "target_gib": self._target, "error": ""}


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvo") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("num_questions", "arguments", "status", "text"),
    [
        (0, [], 0, "the pool has 0.5 GiB"),
        (2, [], 0, "1 GiB, on the way to 0.5, in whole blocks; it goes on with the steps"),
        (2, ["--wait", "60"], 0, "the pool has 0.5 GiB"),
        (1_000, ["--wait", "0.2"], 1, "1 GiB, on the way to 0.5"),
    ],
)
def test_it_says_how_far_it_is(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    num_questions: int,
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    pool = Pool(num_questions)
    engine = OperatorSocket(directory, {}, {"resize": pool.resize, "size": pool.size})
    assert main(["resize", "0.5", "--operator-socket", str(directory), *arguments]) == status
    assert f"engine {engine.name}: {text}" in capsys.readouterr().out
    engine.close()


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf"])
def test_no_pool_is_of_such_a_size(directory: Path, capsys: pytest.CaptureFixture[str], gib: str) -> None:
    """Said before anybody is asked: no engine runs here."""
    assert main(["resize", gib, "--operator-socket", str(directory)]) == 1
    assert f"GIB is {gib}; give the memory of each pool in GiB" in capsys.readouterr().err


def test_no_time_is_negative(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", "1", "--operator-socket", str(directory), "--wait", "-3"]) == 1
    assert "--wait is -3.0; give a number of seconds from 0 on" in capsys.readouterr().err
