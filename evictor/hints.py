"""What requests ask for their own blocks, and what several of them ask for together."""

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from evictor.untracked import untrack


class Worth(IntEnum):
    """What a request says its positions are worth. ``UNWANTED``: not worth keeping."""

    UNWANTED = 0
    LOW = 1
    NORMAL = 2
    HIGH = 3


@dataclass(frozen=True, slots=True)
class KeepHints:
    """How the positions of one request are to be kept.

    Attributes:
        worth: which of them go before others.
        ttl: seconds without use after which they count as unwanted, and ``worth`` is over.
        pinned_until: the time, on the policy's clock, before which they are not evicted.
    """

    worth: Worth = Worth.NORMAL
    ttl: float = math.inf
    pinned_until: float = -math.inf

    @property
    def wants_protection(self) -> bool:
        """Whether they ask for more than others get, rather than for less."""
        return self.worth is Worth.HIGH or self.pinned_until > -math.inf


@dataclass(frozen=True, slots=True)
class Claims:
    """What all requests that used a position claim for it: at any time, the best that one of them asked for.

    Claims end: a worth once nobody used the position for that many seconds, a pin at its time. What has ended
    does not come back with the next use, which is worth what it asks for itself.

    Attributes:
        low: seconds without use for which the position is of low worth at least; 0: nobody asked for that.
        normal: the same for normal worth; no more than ``low``.
        high: the same for high worth; no more than ``normal``.
        pinned_until: the time before which it is not evicted.
    """

    low: float
    normal: float
    high: float
    pinned_until: float = -math.inf

    def __post_init__(self) -> None:
        untrack(self)  # numbers only

    @classmethod
    def of(cls, hints: KeepHints) -> "Claims":
        """Those of a single request."""
        low, normal, high = (
            hints.ttl if hints.worth >= each else 0.0 for each in (Worth.LOW, Worth.NORMAL, Worth.HIGH)
        )
        return cls(low, normal, high, hints.pinned_until)

    @property
    def wants_protection(self) -> bool:
        """Whether any of them is for more than others get."""
        return self.high > 0 or self.pinned_until > -math.inf

    @property
    def worth(self) -> Worth:
        """The best that is claimed."""
        if self.high:
            return Worth.HIGH
        if self.normal:
            return Worth.NORMAL
        return Worth.LOW if self.low else Worth.UNWANTED

    @property
    def ttl(self) -> float:
        """Seconds without use for which the position is of that ``worth``."""
        return self.high or self.normal or self.low or math.inf

    @property
    def unprotected(self) -> "Claims":
        """Without those for more than others get."""
        return Claims(self.low, self.normal, 0.0)

    @property
    def not_high(self) -> "Claims":
        """Without that of high worth."""
        return replace(self, high=0.0)

    def at(self, now: float, last_use: float) -> "Claims":
        """Those that have not ended ``now``, after a last use at ``last_use``."""
        is_pin_over = -math.inf < self.pinned_until <= now
        if not is_pin_over and last_use + self.ttl > now:
            return self
        low, normal, high = (
            ttl if last_use + ttl > now else 0.0 for ttl in (self.low, self.normal, self.high)
        )
        return Claims(low, normal, high, -math.inf if is_pin_over else self.pinned_until)

    def __or__(self, other: "Claims") -> "Claims":
        """Those of both: what is more of each."""
        both = Claims(
            max(self.low, other.low),
            max(self.normal, other.normal),
            max(self.high, other.high),
            max(self.pinned_until, other.pinned_until),
        )
        return self if both == self else both


PLAIN = Claims.of(KeepHints())
"""Those of a request without hints."""
