"""What requests ask for their own blocks, on top of any policy."""

import logging
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic

from evictor.hints import PLAIN, Claims, KeepHints, Worth
from evictor.marks import CANDIDATE, Mark, mark_of
from evictor.order import Order
from evictor.policy import Admission, EvictionPolicy, L, Newcomer

logger = logging.getLogger(__name__)

_NO_HINTS = KeepHints()


class HintedPolicy(Generic[L]):
    """Ranks the leaves that requests gave hints for, and leaves the others to the policy inside.

    Unwanted leaves and those whose time to live is over are evicted first, then those of low worth. Then
    follow those that the inner policy chooses, and last those of high worth. Among all but the inner
    policy's, the one used longest ago is first. Pinned ones are not evicted.

    A node is worth, at any time, the best that a request which used it asked for; see ``Claims``. Use without
    hints makes a node of low worth a normal one. It lets a node of high worth with a time to live become
    normal after that time, instead of unwanted. Every use renews times to live, but does not bring back what
    had ended before it. Hints that ask for less than others did change nothing. So a request can only
    lower nodes that it alone uses, and an ancestor is protected at least as long as what hangs below it.

    *Protected* nodes, pinned or of high worth, have ``max_protected`` slots together at most, those
    before a protected one included. Where a request asks for more, what is of high worth and was used
    longest ago becomes normal; a pin is never taken back. What still does not fit is normal, from the end of
    the chain on.

    While no node has a hint, a call costs a look at the node's ``mark`` more than the inner policy's. Else it
    is O(log n), and ``heed`` that for each node of the path. Pins and times to live end by themselves, at the
    next ``heed`` or ``choose``: O(log n) for each that does.
    """

    def __init__(self, inner: EvictionPolicy[L], max_protected: int, clock: Callable[[], float]) -> None:
        """``inner`` must be fresh; ``max_protected`` in slots; ``clock`` in seconds."""
        self._inner = inner
        self._max_protected = max_protected
        self._clock = clock
        self._stamps = count(1)
        self._serials = count()
        self._num_marks = 0
        self._ours: Order[L] = Order()  # candidates that the inner policy has not: state, last use
        self._high: Order[L] = Order()  # nodes of high worth that are not pinned: last use
        self._due: Order[L] = Order()  # nodes whose state changes by itself: time
        self._num_high = self._num_pinned = 0
        self._has_warned = False

    @property
    def num_pinned(self) -> int:
        """Slots of nodes that are pinned. O(log n) for each pin that is over by now."""
        self._expire(self._clock())
        return self._num_pinned

    def pinned(self) -> list[L]:
        """Nodes that are pinned until a time. O(those that have one, or a time to live)."""
        self._expire(self._clock())
        return [node for _, node in self._due.items() if node.mark.state is None]

    def pins(self, node: L) -> bool:
        """Whether ``node`` is pinned now. O(1)."""
        mark = mark_of(node)
        return mark is not None and mark.claims.pinned_until > self._clock()

    def allow(self, max_protected: int) -> None:
        """So many slots may be protected from now on. O(log n) for each node that is not any more."""
        self._max_protected = max_protected
        self._make_fit(0, self._clock())

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        self._inner.used(path, chain, depth)

    @property
    def turn(self) -> int:
        """That of the inner policy."""
        return self._inner.turn

    def ended(self, path: Sequence[L], chain: Sequence[Hashable], depth: int, turn: int, ending: int) -> None:
        self._inner.ended(path, chain, depth, turn, ending)

    def heed(self, hints: KeepHints | None, path: Sequence[L], num_new: int = 0) -> Admission[L]:
        if not self._num_marks and (hints is None or hints == _NO_HINTS):
            return self._inner.heed(None, path, num_new)  # as long as no node has a hint
        now = self._clock()
        stamp = next(self._stamps)
        self._expire(now)
        asking = wanted = PLAIN if hints is None else Claims.of(hints).at(now, now)
        num_fixed = self._num_pinned
        for node in path:
            mark = mark_of(node)
            if mark is not None:
                mark.claims = mark.claims.at(now, mark.last_use)  # before the use renews what is left of them
                mark.stamp, mark.last_use = stamp, now
                self._file(node, mark, now)
                num_fixed += mark.num_protected if mark.state is Worth.HIGH else 0
        for node in reversed(path):
            mark = mark_of(node)
            if asking.wants_protection and not (mark is not None and mark.num_protected):
                num_fixed += node.weight
                asking = self._protect(asking, num_fixed, node.weight, now)
            self._raise(node, asking, stamp, now)
        if asking.wants_protection:
            asking = self._protect(asking, num_fixed + num_new, num_new, now)
        if asking is not wanted and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests ask for more than the %d slots that may be protected; the rest is kept as if "
                "they had not, here and from now on",
                self._max_protected,
            )
        return _HintedAdmission(self, asking, stamp, now)

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        return self._inner.num_alike(keys, start)

    def joins(self, node: L, key: Hashable) -> bool:
        return self.joins_as(node, key, PLAIN)

    def joins_as(self, node: L, key: Hashable, claims: Claims) -> bool:
        """As the inner policy, if the same is claimed for both."""
        mark = mark_of(node)
        return claims == (PLAIN if mark is None else mark.claims) and self._inner.joins(node, key)

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._inner.stored(node, keys, next_key)
        if (mark := mark_of(node)) is not None:
            self._file(node, mark)

    def claim(self, node: L, claims: Claims, stamp: int, last_use: float) -> None:
        """``node`` was stored by a request that claims this for it, at that time."""
        if claims != PLAIN and mark_of(node) is None:
            self._mark(node, claims, stamp, last_use)

    def inherit(self, heir: L, source: L) -> None:
        """Both parts of a split have the hints of what they were; a parent gets none from its child."""
        self._inner.inherit(heir, source)
        if len(source) and (mark := mark_of(source)) is not None:
            self._file(source, mark)
            if mark_of(source) is not None:
                self._mark(heir, mark.claims, mark.stamp, mark.last_use)

    def may_join(self, head: L, tail: L) -> bool:
        """Those with the same claims and the same last use, or without any."""
        mine, other = mark_of(head), mark_of(tail)
        if mine is None or other is None:
            are_alike = mine is other
        else:
            are_alike = (mine.stamp, mine.claims) == (other.stamp, other.claims)
        return are_alike and self._inner.may_join(head, tail)

    def joined(self, node: L, gone: L) -> None:
        if (mark := mark_of(gone)) is not None:
            self._unfile(mark)
            self._num_marks -= 1
        gone.mark = None
        self._inner.joined(node, gone)
        if (mark := mark_of(node)) is not None:
            self._file(node, mark)

    def enter(self, leaf: L) -> None:
        if (mark := mark_of(leaf)) is None:
            leaf.mark = CANDIDATE
            self._inner.enter(leaf)
        else:
            mark.is_candidate = True
            self._file(leaf, mark)

    def leave(self, leaf: L) -> None:
        self._inner.leave(leaf)
        if (mark := mark_of(leaf)) is None:
            leaf.mark = None
        else:
            mark.is_candidate = False
            self._file(leaf, mark)

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        """As the protocol says. None can also mean that all candidates are pinned."""
        return self.choose_for(newcomer, PLAIN)

    def choose_for(self, newcomer: Newcomer[L] | None, claims: Claims) -> L | None:
        """``choose`` for a newcomer that this is claimed for.

        One of low worth takes the place of others of low worth at most, an unwanted one that of unwanted
        ones. One that is to be protected takes the place of anything that is not pinned.
        """
        if not self._num_marks and claims is PLAIN:
            return self._inner.choose(newcomer)
        if len(self._due):
            self._expire(self._clock())
        is_to_be_protected = newcomer is not None and claims.wants_protection
        worth = Worth.NORMAL if newcomer is None or is_to_be_protected else claims.worth
        state, ours = self._first_of_ours()
        if state <= min(worth, Worth.LOW):
            return ours
        if worth < Worth.NORMAL:
            return None
        if newcomer is not None and not is_to_be_protected:
            return self._inner.choose(newcomer)
        theirs = self._inner.choose()
        return ours if theirs is None else theirs

    def earns_copy(self, node: L) -> bool:
        """A request's own word goes before what is learned."""
        return mark_of(node) is not None or self._inner.earns_copy(node)

    def earns_room(self, node: L, num_asked: int) -> bool:
        """What requests ask to go first need not be worth anything."""
        self._expire(self._clock())
        return self._first_of_ours()[0] > Worth.LOW and self._inner.earns_room(node, num_asked)

    def stays_out(self, node: L) -> bool:
        self._expire(self._clock())
        mark, most = mark_of(node), min(Worth.NORMAL, self._first_of_ours()[0])  # as in ``choose_for``
        return mark is not None and mark.state is not None and mark.state < most

    def resized(self, node: L) -> None:
        """A bag that comes to a protected node may displace what is of high worth, but no pin."""
        self._inner.resized(node)
        if (mark := mark_of(node)) is not None:
            self._file(node, mark)
            self._make_fit(0, self._clock())

    def evicted(self, leaf: L, keys: Sequence[Hashable], weight: int) -> None:
        self._inner.evicted(leaf, keys, weight)
        if (mark := mark_of(leaf)) is not None:
            self._file(leaf, mark)

    def dropped(self, node: L, num_positions: int) -> None:
        self._inner.dropped(node, num_positions)
        if (mark := mark_of(node)) is not None:
            self._file(node, mark)

    def forget(self, node: L) -> None:
        if (mark := mark_of(node)) is not None:
            self._unfile(mark)
            self._num_marks -= 1
        node.mark = None
        self._inner.forget(node)

    def check_invariants(self, nodes: Collection[L] | None = None) -> None:
        self._inner.check_invariants(nodes)
        for order in (self._ours, self._high, self._due):
            order.check_invariants()
        if nodes is not None:
            self._check_nodes(nodes)
        num, most = self._num_pinned + self._num_high, self._max_protected
        assert num <= most or not self._num_high, f"{num} protected, more than {most}"

    # Private

    def _check_nodes(self, nodes: Collection[L]) -> None:
        protected = {True: 0, False: 0}
        marks = {node: mark for node in nodes if (mark := mark_of(node)) is not None}
        for node, mark in marks.items():
            state, seen = mark.state, f"{node!r} of {len(node)} positions is {mark.state!r}, {mark.claims}"
            is_protected = state is None or state is Worth.HIGH
            assert mark.claims != PLAIN, f"{seen}: needs no mark"
            assert mark.num_protected == (node.weight if is_protected else 0), (
                f"{seen}: {mark.num_protected} protected"
            )
            protected[state is None] += mark.num_protected
            is_ours = mark.is_candidate and state is not None and state is not Worth.NORMAL
            assert (mark.key is not None) == is_ours, f"{seen}: filed under {mark.key}"
            assert (mark.high is not None) == (state is Worth.HIGH), (
                f"{seen}: among those of high worth under {mark.high}"
            )
        assert len(marks) == self._num_marks, f"{len(marks)} nodes have hints, not {self._num_marks}"
        for order, key in ((self._ours, "key"), (self._high, "high"), (self._due, "due")):
            known = {at: node for node, mark in marks.items() if (at := getattr(mark, key)) is not None}
            filed = dict(order.items())
            assert filed == known, f"{filed} and {known} differ"
        counted = {True: self._num_pinned, False: self._num_high}
        assert protected == counted, f"{protected} protected, {counted} counted"

    def _first_of_ours(self) -> tuple[int, L | None]:
        key = self._ours.first_key
        return (Worth.HIGH, None) if key is None else (key[0], self._ours.first)

    def _protect(self, asking: Claims, num_fixed: int, num_more: int, now: float) -> Claims:
        """Make sure that ``num_more`` slots can be protected, ``num_fixed`` with what is not taken back.

        Returns what may be asked for them.
        """
        if num_fixed > self._max_protected:
            return asking.unprotected
        self._make_fit(num_more, now)
        return asking

    def _make_fit(self, num_more: int, now: float) -> None:
        """Take back what is of high worth, longest unused first, until so many slots can be protected."""
        while self._num_pinned + self._num_high + num_more > self._max_protected and self._num_high:
            oldest = self._high.first_key
            assert oldest is not None, f"{self._num_high} of high worth, but no node"
            while (key := self._high.first_key) is not None and key[0] == oldest[0]:  # ancestors as well
                node = self._high.first
                assert node is not None
                node.mark.claims = node.mark.claims.not_high
                self._file(node, node.mark, now)

    def _raise(self, node: L, asking: Claims, stamp: int, now: float) -> None:
        """``node`` is used with these claims: it gets what is more of each."""
        mark = mark_of(node)
        before = PLAIN if mark is None else mark.claims
        if (claims := before | asking) is before:
            return
        if mark is None:
            self._mark(node, claims, stamp, now, now)
        else:
            mark.claims = claims
            self._file(node, mark, now)

    def _mark(self, node: L, claims: Claims, stamp: int, last_use: float, now: float | None = None) -> None:
        """File a plain node by its claims and its last use."""
        mark = Mark(claims, next(self._serials), stamp, last_use, is_candidate=node.mark is CANDIDATE)
        node.mark = mark
        self._num_marks += 1
        self._file(node, mark, now)

    def _expire(self, now: float) -> None:
        while (key := self._due.first_key) is not None and key[0] <= now:
            node = self._due.first
            assert node is not None
            self._file(node, node.mark, now)
        self._make_fit(0, now)  # pins may have been too many, and what was pinned may be of high worth

    def _file(self, node: L, mark: Mark, now: float | None = None) -> None:
        """Put ``node`` where it belongs by its claims, its length and the time."""
        now = self._clock() if now is None else now
        self._unfile(mark)
        claims = mark.claims = mark.claims.at(now, mark.last_use)
        is_pinned = claims.pinned_until > now
        before, mark.state = mark.state, None if is_pinned else claims.worth
        when = claims.pinned_until if is_pinned else mark.last_use + claims.ttl
        if when < math.inf:
            assert when > now, f"{claims} of {node!r} are over since {when}"  # or they would be due for ever
            mark.due = when, mark.serial
            self._due.add(mark.due, node)
        if is_pinned:
            mark.num_protected = node.weight
            self._num_pinned += mark.num_protected
        elif mark.state is Worth.HIGH:
            mark.num_protected = node.weight
            self._num_high += mark.num_protected
            mark.high = mark.stamp, mark.serial
            self._high.add(mark.high, node)
        if claims == PLAIN:
            node.mark = CANDIDATE if mark.is_candidate else None
            self._num_marks -= 1
        if not mark.is_candidate:
            return
        if mark.state is Worth.NORMAL:
            self._inner.enter(node)
        else:
            if before is Worth.NORMAL:
                self._inner.leave(node)
            if mark.state is not None:
                mark.key = mark.state, mark.stamp, mark.serial
                self._ours.add(mark.key, node)

    def _unfile(self, mark: Mark) -> None:
        if mark.state is None:
            self._num_pinned -= mark.num_protected
        elif mark.state is Worth.HIGH:
            self._num_high -= mark.num_protected
        mark.num_protected = 0
        if mark.high is not None:
            self._high.remove(mark.high)
        if mark.due is not None:
            self._due.remove(mark.due)
        if mark.key is not None:
            self._ours.remove(mark.key)
        mark.high = mark.due = mark.key = None


@dataclass(frozen=True, slots=True)
class _HintedAdmission(Generic[L]):
    """An ``Admission``: ``claims`` are what is granted to positions that a request of ``now`` stores."""

    policy: HintedPolicy[L]
    claims: Claims
    stamp: int
    now: float

    def joins(self, node: L, key: Hashable) -> bool:
        return self.policy.joins_as(node, key, self.claims)

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self.policy.stored(node, keys, next_key)
        self.policy.claim(node, self.claims, self.stamp, self.now)

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        return self.policy.choose_for(newcomer, self.claims)
