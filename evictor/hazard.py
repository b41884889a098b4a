"""Evicts the leaf with the lowest learned reuse rate per tick of retention."""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import count
from typing import Generic

import numpy as np

from evictor.gittins import ROOM_HITS, SURE_HITS, GoingRate
from evictor.hints import KeepHints
from evictor.history import MANY_USES, History, Past, Run, joined_runs
from evictor.kinds import NUM_BOOKS, base_of, books_of, ending_of, gap_of, with_ending, with_turn
from evictor.levels import level_of
from evictor.order import Key, Order
from evictor.policy import Admission, L, Newcomer
from evictor.reuse import ReuseStatistics
from evictor.untracked import untrack

_HISTORY_CAPACITIES = 4
_MIN_HISTORY = 1 << 17

_Filed = tuple[float, int, int]


class _State(Past):
    """The past of a node's positions. It is the node's ``rank``.

    Attributes:
        is_fresh: stored, and not used since.
        key: of a candidate, which is in the queue of its kind and level: last use, and a number of its own.
            Behind these the number of that queue, unless it is that of its base kind and level 0.
    """

    __slots__ = ("is_fresh", "key")

    def __init__(self, past: Past, is_fresh: bool = True) -> None:
        super().__init__(past.last_use, past.uses, past.kind)
        self.is_fresh = is_fresh
        self.key: Key | None = None
        untrack(self)


