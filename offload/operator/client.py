"""Finds engines by their operator sockets, and asks them."""

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offload.errors import OperatorError
from offload.operator.directory import SUFFIX, sockets_in

_SECONDS = 5.0
_MOST_BYTES = 1 << 22

T = TypeVar("T")


class Engine(NamedTuple):
    """An engine that answers.

    Attributes:
        name: of it.
        path: of its socket.
    """

    name: str
    path: Path

    def ask(self, verb: str, **more: object) -> Any:
        """What it answers. ``more``: of the request.

        Raises:
            OperatorError: it refuses, or does not answer.
        """
        try:
            line = _exchange(self.path, json.dumps({"verb": verb, **more}).encode() + b"\n")
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise OperatorError(f"engine {self.name} does not answer at {self.path}: {error}") from error
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            why = answer.get("error") if isinstance(answer, dict) else answer
            raise OperatorError(f"engine {self.name} refuses {verb!r}: {why}")
        return answer.get("result")


def engines_in(directory: Path) -> list[Engine]:
    """Those at whose sockets somebody listens."""
    paths = [path for path in sockets_in(directory) if _listens(path)]
    return [Engine(path.name.removesuffix(SUFFIX), path) for path in paths]


def choose(directory: Path, name: str | None) -> list[Engine]:
    """All engines there, or the one that is so named; the beginning of its name will do.

    Raises:
        OperatorError: there is none, or several begin so.
    """
    found = engines_in(directory)
    if not found:
        raise OperatorError(
            f"no engine answers in {directory}; run this as the engine's user, with its XDG_RUNTIME_DIR and "
            f"on its host (or in its container), or give --operator-socket the directory of its configuration"
        )
    if name is None:
        return found
    chosen = [each for each in found if each.name == name] or [
        each for each in found if each.name.startswith(name)
    ]
    if len(chosen) != 1:
        names = ", ".join(each.name for each in found)
        what = "several engines are" if chosen else "no engine is"
        raise OperatorError(f"{what} named {name!r}; there are: {names}")
    return chosen


def ask_each(engines: Sequence[Engine], ask: Callable[[Engine], T]) -> tuple[list[T], list[str]]:
    """What engines answer, and why the others do not.

    Raises:
        OperatorError: none does.
    """
    found, silent = list[T](), list[str]()
    for engine in engines:
        try:
            found.append(ask(engine))
        except OperatorError as error:
            silent.append(str(error))
    if not found:
        raise OperatorError("; ".join(silent))
    return found, silent


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SECONDS)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):
            return True  # somebody listens, and accepts nobody now
        except OSError:
            return False
    return True


def _exchange(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(str(path))
        connection.sendall(request)
        received = b""
        while not received.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part or len(received) > _MOST_BYTES:
                raise OSError("it ends in the middle of an answer")
            received += part
    return received
