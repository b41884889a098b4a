"""What jobs that nobody waits for may take while requests wait for others."""

STORE_BYTES_PER_SECOND = 4 << 30
"""What stores may take of memory and link while loads are under way: a sixth of PCIe 4.0 with 16 lanes."""

HOLD_SECONDS = 0.5
"""No store is held back for longer than that: it holds GPU blocks."""

_BURST_BYTES = 32 << 20


class Allowance:
    """Bytes that may be moved now. They come back at ``STORE_BYTES_PER_SECOND``, up to a burst."""

    def __init__(self, now: float) -> None:
        """The whole burst; ``now`` in seconds."""
        self._left = float(_BURST_BYTES)
        self._at = now

    def refresh(self, now: float) -> None:
        """Time has passed."""
        self._left = min(self._left + (now - self._at) * STORE_BYTES_PER_SECOND, float(_BURST_BYTES))
        self._at = now

    def has_turn(self, since: float) -> bool:
        """Whether a job that waits since then may begin."""
        return self._left > 0 or self._at >= since + HOLD_SECONDS

    def take(self, num_bytes: int) -> None:
        """So many are moved."""
        self._left -= num_bytes

    def check_invariants(self) -> None:
        """No more than a burst is saved up."""
        assert self._left <= _BURST_BYTES, f"those held may take {self._left} bytes now"