class HazardPolicy(Generic[L]):
    """Ranks leaves, and newcomers, by the index of their kind and age (see ``reuse``).

    Of each kind the leaf used longest ago is a candidate; the one of the lowest index loses its tail, of
    equals the older one. A newcomer of a lower index than all of them stays out. With nothing learned the
    order is that of leaf-LRU and nobody stays out. A segment has one past: what was asked for another
    number of times is another segment.

    The index says what a position earns, and a leaf is worth that per slot. Where positions and slots are
    not as many, the leaf has a *level*: the power of two nearest to its slots per position. Leaves of one
    kind and level are in one queue, and their index is divided by that power. So is a newcomer's.

    The history also holds what was asked for and has not been stored. So a use of what a larger pool would
    hold counts as much as a hit.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``capacity``: slots of the pool; ``clock``: in seconds, for the time between turns."""
        self._clock = clock
        self._reuse = ReuseStatistics(capacity, clock())
        self._history = History(max(_HISTORY_CAPACITIES * capacity, _MIN_HISTORY))
        self._serial = count()
        self._queues: dict[int, Order[L]] = {}  # see _queue_of
        self._order: list[_Filed] = []  # of queues: value and last use of the first, queue
        self._filed: dict[int, _Filed] = {}
        self._unfiled: set[int] = set()  # queues that may have another first, or value, than as filed
        self._steps_at: dict[int, float] = {}  # tick at which a queue's value changes
        self._next_step = math.inf
        self._rate = GoingRate()

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        if not chain:
            return
        self._reuse.request(len(chain), self._clock())
        now = self._reuse.tick
        runs, before = self._ask_history(chain, depth)
        turn = self._turn(before or (path[0].rank if path else None))
        num_known = runs[-1][0] if runs else depth
        num_new = len(chain) - num_known
        if num_new:
            runs.append((len(chain), -1))
        kinds = self._reuse.kinds(num_new, num_known)
        if turn is not None:
            kinds = [with_turn(base, *turn) for base in kinds]
        if path:
            self._use(path, kinds)
        start = depth
        for stop, uses in joined_runs(runs):
            self._reuse.begin(kinds[uses], stop - start)
            self._remember(Run.of(chain, start, stop, Past(now, uses, kinds[uses])))
            start = stop
        if self._reuse.is_due():
            self._rate.learned(self._reuse.learn())
            self._unfiled.update(self._filed)

    @property
    def turn(self) -> int:
        """A number of the request that was told last."""
        return self._reuse.tick

    def ended(self, path: Sequence[L], chain: Sequence[Hashable], depth: int, turn: int, ending: int) -> None:
        for node in path:
            state = node.rank
            if state.last_use != turn and not state.is_fresh:
                break  # so another request has used it and all before it
            if is_candidate := state.key is not None:
                self.leave(node)
            if not ending_of(state.kind):
                state.kind = with_ending(state.kind, ending)
                self._reuse.answered(state.kind, state.last_use, len(node))
            if is_candidate:
                self.enter(node)
        while depth < len(chain) and (run := self._history.answered(chain[depth], turn, ending)) is not None:
            self._reuse.answered(run.kind, turn, run.size)
            depth += run.size

    def heed(self, hints: KeepHints | None, path: Sequence[L], num_new: int = 0) -> Admission[L]:
        return self

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        num_left = len(keys) - start
        return min(self._history.size_of(keys[start]) or num_left, num_left)

    def joins(self, node: L, key: Hashable) -> bool:
        state: _State | None = node.rank
        if state is None or not state.is_fresh:
            return False
        past = self._history.past_of(key)
        return past is None or past.is_like(state)

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        run = self._history.pop(keys[0])
        if run is not None and run.size > len(keys):
            if next_key is None:
                self._reuse.begin(run.past.kind, len(keys) - run.size)
            else:
                run.behead(len(keys), next_key)
                self._remember(run)
        if node.rank is None:
            past = Past(self._reuse.tick, 0, self._kind_of_unasked(len(keys))) if run is None else run.past
            node.rank = _State(past)
        if run is None:
            self._reuse.begin(node.rank.kind, len(keys))

    def inherit(self, heir: L, source: L) -> None:
        if heir.rank is None:  # the other part of what was split
            heir.rank = _State(source.rank, source.rank.is_fresh)

    def may_join(self, head: L, tail: L) -> bool:
        mine: _State = head.rank
        return mine.is_like(tail.rank) and mine.is_fresh == tail.rank.is_fresh

    def joined(self, node: L, gone: L) -> None:
        self.forget(gone)

    def enter(self, leaf: L) -> None:
        state: _State = leaf.rank
        if state.key is None:
            queue = self._queue_for(leaf)
            key = state.last_use, next(self._serial)
            state.key = key if queue == base_of(state.kind) else (*key, queue)
            if self._queue(queue).add(state.key, leaf):
                self._unfiled.add(queue)

    def leave(self, leaf: L) -> None:
        state: _State | None = leaf.rank
        if state is not None and state.key is not None:
            queue = _queue_of(state)
            if self._queues[queue].remove(state.key):
                self._unfiled.add(queue)
            state.key = None

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        first = self._first()
        if first is None:
            return None
        value, _, queue = first
        if newcomer is not None:
            if newcomer.rank is None:  # it asks again for every bite
                newcomer.rank = self._value_of(newcomer)
            if newcomer.rank < value:
                return None
        return self._queues[queue].first

    def earns_copy(self, node: L) -> bool:
        rate, state = self._going_rate(), node.rank
        book = self._reuse.book_of(state.kind)
        return rate is None or self._reuse.gain(book, state.last_use, rate) >= SURE_HITS

    def earns_room(self, node: L, num_asked: int) -> bool:
        first, state = self._first(), node.rank
        if first is None:
            return True
        alive, held = self._reuse.outlook(self._reuse.book_of(state.kind), state.last_use, num_asked)
        # squared: what is asked for in time often is once more, and what is not is seldom worth a copy
        return self._rate.least(first[0]) * held >= ROOM_HITS * alive**2

    def stays_out(self, node: L) -> bool:
        return False

    def resized(self, node: L) -> None:
        """It may be of another level now."""
        state: _State | None = node.rank
        if state is None or state.key is None or not len(node):
            return
        if _queue_of(state) != self._queue_for(node):
            self.leave(node)
            self.enter(node)

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        self._remember(Run.of(keys, 0, len(keys), leaf.rank))
        self.resized(leaf)

    def dropped(self, node: L, num_positions: int) -> None:
        self._reuse.forgotten(node.rank.kind, node.rank.last_use, num_positions)
        self.resized(node)

    def forget(self, node: L) -> None:
        self.leave(node)
        node.rank = None

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        self._reuse.check_invariants()
        self._history.check_invariants()
        self._rate.check_invariants()
        for number, queue in self._queues.items():
            queue.check_invariants()
            filed, first = self._filed.get(number), queue.first_key
            assert number in self._unfiled or (filed and filed[1]) == (first and first[0]), (
                f"{number}: {filed}, {first}"
            )
            for key, leaf in queue.items():
                state, level = leaf.rank, level_of(leaf.weight, len(leaf))
                assert state.key == key, f"{leaf!r} is filed under {key}, not {state.key}"
                assert _queue_of(state) == number, f"{leaf!r} is filed as {number}, {key}"
                assert state.last_use == key[0], f"{leaf!r} is filed as {number}, {key}"
                book = number - level * NUM_BOOKS
                assert book in books_of(state.kind) or book == base_of(state.kind), (
                    f"{leaf!r} is of level {level} and kind {state.kind}, not of {number}"
                )
        assert self._order == sorted(self._filed.values()), f"{self._order} and {self._filed} differ"
        if nodes is not None:
            self._check_nodes(nodes)

    def _check_nodes(self, nodes: Collection[L]) -> None:
        known, num_candidates = np.zeros(NUM_BOOKS), 0
        for node in nodes:
            known[books_of(node.rank.kind)] += len(node)
            num_candidates += node.rank.key is not None
        for run in self._history.runs():
            known[books_of(run.past.kind)] += run.size
        under_way = self._reuse.num_under_way()
        assert np.allclose(known, under_way, atol=1e-3), f"{known} positions are known, {under_way} counted"
        assert sum(map(len, self._queues.values())) == num_candidates, (
            f"{num_candidates} candidates, not as filed"
        )

    def _turn(self, before: Past | None) -> tuple[int, int] | None:
        """How the answer to a chain's turn before ended, and the class of the time since; None: not known."""
        ending = 0 if before is None else ending_of(before.kind)
        if before is None or not ending:
            return None
        moments = self._reuse.moments
        return ending, gap_of(moments.at(self._reuse.tick) - moments.at(before.last_use))

    def _ask_history(
        self, chain: Sequence[Hashable], depth: int
    ) -> tuple[list[tuple[int, int]], Past | None]:
        """Episodes of what is known beyond ``depth`` end with a use.

        Returns where runs end, with their uses, and the past of the last of them.
        """
        runs, last = [], None
        while depth < len(chain):
            run = self._history.get(chain[depth])
            size = 0 if run is None else run.num_common(chain, depth)
            if run is None or not size:
                break
            self._history.pop(chain[depth])
            began = run.past.last_use
            self._reuse.hit(run.past.kind, began, size)
            if size < run.size:
                self._reuse.forgotten(run.past.kind, began, run.size - size)
            depth, last = depth + size, run.past
            runs.append((depth, run.past.uses))
            if size < run.size:
                break
        return runs, last

    def _use(self, path: Sequence[L], kinds: Sequence[int]) -> None:
        now = self._reuse.tick
        kind, last_use, num_positions = -1, now, 0
        for node in path:
            state, size = node.rank, len(node)
            if is_candidate := state.key is not None:
                self.leave(node)
            if state.kind != kind or state.last_use != last_use:
                if num_positions:  # parts of one conversation have much in common
                    self._reuse.hit(kind, last_use, num_positions)
                kind, last_use, num_positions = state.kind, state.last_use, 0
            num_positions += size
            state.last_use = now
            if state.uses < MANY_USES:
                state.uses += 1
            state.kind = kinds[state.uses]
            state.is_fresh = False
            self._reuse.begin(state.kind, size)
            if is_candidate:
                self.enter(node)
        self._reuse.hit(kind, last_use, num_positions)

    def _remember(self, run: Run) -> None:
        for lost in self._history.add(run):
            self._reuse.forgotten(lost.past.kind, lost.past.last_use, lost.size)

    def _queue(self, number: int) -> Order[L]:
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = Order()
        return queue

    def _queue_for(self, leaf: L) -> int:
        """The number of the queue where it belongs now."""
        weight, size = leaf.weight, len(leaf)
        book = self._reuse.book_of(leaf.rank.kind)
        return book if weight == size else book + level_of(weight, size) * NUM_BOOKS

    def _value_of(self, newcomer: Newcomer[L]) -> float:
        value, _ = self._reuse.value(self._reuse.book_of(self._kind_of(newcomer)), self._reuse.tick)
        weight = newcomer.weight
        return value if weight is None else value / 2.0 ** level_of(weight, newcomer.num_positions)

    def _kind_of(self, newcomer: Newcomer[L]) -> int:
        past = self._history.past_of(newcomer.key)
        if past is not None:
            return past.kind
        state: _State | None = newcomer.parent.rank
        if state is not None and state.is_fresh:
            return state.kind
        return self._kind_of_unasked(newcomer.num_positions)

    def _kind_of_unasked(self, num_positions: int) -> int:
        """The kind of positions that no request has asked for yet, which are those of an answer."""
        return self._reuse.kinds(num_positions, num_positions)[0]

    def _first(self) -> _Filed | None:
        """The queue of the candidate that goes next, with its value."""
        if self._unfiled or self._reuse.tick >= self._next_step:
            self._file_kinds()
        return self._order[0] if self._order else None

    def _going_rate(self) -> float | None:
        first = self._first()
        return None if first is None else self._rate.after(first[0])

    def _file_kinds(self) -> None:
        """Put every queue where the value of its first leaf says, if that may have changed."""
        if is_step := self._reuse.tick >= self._next_step:
            self._unfiled.update(queue for queue, tick in self._steps_at.items() if tick <= self._reuse.tick)
        for queue in self._unfiled:
            filed = self._filed.pop(queue, None)
            if filed is not None:
                del self._order[bisect_left(self._order, filed)]
                del self._steps_at[queue]
            first = self._queues[queue].first_key
            if first is not None:
                level, book = divmod(queue, NUM_BOOKS)
                last_use = first[0]
                value, change = self._reuse.value(book, last_use)
                filed = self._filed[queue] = value / 2.0**level, last_use, queue
                insort(self._order, filed)
                self._steps_at[queue] = change
                if change < self._next_step:
                    self._next_step = change
        self._unfiled.clear()
        if is_step:
            self._next_step = min(self._steps_at.values(), default=math.inf)


def _queue_of(state: _State) -> int:
    """The number of the queue of a candidate: its book, and ``NUM_BOOKS`` times its level."""
    assert state.key is not None
    queue: int = state.key[2] if len(state.key) > 2 else base_of(state.kind)
    return queue
