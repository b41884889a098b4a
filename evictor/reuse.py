"""Learns how likely positions are asked for again, by what kind of request asked last and how long ago.

Positions are judged by *kind*. A kind says how often they were asked for after the first time. It also says
how much of the last request was new, and how much of it was known. Time is counted in *ticks*: positions that
requests ask for. An *episode* of a position begins when a request asks for it and ends when the next one
does, or when it is forgotten.

For every kind and age, the *hazard* is the share of episodes that reached that age and ended with a use
before the next. From hazards follows an index: what a slot earns that such a position keeps. It is the best
over stopping ages of P(used before that) / E[ticks held until then]. That is the index of Gittins (1979,
"Bandit processes and dynamic allocation indices"). It is for keeping an item that is given up when it is no
longer worth it.
"""

import math
from bisect import bisect_right
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_USES, NUM_NEW, NUM_KNOWN = 4, 8, 3
NUM_KINDS = NUM_USES * NUM_NEW * NUM_KNOWN
_KINDS_PER_USES = NUM_NEW * NUM_KNOWN

_KINDS = [list(range(each, NUM_KINDS, _KINDS_PER_USES)) for each in range(_KINDS_PER_USES)]

_NUM_AGES = 14  # the first to an eighth of the capacity, each of the others twice as old as the one before
_STEPS = 4  # of the index within each of them

_PRIOR_HAZARD = 0.15  # from half a capacity to a whole one, and so on; even below: the order of LRU
_PRIOR_REQUESTS = 15.0  # whose evidence weighs as much as that
_GROUP_REQUESTS = 25.0  # whose evidence of a kind weighs as much as that of all kinds with as many uses

_MEMORY = 128.0  # capacities after which evidence weighs 1/e
_MEAN_OVER = 2000  # requests
_MAX_SPANS = 256
_MAX_NEWS = 2000


