"""What a slot earns that keeps a position: its index, and what is left of that beside others and a copy."""

import math

import numpy as np

from evictor.ages import NUM_STEPS, Floats, Place

SURE_HITS = 0.065
"""A copy costs as much as 0.043 hits bring, about: at 23 GB/s, and where KV is computed at 1 GB/s. The rest
is for what may be wrong about hits that are foretold."""
ROOM_HITS = 0.038
"""What a slot has to earn elsewhere while the GPU has the position, too, before that is copied again."""
_RATE_OVER = 256
"""Times that somebody asked."""


class GoingRate:
    """What a slot earns in a tick of late: the mean index of what would go next, whenever somebody asked.

    The index of one says little of the time for which another is held.
    """

    __slots__ = ("_num", "_value")

    def __init__(self) -> None:
        """Nobody has asked."""
        self._num = 0.0
        self._value = 0.0

    def after(self, index: float) -> float:
        """The rate now that somebody asks, and what would go next has that index."""
        self._num = min(self._num + 1, _RATE_OVER)
        self._value += (index - self._value) / self._num
        return self._value

    def least(self, index: float) -> float:
        """The rate as ``after`` would say, or that index, whichever is less. Nobody has asked by that."""
        return min(index, self._value + (index - self._value) / min(self._num + 1, _RATE_OVER))

    def learned(self, part: float) -> None:
        """Of all that is known so much is new. Indices from before count that much less."""
        self._num *= 1 - part

    def check_invariants(self) -> None:
        """A rate is a number, and not negative."""
        assert 0 <= self._num <= _RATE_OVER, f"{self._num:g} asked, of {_RATE_OVER}"
        assert 0 <= self._value < math.inf, f"slots earn {self._value}"


class Lives:
    """How positions of several kinds live on, by age: alive as long as nobody has asked for them.

    Attributes:
        alive: part that reaches the beginning of each age, and the end of the last; ``[ages + 1, kinds]``.
        held: ticks, or seconds, that one is held until then, of the same shape.
    """

    __slots__ = ("alive", "held")

    def __init__(self, hazard: Floats, widths: Floats) -> None:
        """Of hazards by kind and age, and widths of these ages by kind."""
        num_kinds, num_ages = hazard.shape
        self.alive = np.ones((num_ages + 1, num_kinds))
        np.cumprod(1 - hazard.T, axis=0, out=self.alive[1:])
        self.held = np.zeros_like(self.alive)
        np.cumsum((self.alive[1:] + self.alive[:-1]) / 2 * widths.T, axis=0, out=self.held[1:])

    def index(self) -> Floats:
        """The index of Gittins at the beginning of each step of each age, and behind the last, by kind.

        Within an age it goes from that of its beginning towards that of the next one. It goes the less far,
        the more are asked for within the age: what reaches the next one is not like most of them then.
        """
        used_until = self.alive[:-1, np.newaxis] - self.alive
        held_until = self.held - self.held[:-1, np.newaxis]
        np.maximum(held_until, 1e-9, out=held_until)  # stops in the past are no gain
        used_until /= held_until
        best = used_until.max(axis=1)
        asked = 1 - self.alive[1:] / np.maximum(self.alive[:-1], 1e-12)
        to_next = np.diff(best, axis=0, append=best[-1:]) * (1 - asked**2)
        parts = np.arange(NUM_STEPS)[:, np.newaxis] / NUM_STEPS
        steps = best[:, np.newaxis] + to_next[:, np.newaxis] * parts
        index: Floats = np.append(steps.reshape(-1, best.shape[1]), best[-1:], axis=0).T
        return index

    def outlook(self, kind: int, since: Place, until: Place) -> tuple[float, float]:
        """Of what is alive at one age: the part that is at another, and how long one is held until then."""
        alive, held = self._at(kind, since)
        alive_then, held_then = self._at(kind, until)
        alive = max(alive, 1e-12)
        return alive_then / alive, (held_then - held) / alive

    def gain(self, kind: int, age: int, rate: float) -> float:
        """Hits of a position of that kind and age, beyond ``rate`` for the time it is held; 0 at least.

        It is held until the best of all ages. O(ages).
        """
        alive, held = self.alive[age:, kind], self.held[age:, kind]
        gains = alive[0] - alive - rate * (held - held[0])
        return float(gains.max()) / max(float(alive[0]), 1e-12)

    def _at(self, kind: int, place: Place) -> tuple[float, float]:
        """How many are alive then, and for how long one was held, as if they died evenly within an age."""
        age, part = place
        first, last = self.alive[age : age + 2, kind].tolist()
        held, held_until = self.held[age : age + 2, kind].tolist()
        alive = first + (last - first) * part
        return alive, held + (held_until - held) * part * (first + alive) / max(first + last, 1e-12)
