"""Failed copies in the log: one line in so many seconds, however many there are."""

import logging
import math
from collections.abc import Callable

from offload.worker.jobs import CANCELLED, TransferEnd

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 10.0


class FailureLog:
    """Counts them, and logs some."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._num_unlogged = 0
        self._quiet_until = -math.inf

    def warn(self, end: TransferEnd) -> None:
        """That copy has failed."""
        self._num_unlogged += 1
        if end.error == CANCELLED or self._clock() < self._quiet_until:
            return
        logger.warning(
            "%s of %d blocks failed (%d since the last such line): %s",
            end.route.verb,
            len(end.targets),
            self._num_unlogged,
            end.error,
        )
        self._num_unlogged = 0
        self._quiet_until = self._clock() + _QUIET_SECONDS
