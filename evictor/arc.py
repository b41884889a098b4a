"""Adaptive replacement: a balance of recency and frequency, moved by its own mistakes."""

from collections.abc import Collection, Hashable, Sequence

from evictor.ghosts import Ghosts, runs
from evictor.policy import L, Newcomer
from evictor.two_queues import NEW, PROVEN, TwoQueues


class ArcPolicy(TwoQueues[L]):
    """ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache").

    T1 holds what was asked for once, T2 what was asked for again, each least recently used first. B1 and B2
    remember the names of what they lost. ``target`` is how many positions T1 should have: a request for what
    B1 lost raises it, a request for what B2 lost lowers it.

    Deviations:

    - All is counted in slots, but one decision moves a leaf's tail. So T1 may fall short of its target by
      a bite. A run of ghosts moves the target by its length at once, at the ratio from before.
    - What is asked for below a gap in the ghosts counts as new. Ghosts are looked up from the first missing
      position on, and no further than they go.
    - A ghost moves the target whenever it is asked for, stored again or not.
    - A queue without a candidate passes its turn to the other.
    - B1 and B2 remember names of ``capacity`` slots together also while the pool is not full.
    """

    def __init__(self, capacity: int) -> None:
        """For a pool of ``capacity`` slots."""
        super().__init__()
        self._capacity = capacity
        self._target = 0.0
        self._lost = Ghosts(capacity), Ghosts(capacity)  # B1 and B2

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        now = next(self._clock)
        for node in path:
            self._rank(node, (PROVEN, now))
        once, again = self._lost
        for ghosts, start, size in runs(chain, depth, once, again):
            weight = size * ghosts.weight_of(chain[start])
            if ghosts is once:
                self._target += weight * max(1.0, again.weight / once.weight)
            else:
                self._target -= weight * max(1.0, once.weight / again.weight)
            self._target = min(max(self._target, 0.0), float(self._capacity))

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        """Ghosts, as far as they go; or all, for after what is new nothing is looked up."""
        return sum(size for _, _, size in runs(keys, start, *self._lost)) or len(keys) - start

    def joins(self, node: L, key: Hashable) -> bool:
        return node.rank is not None and node.rank.rank[0] == self._queue_of(key)

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._rank(node, (self._queue_of(keys[0]), next(self._clock)))
        for ghosts, start, size in runs(keys, 0, *self._lost):
            ghosts.take(keys[start], size)
        self._trim()

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        if newcomer is not None and newcomer.key in self._lost[PROVEN]:
            exceeds = self._num_new >= self._target
        else:
            exceeds = self._num_new > self._target
        return self._first(NEW if exceeds else PROVEN)

    def resized(self, node: L) -> None:
        super().resized(node)
        self._trim()

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        self._count(leaf)
        self._lost[leaf.rank.rank[0]].add(keys, weight)
        self._trim()

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        super().check_invariants(nodes)
        once, again = self._lost
        once.check_invariants()
        again.check_invariants()
        assert 0 <= self._target <= self._capacity, f"target {self._target} of {self._capacity}"
        assert not once.weight or self._num_new + once.weight <= self._capacity + 1e-6, (
            f"{self._num_new} slots and {once.weight} of ghosts were asked for once"
        )
        assert once.weight + again.weight <= self._capacity + 1e-6, (
            f"{once.weight} and {again.weight} slots of ghosts"
        )

    def _queue_of(self, key: Hashable) -> int:
        return PROVEN if any(key in ghosts for ghosts in self._lost) else NEW

    def _trim(self) -> None:
        """T1 and B1 have at most ``capacity`` slots, so have B1 and B2."""
        once, again = self._lost
        once.trim(self._capacity - self._num_new)
        again.trim(self._capacity - once.weight)
