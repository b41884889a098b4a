"""Whether the control group of this process runs short of memory, as the kernel tells it."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from offload.worker.pool.host_limits import group_directories, group_limits

logger = logging.getLogger(__name__)

SHARE = 1 / 8
"""By which the pool gets smaller at a time."""

_SECONDS = 1.0
_REST_SECONDS = 5.0  # until what was given back can be seen
_LITTLE = 1 / 32  # of a limit, that is left
_FEW = 1 / 8  # the same, where a limit was met: files that were read may have met it, too
_STALLED = 10.0  # percent of the last ten seconds in which somebody waited for memory
_EVENTS = ("high", "max", "oom")


class Pressure(NamedTuple):
    """What the kernel says at one moment.

    Attributes:
        num_events: times that the group, or one above it, met a limit, ever.
        room_share: the part of the tightest limit that is left beside what can be reclaimed, 0 to 1.
        stalled: percent of the last ten seconds in which somebody in the group waited for memory.
    """

    num_events: int
    room_share: float
    stalled: float

    def is_short(self, before: "Pressure") -> bool:
        """Whether memory is short, and was seen ``before`` the last time."""
        little = _FEW if self.num_events > before.num_events else _LITTLE
        return self.room_share < little or self.stalled > _STALLED


def read_pressure(root: Path = Path("/")) -> Pressure:
    """Reads a few small files. What is not there says nothing."""
    groups = group_directories(root)
    num_events = sum(_words(group / "memory.events").get(name, 0.0) for group in groups for name in _EVENTS)
    # those above have the waits of others, too
    own = [stalls["some avg10"] for group in groups if "some avg10" in (stalls := _stalls(group))]
    stalled = own[0] if own else 0.0
    shares = [each.room / each.limit for each in group_limits(root) if each.limit]
    return Pressure(int(num_events), min(shares, default=1.0), stalled)


class PressureWatch:
    """A thread that looks at the pressure each second, and says so when memory is short."""

    def __init__(
        self, yield_memory: Callable[[float], bool], read: Callable[[], Pressure] = read_pressure
    ) -> None:
        """``yield_memory``: makes the pool smaller by a share. False: it is as small as it may be."""
        self._yield_memory = yield_memory
        self._read = read
        self._before: Pressure | None = None  # not looked at yet
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._watch, name="kv-offload-pressure", daemon=True).start()

    def close(self) -> None:
        """Look no more. Calling it again does nothing."""
        self._over.set()

    def look(self) -> bool:
        """Look once. Returns whether the pool is to be smaller."""
        now = self._read()
        before, self._before = self._before or now, now
        if not now.is_short(before) or not self._yield_memory(SHARE):
            return False
        logger.warning(
            "memory is short in this control group (limits met %d times, %.1f%% left, %.1f%% of the time "
            "stalled): the CPU pool gets smaller by an eighth; kv-offload resize makes it larger again",
            now.num_events - before.num_events,
            100 * now.room_share,
            now.stalled,
        )
        return True

    def _watch(self) -> None:
        seconds, has_failed = _SECONDS, False
        while not self._over.wait(seconds):
            seconds = _SECONDS
            try:
                seconds = _REST_SECONDS if self.look() else _SECONDS
            except Exception:
                if not has_failed:
                    logger.exception("the CPU pool cannot tell whether memory is short; it looks again")
                has_failed = True


def _stalls(group: Path) -> dict[str, float]:
    return _words(group / "memory.pressure")


def _words(path: Path) -> dict[str, float]:
    """Numbers of a file by name: ``high 3``, or ``some avg10=0.10 ...``; nothing if it cannot be read."""
    found: dict[str, float] = {}
    try:
        for line in path.read_text().splitlines():
            first, *rest = line.split()
            for word in rest:
                name, _, value = word.rpartition("=")
                found[f"{first} {name}" if name else first] = float(value)
    except (OSError, ValueError):
        pass
    return found
