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
        self._order: list[tuple[float, int, int]] = []  # of kinds: value and last use of the first, kind
        self._filed: dict[int, tuple[float, int, int]] = {}
        self._unfiled: set[int] = set()  # kinds that may have another first, or value, than they are filed by
        self._steps_at: dict[int, float] = {}  # tick at which a kind's value changes
        self._next_step = math.inf

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
        for node in path:
            self._use(node, kinds)
        stop = depth
        for size, uses in runs:
            start, stop = stop, stop + size
            kind = kinds[uses + 1] if uses + 1 < NUM_USES else kinds[-1]
            self._reuse.begin(kind, size)
            run = Run.of(chain, start, stop, Past(self._tick, uses + 1, kind))
            self._lose(self._history.add(chain[start], run))
        for run in self._history.pop_excess():
            self._lose(run)
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
                self._lose(self._history.add(next_key, rest))
        past = self._pasts.get(node)
        if past is None:
            if run is None:
                past = Past(self._tick, 0, self._kind_of_unasked(keys))
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
        self._file_kinds()
        if not self._order:
            return None
        value, _, kind = self._order[0]
        if newcomer is not None and self._reuse.value(self._kind_of(newcomer), 0) < value:
            return None
        return self._queues[kind].first()

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        run = Run.of(keys, 0, len(keys), self._pasts[leaf].copy())
        self._lose(self._history.add(keys[0], run))
        for run in self._history.pop_excess():
            self._lose(run)

    def dropped(self, node: L, num_positions: int) -> None:
        past = self._pasts[node]
        self._reuse.end(past.kind, self._tick - past.last_use, num_positions, with_hit=False)

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
            first = queue.last_use(queue.first()) if len(queue) else None
            assert kind in self._unfiled or first == (filed[1] if filed else None), (
                f"{kind}: {filed}, {first}"
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
            self._reuse.end(run.past.kind, age, size, with_hit=True)
            if size < run.size:
                self._reuse.end(run.past.kind, age, run.size - size, with_hit=False)
            runs.append((size, run.past.uses))
            depth += size
            if size < run.size:
                break
        return runs

    def _use(self, node: L, kinds: Sequence[int]) -> None:
        past, size = self._pasts[node], len(node)
        self._reuse.end(past.kind, self._tick - past.last_use, size, with_hit=True)
        is_candidate = node in self._candidates
        if is_candidate:
            self.leave(node)
        past.last_use = self._tick
        past.uses += 1
        past.kind = kinds[past.uses] if past.uses < NUM_USES else kinds[-1]
        self._reuse.begin(past.kind, size)
        self._fresh.discard(node)
        if is_candidate:
            self.enter(node)

    def _lose(self, run: Run | None) -> None:
        if run is not None:
            self._reuse.end(run.past.kind, self._tick - run.past.last_use, run.size, with_hit=False)

    def _kind_of(self, newcomer: Newcomer[L]) -> int:
        run = self._history.get(newcomer.keys[0])
        if run is not None:
            return run.past.kind
        if newcomer.parent in self._fresh:
            return self._pasts[newcomer.parent].kind
        return self._kind_of_unasked(newcomer.keys)

    def _kind_of_unasked(self, keys: Sequence[Hashable]) -> int:
        """Of positions that no request has asked for yet, which are those of an answer."""
        return self._reuse.kinds(len(keys), len(keys))[0]

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
            if len(queue):
                last_use = queue.last_use(queue.first())
                age = self._tick - last_use
                filed = self._filed[kind] = self._reuse.value(kind, age), last_use, kind
                insort(self._order, filed)
                self._steps_at[kind] = tick = last_use + self._reuse.next_step(age)
                self._next_step = min(self._next_step, tick)
        self._unfiled.clear()
        if is_step:
            self._next_step = min(self._steps_at.values(), default=math.inf)
