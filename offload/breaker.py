"""The circuit breaker: after repeated faults copies pause for a while, then are tried again."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 8
"""Failed jobs in a row, with no good one between."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class CircuitBreaker:
    """Open: no job should begin. Closed: all may.

    It opens after ``FAILURES_TO_OPEN`` failures in a row, for ``FIRST_PAUSE_SECONDS``. When the pause is
    over jobs are tried again: the first failure opens it for twice as long as before, up to
    ``LONGEST_PAUSE_SECONDS``, and the first success closes it for good. One log line at the begin and
    one at the end of an outage, however many pauses it has.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._num_failures = 0
        self._pause = 0.0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether jobs are paused now."""
        return self._pause > 0 and self._clock() < self._open_until

    @property
    def is_outage(self) -> bool:
        """Whether copies have failed so often that the next one is a trial."""
        return self._pause > 0

    def failed(self) -> None:
        """A job failed. Failures of jobs that began before the pause do not prolong it."""
        self._num_failures += 1
        if self.is_open or (not self._pause and self._num_failures < FAILURES_TO_OPEN):
            return
        if not self._pause:
            logger.warning(
                "offload pauses: %d copies in a row failed; it is tried again after %g s, then twice as "
                "long up to %g s. Requests are served without it",
                self._num_failures,
                FIRST_PAUSE_SECONDS,
                LONGEST_PAUSE_SECONDS,
            )
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS) or FIRST_PAUSE_SECONDS
        self._open_until = self._clock() + self._pause

    def succeeded(self) -> None:
        """A job ended well."""
        self._num_failures = 0
        if self._pause and not self.is_open:
            self._pause = 0.0
            logger.warning("offload goes on: a copy has ended well again")