class ReuseStatistics:
    """Counts episodes, and makes of them an index: what positions are worth, by kind and age."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: positions that fit the pool."""
        self._capacity = capacity
        self.mean_request = 0.0
        """Positions that a request asks for, of late."""
        self._num_requests = 0
        edges = [0.0, *(capacity / 8 * 2.0**octave for octave in range(_NUM_AGES))]
        self._bounds = np.array(edges)
        self._steps = [
            (low + (high - low) * step / _STEPS if low == 0 else low * (high / low) ** (step / _STEPS))
            for low, high in pairwise(edges)
            for step in range(_STEPS)
        ]
        self._steps.append(math.inf)
        self._hits = np.zeros((NUM_KINDS, _NUM_AGES))
        self._forgotten = np.zeros((NUM_KINDS, _NUM_AGES))
        self._under_way = np.zeros((_MAX_SPANS, NUM_KINDS))  # by the span of time in which they began
        self._span_ends: list[int] = []
        self._new_begun = [0.0] * NUM_KINDS
        self._new_hits: list[tuple[int, int, int]] = []  # kind, age, positions
        self._new_forgotten: list[tuple[int, int, int]] = []
        self._learned_at = 0
        self._index: list[list[float]] = []
        self._index_of = 0, 0.0  # tick and mean request of the index to be made
        self._is_stale = True  # as long as nobody asks for a value of it
        self._due_at = 0.0
        self._num_new_hits = 0
        self._many_hits = 0.0
        self.learn(0)

    def request(self, num_positions: int) -> None:
        """A request asks for so many."""
        self._num_requests = min(self._num_requests + 1, _MEAN_OVER)
        self.mean_request += (num_positions - self.mean_request) / self._num_requests

    def kinds(self, num_new: int, num_known: int) -> list[int]:
        """Kinds of positions that a request with so many new and known ones asks for, by earlier requests.

        The last is for all larger numbers of uses, too. Numbers of positions count relative to the mean
        request, so that block size does not matter.
        """
        mean = self.mean_request or 1.0
        new = max(1, min(NUM_NEW - 1, int(num_new * 24 / mean).bit_length())) if num_new else 0
        known = 0 if not num_known else 1 if num_known * 8 < mean else 2
        return _KINDS[new * NUM_KNOWN + known]

    def begin(self, kind: int, num_positions: int) -> None:
        """Episodes begin; a negative number takes some back that had just begun."""
        self._new_begun[kind] += num_positions

    def hit(self, kind: int, age: int, num_positions: int) -> None:
        """Episodes end at ``age`` ticks: a request asks for their positions."""
        self._new_hits.append((kind, age, num_positions))
        self._num_new_hits += num_positions

    def forgotten(self, kind: int, age: int, num_positions: int) -> None:
        """Episodes end at ``age`` ticks: nobody will know when their positions are asked for."""
        self._new_forgotten.append((kind, age, num_positions))

    def value(self, kind: int, age: int) -> tuple[float, float]:
        """What a slot earns that keeps such a position, in hits per tick; the age at which that changes."""
        if self._is_stale:
            self._make_index()
        step = bisect_right(self._steps, age)
        which, part = divmod(step - 1, _STEPS)
        index = self._index[kind]
        value = index[which]
        return value + (index[which + 1] - value) * part / _STEPS, self._steps[step]

    def is_due(self, tick: int) -> bool:
        """Whether enough has happened to learn from it: rarer and rarer, then at a steady pace.

        Earlier when there are many hits for what is known of hits, or so much is new that taking it in would
        take a while.
        """
        num_news = len(self._new_hits) + len(self._new_forgotten)
        return tick >= self._due_at or self._num_new_hits >= self._many_hits or num_news > _MAX_NEWS

    def learn(self, tick: int) -> None:
        """Take in what is new; the index is made anew when somebody asks for a value.

        Whole arrays; the time does not depend on capacity or history.
        """
        self._take_in_news(tick)
        self._index_of, self._is_stale = (tick, self.mean_request), True
        least, most = 2 * self.mean_request, max(128 * self.mean_request, self._capacity / 5)
        self._due_at = tick + max(least, min(tick / 15, most))
        self._num_new_hits = 0
        self._many_hits = 2 * self.mean_request + self._hits.sum() / 8

    def num_under_way(self) -> Floats:
        """Episodes that have not ended, by kind."""
        under_way: Floats = self._under_way.sum(axis=0) + self._new_begun
        for kind, _, num_positions in (*self._new_hits, *self._new_forgotten):
            under_way[kind] -= num_positions
        return under_way

    def check_invariants(self) -> None:
        """Counts are possible, and the index is finite."""
        assert (self._hits >= 0).all(), "negative hits"
        assert (self._forgotten >= 0).all(), "fewer than none forgotten"
        assert self._span_ends == sorted(self._span_ends), "spans out of order"
        assert len(self._span_ends) <= _MAX_SPANS, f"{len(self._span_ends)} spans"
        if self._is_stale:
            self._make_index()
        values = np.array(self._index)
        assert values.shape == (NUM_KINDS, _NUM_AGES + 1), f"indices of {values.shape}"
        assert np.isfinite(values).all(), "a value is not finite"
        assert (values >= 0).all(), "a value is negative"

    def _make_index(self) -> None:
        """Of what was known when it was learned. Whole arrays."""
        tick, mean_request = self._index_of
        hits, at_risk = self._hits, self._at_risk(tick)
        prior = _PRIOR_HAZARD * np.minimum(1.0, np.diff(self._bounds) / (self._capacity / 2))
        hazard = _shrunk(hits.sum(0), at_risk.sum(0), prior, _PRIOR_REQUESTS * mean_request)
        weight = _GROUP_REQUESTS * mean_request
        shape = NUM_USES, _KINDS_PER_USES, _NUM_AGES
        hits, at_risk = hits.reshape(shape), at_risk.reshape(shape)
        hazard = _shrunk(hits.sum(1), at_risk.sum(1), hazard, weight)
        hazard = _shrunk(hits, at_risk, hazard[:, np.newaxis], weight)
        index = _gittins(hazard.reshape(NUM_KINDS, _NUM_AGES), np.diff(self._bounds))
        self._index = np.append(index, index[:, -1:], axis=1).tolist()
        self._is_stale = False

    def _take_in_news(self, tick: int) -> None:
        decay = math.exp(-(tick - self._learned_at) / (_MEMORY * self._capacity))
        self._learned_at = tick
        self._begin_span(tick)
        for counts, news in ((self._hits, self._new_hits), (self._forgotten, self._new_forgotten)):
            counts *= decay
            if not news:
                continue
            kinds, ages, weights = np.array(news).T
            news.clear()
            np.add.at(counts, (kinds, np.searchsorted(self._bounds[:-1], ages, "right") - 1), weights)
            ends = np.array(self._span_ends)
            spans = np.minimum(np.searchsorted(ends, tick - ages), len(ends) - 1)
            np.subtract.at(self._under_way, (spans, kinds), weights)

    def _begin_span(self, tick: int) -> None:
        """What began since the last one is a span of its own; of old ones two become one."""
        spans, ends = self._under_way, self._span_ends
        taken = len(ends)
        if taken == _MAX_SPANS:
            half = taken // 2
            spans[: half // 2] = spans[0:half:2] + spans[1:half:2]
            spans[half // 2 : half // 2 + half] = spans[half:taken]
            self._span_ends = ends = ends[1:half:2] + ends[half:]
            taken = len(ends)
            spans[taken:] = 0
        spans[taken] = self._new_begun
        ends.append(tick)
        self._new_begun = [0.0] * NUM_KINDS

    def _at_risk(self, tick: int) -> Floats:
        """Episodes that reached an age; those still in it, and those forgotten in it, count by half."""
        num_spans = len(self._span_ends)
        is_older = np.array(self._span_ends) <= tick - np.append(self._bounds[:-1], np.inf)[:, np.newaxis]
        older = (is_older.astype(np.float64) @ self._under_way[:num_spans]).T
        ended = self._hits + self._forgotten
        ended_later = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        under_way = np.maximum((older[:, 1:] + older[:, :-1]) / 2, 0)
        at_risk: Floats = ended_later + self._hits + self._forgotten / 2 + under_way
        return at_risk


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
    num_kinds, num_ages = hazard.shape
    alive = np.ones((num_ages + 1, num_kinds))
    np.cumprod(1 - hazard.T, axis=0, out=alive[1:])
    held = np.zeros_like(alive)
    np.cumsum((alive[1:] + alive[:-1]) / 2 * widths[:, np.newaxis], axis=0, out=held[1:])
    used_until = alive[:-1, np.newaxis] - alive
    held_until = held - held[:-1, np.newaxis]
    np.maximum(held_until, 1e-9, out=held_until)  # stops in the past are no gain
    used_until /= held_until
    best: Floats = used_until.max(axis=1).T
    return best
