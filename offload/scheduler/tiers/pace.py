"""What was measured here: how long a token takes to compute, and a byte to be fetched."""

from collections import deque
from collections.abc import Callable
from statistics import median

_LATEST = 32
_LEAST_TOKENS = 256
"""Of a step, to say something about prefill."""
_RETRY_SECONDS = 30.0
"""What was slow is tried again after that long."""


class Pace:
    """Says whether fetching beats computing, by what was measured of late.

    Of bytes the median counts, of tokens the lower quartile: behind a step the engine may have been idle.

    A fetch is made while one of the two is unknown. After ``_RETRY_SECONDS`` without one it is tried again,
    or a disk that was busy once would never be asked again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._step: tuple[float, int] | None = None  # when the last step began, and its tokens
        self._per_token: deque[float] = deque(maxlen=_LATEST)
        self._per_byte: deque[float] = deque(maxlen=_LATEST)
        self._tried_at = clock()

    def step(self, num_tokens: int) -> None:
        """A step of so many tokens begins, and the one before it has ended."""
        now = self._clock()
        if self._step is not None:
            began, before = self._step
            if before >= _LEAST_TOKENS:
                self._per_token.append((now - began) / before)
        self._step = (now, num_tokens)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """So many bytes have come, from the decision to the end."""
        if num_bytes:
            self._per_byte.append(seconds / num_bytes)

    @property
    def _seconds_per_token(self) -> float:
        return sorted(self._per_token)[len(self._per_token) // 4]

    def check_invariants(self) -> None:
        """Nothing took less than no time."""
        assert all(each >= 0 for each in (*self._per_token, *self._per_byte)), "a clock went backwards"

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether so many bytes are fetched sooner than so many tokens are computed."""
        if not self._per_token or not self._per_byte:
            return True
        now = self._clock()
        is_faster = num_bytes * median(self._per_byte) < num_tokens * self._seconds_per_token
        if is_faster or now >= self._tried_at + _RETRY_SECONDS:
            self._tried_at = now
            return True
        return False
