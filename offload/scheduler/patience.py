"""Patience: how long requests may wait for GPU blocks that stores hold."""

from collections.abc import Callable

SHARE_OF_TIME = 1 / 16
"""That may be spent on waiting."""

LONGEST_WAIT_SECONDS = 0.5
"""At once, after a time without waiting."""

DEEPEST_DEBT_SECONDS = 30.0
"""Copies that have begun cannot be taken back; they are given up after that time."""


class Patience:
    """An account of time: it grows by a sixteenth of what passes, and shrinks by what is spent on waiting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with a full account; ``clock`` in seconds."""
        self._clock = clock
        self._seconds = LONGEST_WAIT_SECONDS
        self._since = clock()
        self._is_spent = False

    @property
    def is_over(self) -> bool:
        """Whether nobody should wait any longer."""
        return self._seconds <= 0

    def spend(self, is_spent: bool) -> None:
        """A step begins: whether, until the next one does, a request waits for blocks that stores hold."""
        now = self._clock()
        passed, self._since = now - self._since, now
        self._seconds += -passed if self._is_spent else passed * SHARE_OF_TIME
        self._seconds = min(max(self._seconds, -DEEPEST_DEBT_SECONDS), LONGEST_WAIT_SECONDS)
        self._is_spent = is_spent

    def exhaust(self) -> None:
        """A request lost its blocks while stores held some: that is as bad as the longest wait."""
        self._seconds = max(min(self._seconds - LONGEST_WAIT_SECONDS, 0.0), -DEEPEST_DEBT_SECONDS)

    def check_invariants(self) -> None:
        """Never more than the longest wait, nor less than the deepest debt."""
        assert -DEEPEST_DEBT_SECONDS <= self._seconds <= LONGEST_WAIT_SECONDS, f"{self._seconds} s are left"
