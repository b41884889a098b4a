"""The circuit breaker: after repeated faults copies pause for a while, then one of them is tried."""

import logging
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 8
"""Failures in a row, with no success between. A copy that hangs opens it at once."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class CircuitBreaker:
    """Watches the transfers of one route.

    Closed, it lets all begin. ``FAILURES_TO_OPEN`` failures in a row, or one that hangs, open it for
    ``FIRST_PAUSE_SECONDS``: an outage begins. After the pause a single transfer may begin, the trial. If
    it fails, the next pause is twice as long, up to ``LONGEST_PAUSE_SECONDS``; if it succeeds, the outage
    is over. Whatever else ends meanwhile began before and says nothing new. One log line at the begin and
    one at the end of an outage, however many pauses it has.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """``what``: the transfers' name in the log, in the plural; ``clock`` in seconds."""
        self._what = what
        self._clock = clock
        self._num_failures = 0
        self._pause = 0.0
        self._open_until = 0.0
        self._trial: Hashable | None = None

    @property
    def is_outage(self) -> bool:
        """Whether transfers pause, or are on trial."""
        return self._pause > 0

    @property
    def allows(self) -> bool:
        """Whether a transfer may begin now."""
        if not self._pause:
            return True
        return self._trial is None and self._clock() >= self._open_until

    def began(self, transfer: Hashable) -> None:
        """A transfer begins that was allowed to."""
        if self._pause and self._trial is None:
            self._trial = transfer

    def succeeded(self, transfer: Hashable) -> None:
        """It has ended well."""
        self._num_failures = 0
        if self._pause and transfer == self._trial:
            self._pause, self._trial = 0.0, None
            logger.warning("%s go on: one has ended well again", self._what)

    def failed(self, transfer: Hashable, *, hangs: bool = False) -> None:
        """It has failed, or ``hangs``."""
        self._num_failures += 1
        if self._pause:
            if transfer == self._trial:
                self._open(min(2 * self._pause, LONGEST_PAUSE_SECONDS))
        elif hangs or self._num_failures >= FAILURES_TO_OPEN:
            logger.warning(
                "%s pause: %s; one is tried after %g s, then after twice as long each time, up to %g s. "
                "Requests are served without them",
                self._what,
                "one hangs" if hangs else f"{self._num_failures} in a row failed",
                FIRST_PAUSE_SECONDS,
                LONGEST_PAUSE_SECONDS,
            )
            self._open(FIRST_PAUSE_SECONDS)

    def dismissed(self, transfer: Hashable) -> None:
        """It has ended in a way that says nothing about transfers."""
        if transfer == self._trial:
            self._trial = None

    def check_invariants(self) -> None:
        """An outage has a pause within its limits, and nothing is on trial without one."""
        is_closed = not self._pause and self._trial is None
        is_open = FIRST_PAUSE_SECONDS <= self._pause <= LONGEST_PAUSE_SECONDS
        assert is_closed or is_open, f"{self._what}: a pause of {self._pause} s, {self._trial} on trial"
        assert self._num_failures >= 0, f"{self._what}: {self._num_failures} failures in a row"
        assert self._pause or self._num_failures < FAILURES_TO_OPEN, (
            f"{self._what}: {self._num_failures} in a row failed, and none pauses"
        )

    def _open(self, pause: float) -> None:
        self._pause, self._trial = pause, None
        self._open_until = self._clock() + pause
