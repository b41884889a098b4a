"""The protocol between a prefix tree and the policy that ranks its leaves."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from evictor.hints import KeepHints

L = TypeVar("L", bound=Any)
"""A node of the caller's tree. A policy may hash it, compare it by identity and take its ``len()``, which is
its number of positions, and its ``weight``, which is its number of slots. Both change right before the call
that tells of it: ``stored``, ``evicted``, ``dropped``, ``joined``, or ``inherit`` after a split. The weight
alone may change before ``resized``. Two attributes are for policies to keep what they know
of it, None in a new node. ``rank`` is of the policy that ranks it, ``mark`` of the ``HintedPolicy`` around
that. All else is opaque.

Nodes and what hangs on them may be out of the garbage collector's sight. So ``forget`` has to undo what
refers back to the node, or neither is ever freed."""


@dataclass(slots=True, eq=False)
class Newcomer(Generic[L]):
    """Positions that ask to be stored while the pool is full.

    Attributes:
        parent: the node they would hang from; the tree's root for a new chain.
        key: name of the first of them. A position keeps its name for ever, also across evictions. A name
            stands for the position and all before it: a request for it is one for those too.
        num_positions: how many they are.
        weight: slots that they need; None for one each.
        rank: for the policy to keep what it found, as in a node; it is asked again for every bite.
    """

    parent: L
    key: Hashable
    num_positions: int
    weight: int | None = None
    rank: Any = None


class Admission(Protocol[L]):
    """What a policy says of the positions that one request is about to store. Over with the next ``heed``."""

    def joins(self, node: L, key: Hashable) -> bool:
        """Whether what begins with ``key`` has the past of ``node`` and may be stored in it, at its end."""

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        """Positions named ``keys`` were appended to ``node``, which may be new.

        ``next_key`` names the position after them, None if it is unknown.
        """

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        """Return the leaf whose tail is worth least, or None.

        Mutates nothing that a caller can see. None says that nothing is worth evicting. Then no leaf is a
        candidate, or the ``newcomer`` itself is worth less than every one of them and should stay out.
        """


class EvictionPolicy(Admission[L], Protocol[L]):
    """Ranks the leaves of a tree and says which one loses its tail next.

    The life of a node, as the policy sees it::

        stored --> used* --> enter <--> leave        evictable or not: pins and children come and go
                               |
                    chosen --> evicted* --> forget   tail first, in one or several bites

    Nodes also change without being used: a split makes two of one (``inherit``), and two that are no longer
    apart become one again (``may_join``, ``joined``).

    Between ``enter`` and ``leave`` a node is a candidate. Every other call may come at any time after
    the first ``stored``; ``forget`` ends the life of a node and implies ``leave``. A policy that keeps
    history of what was evicted keys it by the names given to ``evicted`` and meets them again in
    ``used`` and ``stored``. No call costs more than O(log n) for n leaves, ``used`` and ``heed`` that for
    each node of their path, none scans.

    A policy is the ``Admission`` of requests without hints.
    """

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        """A request asks for all positions of ``chain``, by name; the first ``depth`` of them are here.

        They are the nodes of ``path``, the deepest first, each used from its first position to its last.
        The others are likely to be stored soon, or to ask for it. Once per request.
        """

    @property
    def turn(self) -> int:
        """A number of the request that ``used`` told of last, for ``ended``. All may have the same."""

    def ended(self, path: Sequence[L], chain: Sequence[Hashable], depth: int, turn: int, ending: int) -> None:
        """The answer to that request has ended: in the way of class ``ending``, of ``evictor.endings``.

        ``path``, ``chain`` and ``depth``: as of ``used``, but of all the request has asked for and computed.
        Others may have used it since, and part of it may be gone. Once per request, or never.
        """

    def heed(self, hints: KeepHints | None, path: Sequence[L], num_new: int = 0) -> Admission[L]:
        """A request with these hints uses the nodes of ``path``, the deepest first.

        It may fill up to ``num_new`` slots after them, and the result speaks for those. Called after
        ``used``, and again before each store. A policy that knows no hints returns itself.
        """

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        """How many of ``keys[start:]``, at least 1, have the same past and may be stored in one node."""

    def inherit(self, heir: L, source: L) -> None:
        """``heir`` is at least as valuable as ``source``: split off, or a parent that stays.

        After a split they are the two halves; a child that is removed has no position left.
        """

    def may_join(self, head: L, tail: L) -> bool:
        """Whether ``head`` and its only child ``tail`` have the same past and may be one node.

        Mutates nothing. True only if who is chosen later, and what is learned of it, is the same after as
        without. Asked after ``used``, which makes the parts of a chain alike again. Where there are nodes
        between the two, it has been True for each of them and ``tail``, and all may be one.
        """

    def joined(self, node: L, gone: L) -> None:
        """The positions of ``gone`` are those of ``node`` now, right before or after its own.

        ``may_join`` held for the two, or for both and the last of what becomes one. Neither is a candidate.
        ``gone`` has no position left; implies ``forget`` of it.
        """

    def enter(self, leaf: L) -> None:
        """``leaf`` has become evictable: no child, no pin, nothing on its way into it."""

    def leave(self, leaf: L) -> None:
        """``leaf`` is no longer evictable. Its rank is kept for the next ``enter``."""

    def earns_copy(self, node: L) -> bool:
        """Whether slots pay for positions of ``node`` that have none, and that are about to be lost.

        They earn what others do in the same time, and what a copy costs. True where that is not known.
        """

    def earns_room(self, node: L, num_asked: int) -> bool:
        """Whether slots of ``node`` earn more elsewhere while the GPU has its positions, too.

        It has them until they are asked for, or else until requests have asked for so many since their last
        use: then they may have to be copied again. True where that is not known.
        """

    def stays_out(self, node: L) -> bool:
        """Whether requests ask that positions of ``node`` take no slots from the next candidate."""

    def resized(self, node: L) -> None:
        """``node``, a candidate or not, has got or lost slots, and no position."""

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        """The last ``len(keys)`` positions of ``leaf``, so named, were evicted for new ones.

        With them it lost ``weight`` slots.
        """

    def dropped(self, node: L, num_positions: int) -> None:
        """The last so many positions of ``node`` are gone for another reason: a fault, or a reset."""

    def forget(self, node: L) -> None:
        """``node`` is gone. Nothing may refer to it any longer; history by name may stay."""

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        """Raise AssertionError, with what was seen, if the policy's state contradicts itself. O(n).

        ``nodes``: all that were stored and not forgotten. Without them only what the policy refers to itself
        is looked at: candidates and history.
        """
