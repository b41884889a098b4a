"""A store that is gone: nobody asks it again at once, and one line is logged."""

import logging
import threading
from collections.abc import Callable

from offload.worker.media.base import BadExtentError

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Outage:
    """Whether a store is gone, and when it is tried again: after pauses that grow. For several threads."""

    def __init__(self, store: str, clock: Callable[[], float]) -> None:
        """It is not gone. ``store``: for logs, without secrets. ``clock``: in seconds."""
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._pause, self._until = 0.0, 0.0

    @property
    def is_on(self) -> bool:
        """Whether the store was gone when it was asked last."""
        return self._pause > 0

    def check(self) -> None:
        """Refuse to ask it while a pause lasts.

        Raises:
            BadExtentError: it does.
        """
        if self._clock() < self._until:
            raise BadExtentError(f"{self._store} is gone; it is tried again in a moment")

    def begins(self, error: Exception) -> None:
        """It was asked and is gone."""
        with self._lock:
            is_first = not self._pause
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._until = self._clock() + self._pause
        if is_first:
            logger.warning(
                "the store %s is gone (%s); it is tried again every %g s at least. Requests are served "
                "without it",
                *(self._store, error or type(error).__name__, _LONGEST_PAUSE),
            )

    def ends(self) -> None:
        """It has answered."""
        if not self._pause:
            return
        with self._lock:
            was_on, self._pause = self._pause > 0, 0.0
        if was_on:
            logger.warning("the store %s is back", self._store)

    def check_invariants(self) -> None:
        """A pause is no longer than it may be."""
        assert 0.0 <= self._pause <= _LONGEST_PAUSE, f"a pause of {self._pause} s"
