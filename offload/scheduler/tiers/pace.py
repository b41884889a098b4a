"""Whether a fetch is made: only where it is faster than computing, by what was measured."""

from collections.abc import Callable

from offload.scheduler.costs import LinkCost, PrefillCost

_RETRY_SECONDS = 30.0
"""What was slow is tried again after that long."""


class Pace:
    """Says whether fetching beats computing.

    A fetch is made while one of the two is unknown. After ``_RETRY_SECONDS`` without one it is tried again,
    or a disk that was busy once would never be asked again.
    """

    def __init__(self, prefill: PrefillCost, clock: Callable[[], float]) -> None:
        """``prefill``: what tokens cost. ``clock`` in seconds."""
        self._prefill = prefill
        self._clock = clock
        self._fetches = LinkCost()  # from the decision to the end, so with all that they wait for
        self._tried_at = clock()

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """So many bytes have come, from the decision to the end."""
        self._fetches.add(num_bytes, seconds)

    def check_invariants(self) -> None:
        """Nothing took less than no time."""
        self._fetches.check_invariants()
        assert self._tried_at <= self._clock(), f"a fetch was tried at {self._tried_at}, which is to come"

    def is_worth(self, first: int, stop: int, num_bytes: int, least: float = 0.0) -> bool:
        """Whether so many bytes are fetched sooner than these tokens of a prompt are computed.

        Or within ``least`` seconds, which are waited in any case.
        """
        if not self._prefill.is_known or not self._fetches.is_known:
            return True
        now = self._clock()
        is_faster = self._fetches.seconds(num_bytes) < max(self._prefill.seconds(first, stop), least)
        if is_faster or now >= self._tried_at + _RETRY_SECONDS:
            self._tried_at = now
            return True
        return False
