"""How much may be written to a tier: disks wear out."""

from collections.abc import Callable

DAY_SECONDS = 86_400.0


class WriteBudget:
    """Bytes per day. What a tier holds may be written at once: the first fill is free."""

    def __init__(self, bytes_per_day: float, tier_bytes: float, clock: Callable[[], float]) -> None:
        """``tier_bytes``: what is saved up at most, and there from the beginning; ``clock`` in seconds."""
        self._rate = bytes_per_day / DAY_SECONDS
        self._most = self._left = tier_bytes
        self._clock = clock
        self._at = clock()

    def begin_again(self, num_kept: float, seconds: float, num_written: float) -> None:
        """A tier from before: what it keeps was written, and what its last life has not used up is left.

        Args:
            num_kept: bytes that it has.
            seconds: since that life began.
            num_written: bytes of what it has that were written in that life.
        """
        unused = max(0.0, seconds * self._rate - num_written)
        self._left = min(self._most, self._left - num_kept + unused)

    @property
    def left(self) -> float:
        """Bytes that may be written now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left

    def take(self, num_bytes: int) -> None:
        """So many are written."""
        self._left -= num_bytes

    def check_invariants(self) -> None:
        """No more is saved up than a tier holds."""
        assert self._left <= self._most, f"{self._left} bytes may be written, {self._most} at most"
