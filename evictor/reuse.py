"""Learns how likely positions are asked for again, by what kind of request asked last and how long ago.

Positions are judged by *kind*, see ``kinds``. Time is counted in *ticks*: positions that requests ask for. An
*episode* of a position begins when a request asks for it and ends when the next one does, or when it is
forgotten. It is counted in the *books* of its kind: one by what was new and known in the request, others by
what is known of the chain's turns. These are heeded once it has been seen that endings foretell reuse.

Books by turn count ages in seconds: how long a tool or a user takes does not depend on what others ask for.
What a slot earns in a second is divided by the ticks that a second has of late.

For every kind and age, the *hazard* is the share of episodes that reached that age and ended with a use
before the next. From hazards follows an index: what a slot earns that such a position keeps. It is the best
over stopping ages of P(used before that) / E[ticks held until then]. That is the index of Gittins (1979,
"Bandit processes and dynamic allocation indices"). It is for keeping an item that is given up when it is no
longer worth it.
"""

import numpy as np

from evictor.ages import NUM_AGES, NUM_STEPS, Ages, Floats, Ints
from evictor.gittins import Lives
from evictor.kinds import (
    BASE_KINDS,
    FIRST_ENDED,
    FIRST_RUNNING,
    NUM_BASE,
    NUM_BOOKS,
    NUM_CELLS,
    NUM_KNOWN,
    NUM_NEW,
    NUM_USES,
    all_books,
    base_of,
    books_of,
    endings_of,
)
from evictor.moments import Moments
from evictor.shrinkage import Foretold, by_turn, foretold, prior_of, shrunk

_FIRST_TICKS = 1 / 8  # capacities, to which the first class of ages reaches
_FIRST_SECONDS = 1.0  # the same in books by turn
_LONG_AGO = 1e9  # seconds, in place of those that nobody knows

_PRIOR_REQUESTS = 15.0  # whose evidence weighs as much as that
_GROUP_REQUESTS = 25.0  # whose evidence of a kind weighs as much as that of all kinds with as many uses

_MEMORY = 128.0  # capacities after which evidence weighs 1/e
_TURN_MEMORY = 2000.0  # requests after which it does so at the earliest in books by turn
_MEAN_OVER = 2000  # requests
_MAX_SPANS = 256
_MAX_NEWS = 2000

_ENOUGH_LEAD = 1.0  # requests whose reuse endings make e times as likely: they are heeded from then on
_MOST_LEAD = 64.0
_IS_BY_TURN = np.arange(NUM_BOOKS)[:, np.newaxis] >= FIRST_RUNNING

_Counts = list[tuple[int, int, int, int]]
"""Kind, ticks of the begin and of what happened, positions."""


