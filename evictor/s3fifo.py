"""Three FIFO queues: what is asked for once passes through a small one and is gone."""

from collections.abc import Collection, Hashable, Sequence
from itertools import takewhile

from evictor.ghosts import Ghosts, runs
from evictor.policy import L, Newcomer
from evictor.two_queues import NEW, PROVEN, TwoQueues

_SMALL_SHARE = 10
"""The small queue has one slot in so many."""

_MAX_FREQUENCY = 3


class S3FifoPolicy(TwoQueues[L]):
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak, SOSP 2023, "FIFO queues are all you need for cache
    eviction").

    What is new enters a small queue, a tenth of the pool, and leaves it for the ghosts unless it is used
    twice. The main queue has what was, and ghosts that came back. Each use, up to three, saves a node there
    from being evicted once: instead it begins again at the end of its queue. Ranks are ``(NEW, order, uses)``
    and ``(PROVEN, uses, order)``.

    Deviations:

    - What is used twice is promoted at once, not when it gets to the end of the small queue. Nodes with
      children get there late or never, and would fill that queue.
    - Only candidates move in the queues, each as a whole. In the main queue it is the turn of the first of
      those with fewest uses, where going around would end. The others are moved on when it is evicted.
    - A node that grows begins again at the end of its queue.
    - A queue without a candidate passes its turn to the other.
    - A split that nothing keeps apart heals, and with the whole moves on what was the part before it.
    """

    def __init__(self, capacity: int) -> None:
        """For a pool of ``capacity`` slots."""
        super().__init__()
        self._small = max(1, capacity // _SMALL_SHARE)
        self._ghosts = Ghosts(max(0, capacity - self._small))

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        now = next(self._clock)
        for node in path:
            match node.rank.rank:
                case (0, order, 0):
                    self._rank(node, (NEW, order, 1))
                case (0, _, _):
                    self._rank(node, (PROVEN, 0, now))
                case (_, uses, order) if uses < _MAX_FREQUENCY:
                    self._rank(node, (PROVEN, uses + 1, order))

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        """Ghosts, as far as they go; or all, for after what is new nothing is looked up."""
        return sum(size for _, _, size in runs(keys, start, self._ghosts)) or len(keys) - start

    def joins(self, node: L, key: Hashable) -> bool:
        """Only what is in the same queue and was not used there."""
        match node.rank and node.rank.rank:
            case (0, _, 0):
                return key not in self._ghosts
            case (1, 0, _):
                return key in self._ghosts
        return False

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        now = next(self._clock)
        self._rank(node, (PROVEN, 0, now) if keys[0] in self._ghosts else (NEW, now, 0))
        for ghosts, start, size in runs(keys, 0, self._ghosts):
            ghosts.take(keys[start], size)

    def inherit(self, heir: L, source: L) -> None:
        """A prefix keeps its turn and its uses, but is in the main queue if anything after it was."""
        if heir.rank is None or heir.rank.rank[0] < source.rank.rank[0]:
            super().inherit(heir, source)

    def may_join(self, head: L, tail: L) -> bool:
        """Those of one turn and as many uses. They move on together then, as if they had never been apart."""
        may_join: bool = head.rank.rank == tail.rank.rank
        return may_join

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self._first(NEW if self._num_new >= self._small else PROVEN)

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        self._count(leaf)
        if leaf.rank.rank[0] == NEW:
            self._ghosts.add(keys, weight)
        else:
            self._go_around(leaf)

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        super().check_invariants(nodes)
        self._ghosts.check_invariants()
        for node in nodes or ():
            rank = node.rank.rank
            uses = rank[2] if rank[0] == NEW else rank[1]
            limit = 1 if rank[0] == NEW else _MAX_FREQUENCY
            assert 0 <= uses <= limit, f"{node!r} has {uses} uses in queue {rank[0]}"

    def _go_around(self, leaf: L) -> None:
        """Take from candidates in the main queue the uses that saved them until ``leaf`` had its turn.

        Each use is taken once, so this is O(log n) amortized over uses.
        """
        _, rounds, turn = leaf.rank.rank
        ahead = [
            (order, uses, node)
            for level in range(rounds + 1, _MAX_FREQUENCY + 1)
            for node in self._between((PROVEN, level), (PROVEN, level, turn))
            for _, uses, order in [node.rank.rank]
        ]
        if rounds:
            for node in self._between((PROVEN, rounds), (PROVEN + 1,)):
                _, uses, order = node.rank.rank
                self._rank(node, (PROVEN, uses - rounds, order))
        for _, uses, node in sorted(ahead, key=lambda each: each[0]):
            self._rank(node, (PROVEN, uses - rounds - 1, next(self._clock)))

    def _between(self, low: tuple[int, ...], high: tuple[int, ...]) -> list[L]:
        """Candidates of ranks from ``low`` up to, but without, ``high``."""
        return [leaf for _, leaf in takewhile(lambda item: item[0] < high, self._candidates.items_from(low))]
