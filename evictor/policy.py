"""The protocol between a prefix tree and the policy that ranks its leaves."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

L = TypeVar("L", bound=Hashable)
"""A node of the caller's tree. Opaque: a policy may hash and compare it by identity, nothing else."""


@dataclass(frozen=True, slots=True)
class Newcomer(Generic[L]):
    """Positions that ask to be stored while the pool is full.

    Attributes:
        parent: the node they would hang from; the tree's root for a new chain.
        keys: their names in chain order. A position keeps its name for ever, also across evictions.
    """

    parent: L
    keys: Sequence[Hashable]


class EvictionPolicy(Protocol[L]):
    """Ranks the leaves of a tree and says which one loses its tail next.

    The life of a node, as the policy sees it::

        stored --> touched* --> enter <--> leave        evictable or not: pins and children come and go
                                  |
                       chosen --> evicted* --> forget   the tail goes first, in one or several bites

    Between ``enter`` and ``leave`` a node is a candidate. Every other call may come at any time after
    the first ``stored``; ``forget`` ends the life of a node and implies ``leave``. A policy that keeps
    history of what was evicted keys it by the names given to ``evicted`` and meets them again in
    ``stored``. No call costs more than O(log n) for n leaves, none scans.
    """

    def stored(self, node: L, keys: Sequence[Hashable]) -> None:
        """Positions named ``keys`` were appended to ``node``, which may be new. Counts as a use."""

    def touched(self, node: L) -> None:
        """A request used ``node`` from its first position to its last."""

    def inherit(self, heir: L, source: L) -> None:
        """``heir`` is at least as valuable as ``source``: a split made it, or its child ``source`` goes.

        Using a node uses its ancestors too. A tree touches only the deepest node of a path and hands
        the rank up when that node goes, so a touch costs O(1) however long the path.
        """

    def enter(self, leaf: L) -> None:
        """``leaf`` has become evictable: no child, no pin, nothing on its way into it."""

    def leave(self, leaf: L) -> None:
        """``leaf`` is no longer evictable. Its rank is kept for the next ``enter``."""

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        """Return the leaf whose tail is worth least, or None.

        Mutates nothing that a caller can see. None says that nothing is worth evicting: no leaf is a
        candidate, or the ``newcomer`` itself is worth less than every one of them and should stay out.
        """

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        """The last ``len(keys)`` positions of ``leaf`` left the pool to make room."""

    def forget(self, node: L) -> None:
        """``node`` is gone. Nothing may refer to it any longer; history by name may stay."""

    def check_invariants(self) -> None:
        """Raise AssertionError, with what was seen, if the policy's state contradicts itself."""
