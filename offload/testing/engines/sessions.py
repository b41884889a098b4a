"""Processes by the session they are in: whatever an engine makes stays in its own."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_LOOK_SECONDS = 0.05


def processes_of(session: int) -> dict[int, str]:
    """Ids and command lines of all in that session that live; a zombie does not."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, its_session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def kill(processes: Iterable[int]) -> None:
    """End these at once; those that have ended meanwhile do not matter."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_session(session: int, seconds: float) -> int:
    """Wait until nobody in it is left, so long at most; kill the rest. Returns how many those were."""
    left = _wait(session, seconds)
    kill(left)
    _wait(session, seconds)
    return len(left)


def _wait(session: int, seconds: float) -> dict[int, str]:
    """Wait until nobody is left, so long at most; returns who is."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return left
