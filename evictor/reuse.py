"""Learns how likely positions are asked for again, by what kind of request asked last and how long ago.

Positions are judged by *kind*: how often they were asked for after the first time, how much of the last request
was new, how much of it was known. Time is counted in *ticks*: positions that requests ask for. An *episode* of a
position begins when a request asks for it and ends when the next one does, or when it is forgotten.

For every kind and age, the *hazard* is the share of episodes that reached that age and ended with a use before
the next; from hazards follows an index of what a slot earns that such a position keeps: the best over stopping
ages of P(used before that) / E[ticks held until then]. That is the index of Gittins (1979, "Bandit processes and
dynamic allocation indices") for keeping an item that is given up when it is no longer worth it.
"""

import math
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_USES, NUM_NEW, NUM_KNOWN = 4, 8, 3
NUM_KINDS = NUM_USES * NUM_NEW * NUM_KNOWN
_KINDS_PER_USES = NUM_NEW * NUM_KNOWN

_NUM_AGES = 14  # the first to an eighth of the capacity, each of the others twice as old as the one before
_STEPS = 4  # of the index within each of them

_PRIOR_HAZARD = 0.2  # of ages between half a capacity and a whole one, and so on; even below: the order of LRU
_PRIOR_REQUESTS = 30.0  # whose evidence weighs as much as that
_GROUP_REQUESTS = 70.0  # whose evidence of a kind weighs as much as that of all kinds with as many uses

_MEMORY = 128.0  # capacities after which evidence weighs 1/e
_MEAN_OVER = 2000  # requests
_MAX_SNAPSHOTS = 256


