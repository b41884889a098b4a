"""The seam between plans and the hardware that copies."""

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offload.messages import Route

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class CopyEnd:
    """A submitted batch has ended, one way or the other.

    Attributes:
        job_id: as given to ``submit``.
        num_copied: leading copies of the batch known to be complete; all of them on success.
        error: what went wrong, None on success.
        seconds: from its first copy to its last.
        sums: checksums of the slots that it has filled, which were checked, ``uint64[n]``; None: not known.
        is_absent: its error is that what it was to copy is not there, and nothing else.
        reason: see ``JobReport``.
    """

    job_id: int
    num_copied: int
    error: str | None
    seconds: float = field(default=0.0, compare=False)
    sums: npt.NDArray[np.uint64] | None = field(default=None, compare=False)
    is_absent: bool = False
    reason: str = field(default="", compare=False)


class Copier(Protocol):
    """Makes copies asynchronously. Batches may end in any order; none is ever lost.

    Called from one thread, the engine's, which never waits here but in ``drain`` (tests only) and ``close``.
    """

    def fence(self, route: Route) -> None:
        """Batches along that route submitted from now on start after all work the engine has enqueued."""

    def submit(self, job_id: int, route: Route, batch: Any) -> None:
        """Start copying a batch of its lane, which owns its memory until it has ended."""

    def poll(self) -> list[CopyEnd]:
        """Batches that have ended since the last call. Each is reported exactly once."""

    def drain(self) -> None:
        """Wait until every submitted batch has ended; ``poll`` still reports them."""

    def close(self, seconds: float) -> bool:
        """Wait until every batch has ended, so long at most, and release threads and streams.

        Returns False if a batch may still be under way. Calling it again does no harm.
        """


def close_copier(copier: Copier, seconds: float) -> bool:
    """Close it, also if its device is broken. Returns False if a batch may still be under way."""
    try:
        return copier.close(seconds)
    except Exception as error:  # a broken device: nothing moves there any more
        logger.warning("copies in flight were given up: %s", describe(error))
        return True


def describe(error: Exception) -> str:
    """For whoever reads the log."""
    return f"{type(error).__name__}: {error}"