class ReuseStatistics:
    """Counts episodes, and makes of them an index: what positions are worth, by kind and age."""

    def __init__(self, capacity: int, seconds: float = 0.0) -> None:
        """``capacity``: positions that fit the pool; ``seconds``: the moment."""
        self._capacity = capacity
        self.tick = 0
        """That of the last request."""
        self.moments = Moments()
        """When requests came."""
        self.moments.add(0, seconds)
        self.mean_request = 0.0
        """Positions that a request asks for, of late."""
        self._num_requests = 0
        self._ticks, self._seconds = Ages(capacity * _FIRST_TICKS), Ages(_FIRST_SECONDS)
        self._ticks_per_second = 1.0
        self._hits = np.zeros((NUM_BOOKS, NUM_AGES))
        self._forgotten = np.zeros((NUM_BOOKS, NUM_AGES))
        self._under_way = np.zeros((_MAX_SPANS, NUM_BOOKS))  # by the span of time in which they began
        self._span_ends: list[int] = []
        self._new_begun: dict[int, int] = {}  # positions, by kind
        self._new_hits: _Counts = []
        self._new_forgotten: _Counts = []
        self._new_answered: _Counts = []
        self._learned_at = 0
        self._risk: Floats  # by book and age, when it was learned
        self._is_known: list[bool] = []  # by book: whether anything was ever counted there
        self._index: list[list[float] | None] = []  # by book; None: nothing is known of it
        self._lives: Lives  # of books with an index, in rows
        self._rows: Ints  # by book
        self._judges: dict[int, int] = {}  # the book by which a kind is judged
        self._foretold: Foretold | None = None
        self._lead = 0.0  # of endings, see _judge
        self._heeds_turns = False  # in the index as it is
        self._index_of = 0, 0.0  # tick and mean request of the index to be made
        self._is_stale = True  # as long as nobody asks for a book
        self._has_index = False  # as long as nobody asks for a value
        self._due_at = 0.0
        self._num_new_hits = 0
        self._many_hits = 0.0
        self.learn()

    def request(self, num_positions: int, seconds: float) -> None:
        """A request asks for so many at that moment."""
        self.tick += num_positions
        self.moments.add(self.tick, seconds)
        self._num_requests = min(self._num_requests + 1, _MEAN_OVER)
        self.mean_request += (num_positions - self.mean_request) / self._num_requests

    def kinds(self, num_new: int, num_known: int) -> list[int]:
        """Base kinds of positions that a request with so many new and known ones asks for, by uses.

        The last is for all larger numbers of uses, too. Numbers of positions count relative to the mean
        request, so that block size does not matter.
        """
        mean = self.mean_request or 1.0
        new = max(1, min(NUM_NEW - 1, int(num_new * 24 / mean).bit_length())) if num_new else 0
        known = 0 if not num_known else 1 if num_known * 8 < mean else 2
        return BASE_KINDS[new * NUM_KNOWN + known]

    def begin(self, kind: int, num_positions: int) -> None:
        """Episodes begin; a negative number takes some back that had just begun."""
        self._new_begun[kind] = self._new_begun.get(kind, 0) + num_positions

    def hit(self, kind: int, began: int, num_positions: int) -> None:
        """Episodes that ``began`` at that tick end: a request asks for their positions."""
        self._new_hits.append((kind, began, self.tick, num_positions))
        self._num_new_hits += num_positions

    def forgotten(self, kind: int, began: int, num_positions: int) -> None:
        """Episodes that ``began`` then end: nobody will know when their positions are asked for."""
        self._new_forgotten.append((kind, began, self.tick, num_positions))

    def answered(self, kind: int, began: int, num_positions: int) -> None:
        """Episodes that ``began`` then are of this kind now, which says how the answer ended."""
        self._new_answered.append((kind, began, self.tick, num_positions))

    def book_of(self, kind: int) -> int:
        """The book by which a position of that kind is judged now."""
        if self._is_stale:
            self._weigh()
        book = self._judges.get(kind)
        if book is None:
            books = books_of(kind) if self._heeds_turns else [base_of(kind)]
            book = next((each for each in reversed(books) if self._is_known[each]), base_of(kind))
            self._judges[kind] = book
        return book

    def value(self, book: int, last_use: int) -> tuple[float, float]:
        """What a slot earns that keeps such a position, in hits per tick; the tick at which that changes.

        ``book``: that by which the position is judged; see ``book_of``.
        """
        if not self._has_index:
            self._make_index()
        index, tick = self._index[book], self.tick
        assert index is not None, f"nothing is known of book {book}"
        if book < FIRST_RUNNING:
            value, change = self._ticks.at(index, tick - last_use)
            return value, last_use + change
        age = min(self.moments.at(tick) - self.moments.at(last_use), _LONG_AGO)
        pace = self._ticks_per_second
        value, change = self._seconds.at(index, age)
        return value / pace, tick + max(1.0, (change - age) * pace)

    def gain(self, book: int, last_use: int, rate: float) -> float:
        """Hits that such a position brings, beyond ``rate`` for each tick that it keeps a slot.

        ``book`` and ``last_use``: as for ``value``.
        """
        ages, age, pace = self._age_of(book, last_use)
        return self._lives.gain(int(self._rows[book]), ages.place_of(age)[0], rate * pace)

    def outlook(self, book: int, last_use: int, num_ticks: int) -> tuple[float, float]:
        """What becomes of such a position until so many ticks after its last use.

        The part of them that nobody asks for, and the ticks until then, or until somebody does.
        """
        ages, age, pace = self._age_of(book, last_use)
        num_more = max(0, num_ticks - (self.tick - last_use))
        until = ages.place_of(age + num_more / pace)
        alive, held = self._lives.outlook(int(self._rows[book]), ages.place_of(age), until)
        return alive, held * pace

    def is_due(self) -> bool:
        """Whether enough has happened to learn from it: rarer and rarer, then at a steady pace.

        Earlier when there are many hits for what is known of hits, or so much is new that taking it in would
        take a while.
        """
        num_news = len(self._new_hits) + len(self._new_forgotten) + len(self._new_answered)
        return self.tick >= self._due_at or self._num_new_hits >= self._many_hits or num_news > _MAX_NEWS

    def learn(self) -> float:
        """Take in what is new; the index is made anew when somebody asks for a value.

        Returns the part of all known hits that is new: 0 to 1. Whole arrays; the time does not depend on
        capacity or history.
        """
        tick = self.tick
        self._take_in_news()
        self._ticks_per_second = self.moments.ticks_per_second(_MEAN_OVER)
        self._index_of = tick, self.mean_request
        self._is_stale, self._has_index = True, False
        least, most = 2 * self.mean_request, max(128 * self.mean_request, self._capacity / 5)
        self._due_at = tick + max(least, min(tick / 15, most))
        num_hits = float(self._hits[:FIRST_RUNNING].sum())
        part_new = min(1.0, self._num_new_hits / max(num_hits, 1.0))
        self._num_new_hits = 0
        self._many_hits = 2 * self.mean_request + num_hits / 8
        return part_new

    def num_under_way(self) -> Floats:
        """Episodes that have not ended, by book."""
        under_way: Floats = self._under_way.sum(axis=0)
        for kind, num_positions in self._new_begun.items():
            for book in books_of(kind):
                under_way[book] += num_positions
        for kind, *_, num_positions in self._new_answered:
            for book in books_of(kind)[2:]:
                under_way[book] += num_positions
        for kind, *_, num_positions in (*self._new_hits, *self._new_forgotten):
            for book in books_of(kind):
                under_way[book] -= num_positions
        return under_way

    def check_invariants(self) -> None:
        """Counts are possible, and the index is finite."""
        self.moments.check_invariants()
        assert (self._hits >= 0).all(), "negative hits"
        assert (self._forgotten >= 0).all(), "fewer than none forgotten"
        assert self._span_ends == sorted(self._span_ends), "spans out of order"
        assert len(self._span_ends) <= _MAX_SPANS, f"{len(self._span_ends)} spans"
        if not self._has_index:
            self._make_index()
        assert len(self._index) == NUM_BOOKS, f"indices of {len(self._index)} books"
        assert abs(self._lead) <= _MOST_LEAD, f"a lead of {self._lead}"
        values = np.array([each for each in self._index if each is not None])
        assert values.shape[1] == NUM_AGES * NUM_STEPS + 1, f"indices of {values.shape}"
        assert np.isfinite(values).all(), "a value is not finite"
        assert (values >= 0).all(), "a value is negative"

    def _age_of(self, book: int, last_use: int) -> tuple[Ages, float, float]:
        """The classes of ages by which a book goes, the age by these, and how many ticks a unit of it has."""
        if not self._has_index:
            self._make_index()
        if book < FIRST_RUNNING:
            return self._ticks, float(self.tick - last_use), 1.0
        age = self.moments.at(self.tick) - self.moments.at(last_use)
        return self._seconds, age, self._ticks_per_second

    def _weigh(self) -> None:
        """Find what is known of each book, as it was last learned: enough to tell which one judges."""
        tick, mean_request = self._index_of
        hits, self._risk = self._hits, self._at_risk(tick)
        weight, prior = _GROUP_REQUESTS * mean_request, prior_of(self._seconds)
        self._foretold = foretold(hits[FIRST_ENDED:], self._risk[FIRST_ENDED:], prior, weight)
        is_known = self._risk.max(axis=1) > 0
        is_known[:NUM_BASE] = True
        self._is_known = is_known.tolist()
        self._heeds_turns = self._lead > _ENOUGH_LEAD
        self._judges.clear()
        self._is_stale = False

    def _make_index(self) -> None:
        """Make the index of what is known. A pool with room often learns again before it asks for a value."""
        if self._is_stale:
            self._weigh()
        _, mean_request = self._index_of
        hits, at_risk, is_known = self._hits, self._risk, np.array(self._is_known)
        weight = _PRIOR_REQUESTS * mean_request
        base_hits, base_risk = hits[:NUM_BASE], at_risk[:NUM_BASE]
        everything = shrunk(base_hits.sum(0), base_risk.sum(0), prior_of(self._ticks), weight)
        weight = _GROUP_REQUESTS * mean_request
        shape = NUM_USES, NUM_NEW * NUM_KNOWN, NUM_AGES
        base_hits, base_risk = base_hits.reshape(shape), base_risk.reshape(shape)
        hazard = shrunk(base_hits.sum(1), base_risk.sum(1), everything, weight)
        hazards = [shrunk(base_hits, base_risk, hazard[:, np.newaxis], weight)]
        prior = prior_of(self._seconds)
        for first in (FIRST_RUNNING, FIRST_ENDED):
            cells = slice(first, first + NUM_CELLS)
            hazards.append(by_turn(hits[cells], at_risk[cells], prior, weight))
        every = np.concatenate([each.reshape(-1, NUM_AGES) for each in hazards])
        widths = np.where(_IS_BY_TURN, self._seconds.widths, self._ticks.widths)
        self._lives = Lives(every[is_known], widths[is_known])
        rows = iter(self._lives.index().tolist())
        self._index = [next(rows) if each else None for each in self._is_known]
        self._rows = np.cumsum(is_known) - 1
        self._has_index = True

    def _judge(self, kinds: Ints, ages: Ints, weights: Ints, *, are_hits: bool) -> None:
        """Episodes are over: did it foretell that to know how the answer ended, or only that it had?

        What counts is the logarithm of the likelihood, in requests of the mean size. An ending that all
        answers have says nothing, nor do endings that are drawn by lot.
        """
        endings = endings_of(kinds)
        if self._foretold is None or not endings.any():
            return
        hazard, alive = self._foretold
        gains = alive[endings, ages] - alive[0, ages]
        if are_hits:
            gains += hazard[endings, ages] - hazard[0, ages]
        gain = float((gains * weights)[endings > 0].sum()) / max(self.mean_request, 1.0)
        self._lead = max(-_MOST_LEAD, min(self._lead + gain, _MOST_LEAD))

    def _take_in_news(self) -> None:
        memory = _MEMORY * self._capacity
        of_turns = max(memory, _TURN_MEMORY * self.mean_request)
        memories = np.where(_IS_BY_TURN, of_turns, memory)
        decay = np.exp((self._learned_at - self.tick) / memories)
        self._learned_at = self.tick
        self._begin_span()
        for counts, news in ((self._hits, self._new_hits), (self._forgotten, self._new_forgotten)):
            counts *= decay
            if not news:
                continue
            kinds, began, ended, weights = np.array(news).T
            news.clear()
            in_ticks = self._ticks.classes_of(ended - began)
            in_seconds = self._seconds.classes_of(self.moments.all_at(ended) - self.moments.all_at(began))
            self._judge(kinds, in_seconds, weights, are_hits=counts is self._hits)
            places, books = all_books(kinds)
            ages = np.where(books >= FIRST_RUNNING, in_seconds[places], in_ticks[places])
            np.add.at(counts, (books, ages), weights[places])
            self._count_under_way(books, began[places], -weights[places])
        if self._new_answered:
            kinds, began, _, weights = np.array(self._new_answered).T
            self._new_answered.clear()
            places, books = all_books(kinds)
            is_new = books >= FIRST_ENDED  # they were counted in the others before
            places = places[is_new]
            self._count_under_way(books[is_new], began[places], weights[places])

    def _count_under_way(self, books: Ints, began: Ints, weights: Ints) -> None:
        ends = np.array(self._span_ends)
        spans = np.minimum(np.searchsorted(ends, began), len(ends) - 1)
        np.add.at(self._under_way, (spans, books), weights)

    def _begin_span(self) -> None:
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
        spans[taken] = 0
        for kind, num_positions in self._new_begun.items():
            for book in books_of(kind):
                spans[taken, book] += num_positions
        ends.append(self.tick)
        self._new_begun.clear()

    def _begun_by(self, spans: Ints) -> Floats:
        """Episodes under way, by book, that began in the first so many spans; for each of ``spans`` a row.

        Sums of whole numbers, so they are the same in any order. Summed up between these spans only.
        """
        cuts = np.unique(np.append(spans, 0))
        taken = self._under_way[: len(self._span_ends)]
        begun_by = np.zeros((len(cuts) + 1, NUM_BOOKS))
        between = np.add.reduceat(taken, cuts[cuts < len(taken)], axis=0)
        np.cumsum(between, axis=0, out=begun_by[1 : len(between) + 1])
        return begun_by[np.searchsorted(cuts, spans)]

    def _at_risk(self, tick: int) -> Floats:
        """Episodes that reached an age; those still in it, and those forgotten in it, count by half."""
        starts = (
            tick - self._ticks.starts,
            self.moments.ticks_at(self.moments.at(tick) - self._seconds.starts),
        )
        places = [np.searchsorted(self._span_ends, np.append(each, -np.inf), "right") for each in starts]
        begun_by = self._begun_by(np.concatenate(places))
        in_ticks, in_seconds = begun_by[: NUM_AGES + 1].T, begun_by[NUM_AGES + 1 :].T
        older: Floats = np.where(_IS_BY_TURN, in_seconds, in_ticks)
        ended = self._hits + self._forgotten
        ended_later = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        under_way = np.maximum((older[:, 1:] + older[:, :-1]) / 2, 0)
        at_risk: Floats = ended_later + self._hits + self._forgotten / 2 + under_way
        return at_risk
