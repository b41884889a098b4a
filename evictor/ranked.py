"""What policies share that give every node one rank and evict the leaf of the lowest."""

from collections.abc import Collection, Hashable, Sequence
from itertools import count
from typing import Generic

from evictor.hints import KeepHints
from evictor.order import Key, Order
from evictor.policy import Admission, L, Newcomer
from evictor.untracked import untrack

Rank = tuple[int, ...]


class Ranked:
    """What is known of a node; its ``rank``.

    Attributes:
        rank: where it stands among the others, the lowest first. As many numbers as those of all candidates.
        key: of a candidate: its rank, and a number of its own.
        size: for policies that count the slots of some nodes: how many are counted here.
    """

    __slots__ = ("key", "rank", "size")

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.key: Key | None = None
        self.size = 0
        untrack(self)


class RankedPolicy(Generic[L]):
    """Evicts the leaf of the lowest rank; a subclass sets ranks in ``used`` and ``stored``.

    Every call is O(log n) in the candidates, at worst. A heap with outdated entries is faster on average, but
    now and then has to clean up.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._serial = count()  # nodes have no order, and two may have the same rank
        self._candidates: Order[L] = Order()

    turn = 0
    """How answers end is not told apart."""

    def ended(self, path: Sequence[L], chain: Sequence[Hashable], depth: int, turn: int, ending: int) -> None:
        """See ``turn``."""

    def heed(self, hints: KeepHints | None, path: Sequence[L], num_new: int = 0) -> Admission[L]:
        return self

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        return len(keys) - start

    def joins(self, node: L, key: Hashable) -> bool:
        return True

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        raise NotImplementedError

    def inherit(self, heir: L, source: L) -> None:
        rank: Rank = source.rank.rank
        if heir.rank is None or heir.rank.rank < rank:
            self._rank(heir, rank)

    def may_join(self, head: L, tail: L) -> bool:
        """A parent gets the rank of the child that goes, if that is higher: here it would."""
        may_join: bool = head.rank.rank <= tail.rank.rank
        return may_join

    def joined(self, node: L, gone: L) -> None:
        self._rank(node, max(node.rank.rank, gone.rank.rank))
        self.forget(gone)

    def enter(self, leaf: L) -> None:
        known: Ranked = leaf.rank
        if known.key is None:
            known.key = *known.rank, next(self._serial)
            self._candidates.add(known.key, leaf)

    def leave(self, leaf: L) -> None:
        known: Ranked | None = leaf.rank
        if known is not None and known.key is not None:
            self._candidates.remove(known.key)
            known.key = None

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self._candidates.first

    def earns_copy(self, node: L) -> bool:
        return True

    def earns_room(self, node: L, num_asked: int) -> bool:
        return True

    def stays_out(self, node: L) -> bool:
        return False

    def resized(self, node: L) -> None:
        """No slot is counted."""

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        """No history is kept."""

    def dropped(self, node: L, num_positions: int) -> None:
        """No position is counted."""

    def forget(self, node: L) -> None:
        self.leave(node)
        node.rank = None

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        self._candidates.check_invariants()
        for key, leaf in self._candidates.items():
            known = leaf.rank
            assert known.key == key, f"{leaf!r} is filed under {key}, not {known.key}"
            assert known.rank == key[:-1], f"{leaf!r} is filed under {key}, has {known.rank}"
        if nodes is None:
            return
        filed = {leaf for _, leaf in self._candidates.items()}
        known = {node for node in nodes if node.rank.key is not None}
        assert known == filed, f"candidates {known} and {filed} differ"

    def _rank(self, node: L, rank: Rank) -> None:
        known: Ranked | None = node.rank
        if known is None:
            node.rank = Ranked(rank)
        elif known.key is None:
            known.rank = rank
        else:
            self.leave(node)
            known.rank = rank
            self.enter(node)