class ReuseStatistics:
    """Counts episodes, and makes of them a table of what positions are worth."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: positions that fit the pool."""
        self._capacity = capacity
        self.mean_request = 0.0
        """Positions that a request asks for, of late."""
        self._num_requests = 0
        edges = [0.0, *(capacity / 8 * 2.0**octave for octave in range(_NUM_AGES))]
        self._edges = edges[:_NUM_AGES]
        self._bounds = np.array(edges)
        octaves = zip(edges, edges[1:], strict=False)
        self._steps = [
            (low + (high - low) * step / _STEPS if low == 0 else low * (high / low) ** (step / _STEPS))
            for low, high in octaves
            for step in range(_STEPS)
        ]
        self._hits = np.zeros((NUM_KINDS, _NUM_AGES))
        self._ends = np.zeros((NUM_KINDS, _NUM_AGES))  # with or without a hit
        self._begun = np.zeros(NUM_KINDS)
        self._snapshots = np.zeros((_MAX_SNAPSHOTS, NUM_KINDS))  # of what had begun
        self._snapshot_ticks: list[int] = []
        self._new_begun = [0.0] * NUM_KINDS
        self._new_hits: list[tuple[int, int]] = []  # kind and age as one number, positions
        self._new_ends: list[tuple[int, int]] = []
        self._learned_at = 0
        self._table: list[list[float]] = []
        self.learn(0)

    def request(self, num_positions: int) -> None:
        """A request asks for so many."""
        self._num_requests = min(self._num_requests + 1, _MEAN_OVER)
        self.mean_request += (num_positions - self.mean_request) / self._num_requests

    def kind(self, uses: int, num_new: int, num_known: int) -> int:
        """Of positions used ``uses`` times before, by a request with so many known and unknown positions.

        Numbers of positions count relative to the mean request, so that block size does not matter.
        """
        mean = self.mean_request or 1.0
        new = max(1, min(NUM_NEW - 1, int(num_new * 32 / mean).bit_length())) if num_new else 0
        known = 0 if not num_known else 1 if num_known * 8 < mean else 2
        return (min(uses, NUM_USES - 1) * NUM_NEW + new) * NUM_KNOWN + known

    def begin(self, kind: int, num_positions: int) -> None:
        """Episodes begin; a negative number takes some back that had just begun."""
        self._new_begun[kind] += num_positions

    def end(self, kind: int, age: int, num_positions: int, *, with_hit: bool) -> None:
        """Episodes end at ``age`` ticks: a request asks for their positions, or they are forgotten."""
        event = kind * _NUM_AGES + bisect_right(self._edges, age) - 1, num_positions
        self._new_ends.append(event)
        if with_hit:
            self._new_hits.append(event)

    def value(self, kind: int, age: int) -> float:
        """What a slot earns that keeps such a position: hits per tick."""
        return self._table[kind][bisect_right(self._steps, age) - 1]

    def next_step(self, age: int) -> float:
        """The next age at which ``value`` changes."""
        step = bisect_right(self._steps, age)
        return self._steps[step] if step < len(self._steps) else math.inf

    def is_due(self, tick: int) -> bool:
        """Whether enough has happened to learn from it: rarer and rarer, then at a steady pace."""
        least, most = 2 * self.mean_request, max(64 * self.mean_request, self._capacity / 10)
        return tick - self._learned_at >= max(least, min(tick / 16, most))

    def learn(self, tick: int) -> None:
        """Make the table anew. Whole arrays; the time depends on neither capacity nor history."""
        self._take_in_news(tick)
        hits, at_risk = self._hits, self._at_risk(tick)
        prior = _PRIOR_HAZARD * np.minimum(1.0, np.diff(self._bounds) / (self._capacity / 2))
        hazard = _shrunk(hits.sum(0), at_risk.sum(0), prior, _PRIOR_REQUESTS * self.mean_request)
        weight = _GROUP_REQUESTS * self.mean_request
        shape = NUM_USES, _KINDS_PER_USES, _NUM_AGES
        hits, at_risk = hits.reshape(shape), at_risk.reshape(shape)
        hazard = _shrunk(hits.sum(1), at_risk.sum(1), hazard, weight)
        hazard = _shrunk(hits, at_risk, hazard[:, np.newaxis], weight)
        index = _gittins(hazard.reshape(NUM_KINDS, _NUM_AGES), np.diff(self._bounds))
        steps = np.arange(_STEPS) / _STEPS
        later = np.append(index[:, 1:], index[:, -1:], axis=1)
        table = index[..., np.newaxis] * (1 - steps) + later[..., np.newaxis] * steps
        self._table = table.reshape(NUM_KINDS, -1).tolist()

    def check_invariants(self) -> None:
        """Counts are possible, and the table is one of finite values."""
        assert (self._hits >= 0).all(), "negative hits"
        assert (self._ends >= self._hits - 1e-6).all(), "more hits than ends"
        assert self._snapshot_ticks == sorted(self._snapshot_ticks), "snapshots out of order"
        values = np.array(self._table)
        assert values.shape == (NUM_KINDS, _NUM_AGES * _STEPS), f"a table of {values.shape}"
        assert np.isfinite(values).all(), "a value is not finite"
        assert (values >= 0).all(), "a value is negative"

    def _take_in_news(self, tick: int) -> None:
        decay = math.exp(-(tick - self._learned_at) / (_MEMORY * self._capacity))
        self._learned_at = tick
        for counts, news in ((self._hits, self._new_hits), (self._ends, self._new_ends)):
            counts *= decay
            if news:
                where, weights = np.array(news).T
                counts += np.bincount(where, weights, counts.size).reshape(counts.shape)
                news.clear()
        self._begun *= decay
        self._begun += self._new_begun
        self._new_begun = [0.0] * NUM_KINDS
        taken = len(self._snapshot_ticks)
        if taken == _MAX_SNAPSHOTS:  # half as many of the older ones
            kept = [*range(0, taken // 2, 2), *range(taken // 2, taken)]
            self._snapshots[: len(kept)] = self._snapshots[kept]
            self._snapshot_ticks = [self._snapshot_ticks[each] for each in kept]
            taken = len(kept)
        self._snapshots[:taken] *= decay
        self._snapshots[taken] = self._begun
        self._snapshot_ticks.append(tick)

    def _at_risk(self, tick: int) -> Floats:
        """Episodes that reached an age, those still under way in it and forgotten ones by half.

        How many reached it: those begun that long ago or longer, less those that had ended by then.
        """
        reached = np.zeros((NUM_KINDS, _NUM_AGES + 1))
        for age, edge in enumerate(self._edges):
            taken = bisect_right(self._snapshot_ticks, tick - edge)
            reached[:, age] = self._snapshots[taken - 1] if taken else 0.0
        before = np.cumsum(self._ends, axis=1) - self._ends
        past, now = reached[:, 1:], reached[:, :-1]
        forgotten = self._ends - self._hits
        return np.maximum((past + now) / 2 - before - forgotten / 2, self._hits)


def _shrunk(hits: Floats, at_risk: Floats, towards: Floats, weight: float) -> Floats:
    """Hazards, mixed with what is believed without these counts; ``weight`` in positions."""
    weight = max(weight, 1.0)
    return np.minimum((hits + weight * towards) / (at_risk + weight), 1.0)


def _gittins(hazard: Floats, widths: Floats) -> Floats:
    """The index at the beginning of every age.

    Args:
        hazard: by kind and age.
        widths: of ages, in ticks.
    """
    ones = np.ones((len(hazard), 1))
    alive = np.concatenate([ones, np.cumprod(1 - hazard, axis=1)], axis=1)
    held = np.cumsum(np.append(0 * ones, (alive[:, 1:] + alive[:, :-1]) / 2 * widths, axis=1), axis=1)
    used_until = alive[:, :-1, np.newaxis] - alive[:, np.newaxis, :]
    held_until = held[:, np.newaxis, :] - held[:, :-1, np.newaxis]
    rates = np.where(held_until > 0, used_until / np.where(held_until > 0, held_until, 1), 0)
    best: Floats = rates.max(axis=2)
    return best
