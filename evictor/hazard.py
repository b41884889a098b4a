"""First what is least likely to be asked for per tick that it is kept, as learned from the requests."""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from typing import Generic

import numpy as np

from evictor.age_queue import AgeQueue
from evictor.history import History, Past, Run
from evictor.policy import L, Newcomer
from evictor.reuse import NUM_KINDS, NUM_USES, ReuseStatistics

_HISTORY_CAPACITIES = 4
_MIN_HISTORY = 1 << 17

_Filed = tuple[float, int, int]


class HazardPolicy(Generic[L]):
    """Ranks leaves, and newcomers, by the index of their kind and age (see ``reuse``).

    Of each kind the leaf used longest ago is a candidate; the one of the lowest index loses its tail, of
    equals the older one. A newcomer of a lower index than all of them stays out. With nothing learned the
    order is that of leaf-LRU and nobody stays out. A segment has one past: what was asked for another
    number of times is another segment.

    The history also holds what was asked for and has not been stored, so a use of what a larger pool
    would hold counts as much as a hit.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: positions that fit the pool."""
        self._reuse = ReuseStatistics(capacity)
        self._history = History(max(_HISTORY_CAPACITIES * capacity, _MIN_HISTORY))
        self._tick = 0
        self._pasts: dict[L, Past] = {}
        self._fresh: set[L] = set()  # stored, and not used since
        self._candidates: dict[L, int] = {}  # and their kinds
        self._queues: list[AgeQueue[L]] = [AgeQueue() for _ in range(NUM_KINDS)]
        self._order: list[_Filed] = []  # of kinds: value and last use of the first, kind
        self._filed: dict[int, _Filed] = {}
        self._unfiled: set[int] = set()  # kinds that may have another first, or value, than they are filed by
        self._steps_at: dict[int, float] = {}  # tick at which a kind's value changes
        self._next_step = math.inf
        self._newcomer: Newcomer[L] | None = None  # who asked last
        self._newcomer_value = 0.0

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        if not chain:
            return
        self._tick += len(chain)
        self._reuse.request(len(chain))
        runs = self._ask_history(chain, depth)
        num_known = depth + sum(size for size, _ in runs)
        num_new = len(chain) - num_known
        if num_new:
            runs.append((num_new, -1))
        kinds = self._reuse.kinds(num_new, num_known)
        if path:
            self._use(path, kinds)
        stop = depth
        for size, uses in runs:
            start, stop = stop, stop + size
            kind = kinds[uses + 1] if uses + 1 < NUM_USES else kinds[-1]
            self._reuse.begin(kind, size)
            self._remember(chain[start], Run.of(chain, start, stop, Past(self._tick, uses + 1, kind)))
        if self._reuse.is_due(self._tick):
            self._reuse.learn(self._tick)
            self._unfiled.update(self._filed)

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        run = self._history.get(keys[start])
        return len(keys) - start if run is None else min(run.size, len(keys) - start)

    def joins(self, node: L, key: Hashable) -> bool:
        if node not in self._fresh:
            return False
        run = self._history.get(key)
        return run is None or run.past == self._pasts[node]

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        run = self._history.pop(keys[0])
        if run is not None and run.size > len(keys):
            rest = run.without(len(keys))
            if next_key is None:
                self._reuse.begin(run.past.kind, -rest.size)
            else:
                self._remember(next_key, rest)
        past = self._pasts.get(node)
        if past is None:
            if run is None:
                past = Past(self._tick, 0, self._kind_of_unasked(len(keys)))
            else:
                past = run.past.copy()
            self._pasts[node] = past
            self._fresh.add(node)
        if run is None:
            self._reuse.begin(past.kind, len(keys))

    def inherit(self, heir: L, source: L) -> None:
        if heir not in self._pasts:  # the other part of what was split
            self._pasts[heir] = self._pasts[source].copy()
            if source in self._fresh:
                self._fresh.add(heir)

    def enter(self, leaf: L) -> None:
        if leaf not in self._candidates:
            past = self._pasts[leaf]
            self._candidates[leaf] = past.kind
            if self._queues[past.kind].add(leaf, past.last_use):
                self._unfiled.add(past.kind)

    def leave(self, leaf: L) -> None:
        kind = self._candidates.pop(leaf, None)
        if kind is not None and self._queues[kind].remove(leaf):
            self._unfiled.add(kind)

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        if self._unfiled or self._tick >= self._next_step:
            self._file_kinds()
        if not self._order:
            return None
        value, _, kind = self._order[0]
        if newcomer is not None:
            if newcomer is not self._newcomer:  # who has been let in is not turned away half-way
                self._newcomer = newcomer
                self._newcomer_value, _ = self._reuse.value(self._kind_of(newcomer), 0)
            if self._newcomer_value < value:
                return None
        return self._queues[kind].first

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        self._remember(keys[0], Run.of(keys, 0, len(keys), self._pasts[leaf].copy()))

    def dropped(self, node: L, num_positions: int) -> None:
        past = self._pasts[node]
        self._reuse.forgotten(past.kind, self._tick - past.last_use, num_positions)

    def forget(self, node: L) -> None:
        self.leave(node)
        self._pasts.pop(node, None)
        self._fresh.discard(node)

    def check_invariants(self) -> None:
        self._reuse.check_invariants()
        self._history.check_invariants()
        known = np.zeros(NUM_KINDS)
        for node, past in self._pasts.items():
            known[past.kind] += len(node)
        for run in self._history.runs():
            known[run.past.kind] += run.size
        under_way = self._reuse.num_under_way()
        assert np.allclose(known, under_way, atol=1e-3), f"{known} positions are known, {under_way} counted"
        for queue in self._queues:
            queue.check_invariants()
        assert sum(map(len, self._queues)) == len(self._candidates), f"{self._candidates} and queues differ"
        for leaf, kind in self._candidates.items():
            past = self._pasts[leaf]
            assert kind == past.kind, f"{leaf!r} is filed as of kind {kind}, has {past}"
            found = self._queues[kind].last_use(leaf)
            assert found == past.last_use, f"{leaf!r} is filed under {found}, has {past}"
        assert self._fresh <= self._pasts.keys(), "a fresh node is unknown"
        assert self._order == sorted(self._filed.values()), f"{self._order} and {self._filed} differ"
        for kind, queue in enumerate(self._queues):
            filed = self._filed.get(kind)
            assert kind in self._unfiled or queue.first_use == (filed[1] if filed else -1), (
                f"{kind}: {filed}, {queue.first_use}"
            )

    def _ask_history(self, chain: Sequence[Hashable], depth: int) -> list[tuple[int, int]]:
        """Episodes of what is known beyond ``depth`` end with a use: sizes of runs, and their uses."""
        runs = []
        while depth < len(chain):
            run = self._history.get(chain[depth])
            size = 0 if run is None else run.num_common(chain, depth)
            if run is None or not size:
                break
            self._history.pop(chain[depth])
            age = self._tick - run.past.last_use
            self._reuse.hit(run.past.kind, age, size)
            if size < run.size:
                self._reuse.forgotten(run.past.kind, age, run.size - size)
            runs.append((size, run.past.uses))
            depth += size
            if size < run.size:
                break
        return runs

    def _use(self, path: Sequence[L], kinds: Sequence[int]) -> None:
        leaf, now = path[0], self._tick  # others have children, and are no candidates
        if is_candidate := leaf in self._candidates:
            self.leave(leaf)
        self._fresh.difference_update(path)
        kind, last_use, num_positions = -1, now, 0
        for node in path:
            past, size = self._pasts[node], len(node)
            if past.kind != kind or past.last_use != last_use:
                if num_positions:  # parts of one conversation have much in common
                    self._reuse.hit(kind, now - last_use, num_positions)
                kind, last_use, num_positions = past.kind, past.last_use, 0
            num_positions += size
            past.last_use = now
            past.uses += 1
            past.kind = kinds[past.uses] if past.uses < NUM_USES else kinds[-1]
            self._reuse.begin(past.kind, size)
        self._reuse.hit(kind, now - last_use, num_positions)
        if is_candidate:
            self.enter(leaf)

    def _remember(self, key: Hashable, run: Run) -> None:
        for lost in self._history.add(key, run):
            self._reuse.forgotten(lost.past.kind, self._tick - lost.past.last_use, lost.size)

    def _kind_of(self, newcomer: Newcomer[L]) -> int:
        run = self._history.get(newcomer.key)
        if run is not None:
            return run.past.kind
        if newcomer.parent in self._fresh:
            return self._pasts[newcomer.parent].kind
        return self._kind_of_unasked(newcomer.num_positions)

    def _kind_of_unasked(self, num_positions: int) -> int:
        """Of positions that no request has asked for yet, which are those of an answer."""
        return self._reuse.kinds(num_positions, num_positions)[0]

    def _file_kinds(self) -> None:
        """Put every kind where the value of its first leaf says, if that may have changed."""
        if is_step := self._tick >= self._next_step:
            self._unfiled.update(kind for kind, tick in self._steps_at.items() if tick <= self._tick)
        for kind in self._unfiled:
            filed = self._filed.pop(kind, None)
            if filed is not None:
                del self._order[bisect_left(self._order, filed)]
                del self._steps_at[kind]
            queue = self._queues[kind]
            if queue.first is not None:
                last_use = queue.first_use
                value, step = self._reuse.value(kind, self._tick - last_use)
                filed = self._filed[kind] = value, last_use, kind
                insort(self._order, filed)
                self._steps_at[kind] = tick = last_use + step
                if tick < self._next_step:
                    self._next_step = tick
        self._unfiled.clear()
        if is_step:
            self._next_step = min(self._steps_at.values(), default=math.inf)
