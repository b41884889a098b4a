"""The caller's half of the protocol: what a tree tells the policy that ranks its leaves."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic

from evictor.policy import EvictionPolicy, L


class Caller(Generic[L]):
    """Tells ``policy`` what became of nodes. The owner of a tree inherits it and calls it after each change.

    A node says by ``is_evictable`` whether its tail may go, besides what the protocol asks of it. ``heir`` is
    the parent of a node, None where that is the root, which no policy knows.
    """

    def __init__(self, policy: EvictionPolicy[L]) -> None:
        self._policy = policy

    def refresh(self, node: L) -> None:
        """It may have become evictable, or not evictable."""
        if node.is_evictable:
            self._policy.enter(node)
        else:
            self._policy.leave(node)

    def stretches(self, keys: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
        """Where parts of ``keys`` begin and end that may each be stored in one node.

        The policy is asked for the next one when the one before it has been stored.
        """
        stop = 0
        while stop < len(keys):
            start, stop = stop, stop + self._policy.num_alike(keys, stop)
            yield start, stop

    def after_split(self, node: L, new: L) -> None:
        """``new`` is the head or the tail of what was ``node``, which is the other part."""
        self._policy.leave(node)
        self._policy.inherit(new, node)
        self.refresh(node)
        self.refresh(new)

    def after_join(self, node: L, gone: Sequence[L]) -> None:
        """``node`` has taken over ``gone``, its neighbours. The last of all is no candidate meanwhile."""
        for each in gone:
            self._policy.joined(node, each)
        self.refresh(node)

    def after_eviction(
        self, leaf: L, keys: Sequence[Hashable], weight: int, heir: L | None, growing: L | None = None
    ) -> None:
        """``leaf`` has lost its last positions, named ``keys``, and so many slots, to make room.

        If none is left, it is out of the tree. ``growing``, at whose end something is about to be stored,
        does not become a candidate.
        """
        self._policy.evicted(leaf, keys, weight)
        if not len(leaf):
            self._after_end(leaf, heir, growing)

    def after_drop(self, node: L, num_positions: int, heir: L | None, growing: L | None = None) -> None:
        """The same, of positions that are gone for another reason."""
        self._policy.dropped(node, num_positions)
        if not len(node):
            self._after_end(node, heir, growing)

    def _after_end(self, node: L, heir: L | None, growing: L | None) -> None:
        if heir is not None:
            self._policy.inherit(heir, node)
        self._policy.forget(node)
        if heir is not None and heir is not growing:
            self.refresh(heir)
