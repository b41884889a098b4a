"""What requests ask for their own blocks, on top of any policy."""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Generic

from sortedcontainers import SortedDict

from evictor.hints import PLAIN, Claims, KeepHints, Worth
from evictor.policy import EvictionPolicy, L, Newcomer

logger = logging.getLogger(__name__)


_NO_HINTS = KeepHints()
_Key = tuple[float, int]


class _Mark:
    """What is known of a node that more, or less, is claimed for than by plain use, and where it is filed."""

    __slots__ = ("claims", "due", "high", "key", "last_use", "num_protected", "serial", "stamp", "state")

    def __init__(self, claims: Claims, serial: int, stamp: int, last_use: float) -> None:
        self.claims = claims
        self.serial = serial  # nodes have no order
        self.stamp = stamp
        self.last_use = last_use
        self.state: Worth | None = Worth.NORMAL  # None while pinned
        self.num_protected = 0
        self.key: tuple[int, int, int] | None = None
        self.high: _Key | None = None
        self.due: _Key | None = None


class HintedPolicy(Generic[L]):
    """Ranks the leaves that requests gave hints for, and leaves the others to the policy inside.

    They go in this order: unwanted leaves and those whose time to live is over, those of low worth, those
    that the inner policy chooses, those of high worth; but for the inner policy's, the one used longest ago
    first. Pinned ones do not go.

    A node is worth, at any time, the best that a request which used it asked for; see ``Claims``. Use without
    hints makes a node of low worth a normal one. It lets a node of high worth with a time to live become
    normal after that time, instead of unwanted. Every use renews times to live, but does not bring back what
    had ended before it. Hints that ask for less than others did change nothing. So nobody gives away what is
    not theirs alone, and an ancestor is protected at least as long as what hangs below it.

    *Protected* nodes, pinned or of high worth, have ``max_protected`` positions together at most, those
    before a protected one included. Where a request asks for more, what is of high worth and was used
    longest ago becomes normal; a pin is never taken back. What still does not fit is normal, from the end of
    the chain on.

    While no node has a hint, a call costs a look at a flag or a set more than the inner policy's. Else it is
    O(log n), and ``ask`` that for each node of the path. Pins and times to live end by themselves, at the
    next ``ask`` or ``choose``: O(log n) for each that does.
    """

    def __init__(self, inner: EvictionPolicy[L], max_protected: int, clock: Callable[[], float]) -> None:
        """``inner`` must be fresh; ``max_protected`` in positions; ``clock`` in seconds."""
        self._inner = inner
        self._max_protected = max_protected
        self._clock = clock
        self._stamps = count(1)
        self._serials = count()
        self._candidates: set[L] = set()
        self._marks: dict[L, _Mark] = {}
        self._ours: SortedDict[tuple[int, int, int], L] = SortedDict()  # candidates the inner one has not
        self._high: SortedDict[_Key, L] = SortedDict()  # nodes of high worth that are not pinned, by last use
        self._due: SortedDict[_Key, L] = SortedDict()  # nodes whose state changes by itself, by time
        self._num_high = 0
        self._num_pinned = 0
        self._asking = PLAIN
        self._asked_at = 0.0
        self._stamp = 0
        self._has_warned = False

    @property
    def is_in_use(self) -> bool:
        """Whether any node has a hint."""
        return bool(self._marks)

    def ask(self, hints: KeepHints | None, path: Sequence[L], num_new: int = 0) -> None:
        """A request with these hints uses the nodes of ``path``, the deepest first.

        It may store up to ``num_new`` positions beyond them: what is joined, stored and chosen for newcomers
        from now on is for it.
        """
        if not self._marks and (hints is None or hints == _NO_HINTS):
            self._asking = PLAIN
            return
        now = self._asked_at = self._clock()
        self._stamp = next(self._stamps)
        self._expire(now)
        asking = wanted = PLAIN if hints is None else Claims.of(hints).at(now, now)
        num_fixed = self._num_pinned
        for node in path:
            mark = self._marks.get(node)
            if mark is not None:
                mark.claims = mark.claims.at(now, mark.last_use)  # before the use renews what is left of them
                mark.stamp, mark.last_use = self._stamp, now
                self._file(node, mark, now)
                num_fixed += mark.num_protected if mark.state is Worth.HIGH else 0
        for node in reversed(path):
            mark = self._marks.get(node)
            if asking.wants_protection and not (mark is not None and mark.num_protected):
                num_fixed += len(node)
                asking = self._protect(asking, num_fixed, len(node), now)
            self._raise(node, asking, now)
        self._asking = (
            self._protect(asking, num_fixed + num_new, num_new, now) if asking.wants_protection else asking
        )
        if self._asking is not wanted and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests ask for more than the %d positions that may be protected; the rest is kept as if "
                "they had not, here and from now on",
                self._max_protected,
            )

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        self._inner.used(path, chain, depth)

    def num_alike(self, keys: Sequence[Hashable], start: int) -> int:
        return self._inner.num_alike(keys, start)

    def joins(self, node: L, key: Hashable) -> bool:
        """As the inner policy, but not where the one has other hints than the other."""
        mark = self._marks.get(node)
        if mark is None:
            return self._asking == PLAIN and self._inner.joins(node, key)
        return self._asking == mark.claims and self._inner.joins(node, key)

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._inner.stored(node, keys, next_key)
        if self._marks and (mark := self._marks.get(node)) is not None:
            self._file(node, mark)
        elif self._asking != PLAIN:
            self._mark(node, self._asking)

    def inherit(self, heir: L, source: L) -> None:
        """Both parts of a split have the hints of what they were; a parent gets none from its child."""
        self._inner.inherit(heir, source)
        if self._marks and len(source) and (mark := self._marks.get(source)) is not None:
            self._file(source, mark)
            if source in self._marks:
                self._mark(heir, mark.claims, mark)

    def may_join(self, head: L, tail: L) -> bool:
        """Those with hints stay apart."""
        has_hints = bool(self._marks) and (head in self._marks or tail in self._marks)
        return not has_hints and self._inner.may_join(head, tail)

    def joined(self, node: L, gone: L) -> None:
        self._candidates.discard(gone)
        self._inner.joined(node, gone)

    def enter(self, leaf: L) -> None:
        self._candidates.add(leaf)
        mark = self._marks.get(leaf) if self._marks else None
        if mark is None:
            self._inner.enter(leaf)
        else:
            self._file(leaf, mark)

    def leave(self, leaf: L) -> None:
        self._candidates.discard(leaf)
        self._inner.leave(leaf)
        mark = self._marks.get(leaf) if self._marks else None
        if mark is not None:
            self._file(leaf, mark)

    def choose(self, newcomer: Newcomer[L] | None = None) -> L | None:
        """As the protocol says; a ``newcomer`` is the last to ``ask``.

        One of low worth takes the place of others of low worth at most, an unwanted one that of what is
        unwanted too, and one that is to be protected that of anything that is not pinned. None can also mean
        that all candidates are pinned.
        """
        if self._due:
            self._expire(self._clock())
        is_to_be_protected = newcomer is not None and self._asking.wants_protection
        worth = Worth.NORMAL if newcomer is None or is_to_be_protected else self._asking.worth
        state, ours = self._first_of_ours()
        if state <= min(worth, Worth.LOW):
            return ours
        if worth < Worth.NORMAL:
            return None
        if newcomer is not None and not is_to_be_protected:
            return self._inner.choose(newcomer)
        theirs = self._inner.choose()
        return ours if theirs is None else theirs

    def evicted(self, leaf: L, keys: Sequence[Hashable]) -> None:
        self._inner.evicted(leaf, keys)
        if self._marks and (mark := self._marks.get(leaf)) is not None:
            self._file(leaf, mark)

    def dropped(self, node: L, num_positions: int) -> None:
        self._inner.dropped(node, num_positions)
        if self._marks and (mark := self._marks.get(node)) is not None:
            self._file(node, mark)

    def forget(self, node: L) -> None:
        self._candidates.discard(node)
        mark = self._marks.pop(node, None) if self._marks else None
        if mark is not None:
            self._unfile(mark)
        self._inner.forget(node)

    def check_invariants(self) -> None:
        self._inner.check_invariants()
        protected = {True: 0, False: 0}
        for node, mark in self._marks.items():
            state, seen = mark.state, f"{node!r} of {len(node)} positions is {mark.state!r}, {mark.claims}"
            is_protected = state is None or state is Worth.HIGH
            assert mark.claims != PLAIN, f"{seen}: needs no mark"
            assert mark.num_protected == (len(node) if is_protected else 0), (
                f"{seen}: {mark.num_protected} protected"
            )
            protected[state is None] += mark.num_protected
            is_ours = node in self._candidates and state is not None and state is not Worth.NORMAL
            assert (mark.key is not None) == is_ours, f"{seen}: filed under {mark.key}"
            assert mark.key is None or self._ours.get(mark.key) is node, f"{seen}: not under {mark.key}"
            assert mark.due is None or self._due.get(mark.due) is node, f"{seen}: not due {mark.due}"
            is_high = mark.high is not None and self._high.get(mark.high) is node
            assert is_high == (state is Worth.HIGH), f"{seen}: among those of high worth under {mark.high}"
        keys = [mark.key for mark in self._marks.values() if mark.key is not None]
        dues = [mark.due for mark in self._marks.values() if mark.due is not None]
        assert len(keys) == len(self._ours), f"{self._ours} and {keys} differ"
        assert len(dues) == len(self._due), f"{self._due} and {dues} differ"
        num_high = sum(mark.high is not None for mark in self._marks.values())
        assert num_high == len(self._high), f"{self._high} has others than the {num_high} of high worth"
        assert protected == {True: self._num_pinned, False: self._num_high}, (
            f"{protected} protected, not as counted"
        )
        assert sum(protected.values()) <= self._max_protected, (
            f"{protected} protected, more than {self._max_protected}"
        )

    # Private

    def _first_of_ours(self) -> tuple[int, L | None]:
        if not self._ours:
            return Worth.HIGH, None
        (state, _, _), leaf = self._ours.peekitem(0)
        return state, leaf

    def _protect(self, asking: Claims, num_fixed: int, num_more: int, now: float) -> Claims:
        """Make sure that ``num_more`` positions can be protected, ``num_fixed`` with what is not taken back.

        Returns what may be asked for them.
        """
        if num_fixed > self._max_protected:
            return asking.unprotected
        while self._num_pinned + self._num_high + num_more > self._max_protected:
            (stamp, _), _ = self._high.peekitem(0)
            while self._high and self._high.peekitem(0)[0][0] == stamp:  # an ancestor with its descendants
                _, node = self._high.peekitem(0)
                mark = self._marks[node]
                mark.claims = mark.claims.not_high
                self._file(node, mark, now)
        return asking

    def _raise(self, node: L, asking: Claims, now: float) -> None:
        """``node`` is used with these claims: it gets what is more of each."""
        mark = self._marks.get(node)
        before = PLAIN if mark is None else mark.claims
        claims = before | asking
        if claims is before:
            return
        if mark is None:
            self._mark(node, claims, None, now)
        else:
            mark.claims = claims
            self._file(node, mark, now)

    def _mark(self, node: L, claims: Claims, like: _Mark | None = None, now: float | None = None) -> None:
        """File a plain node by its claims; its last use is the last ``ask``, or as what it is ``like``."""
        stamp, last_use = (self._stamp, self._asked_at) if like is None else (like.stamp, like.last_use)
        mark = self._marks[node] = _Mark(claims, next(self._serials), stamp, last_use)
        self._file(node, mark, now)

    def _expire(self, now: float) -> None:
        while self._due and self._due.peekitem(0)[0][0] <= now:
            _, node = self._due.peekitem(0)
            self._file(node, self._marks[node], now)

    def _file(self, node: L, mark: _Mark, now: float | None = None) -> None:
        """Put ``node`` where it belongs by its claims, its length and the time."""
        now = self._clock() if now is None else now
        self._unfile(mark)
        claims = mark.claims = mark.claims.at(now, mark.last_use)
        is_pinned = claims.pinned_until > now
        before, mark.state = mark.state, None if is_pinned else claims.worth
        when = claims.pinned_until if is_pinned else mark.last_use + claims.ttl
        if when < math.inf:
            mark.due = when, mark.serial
            self._due[mark.due] = node
        if is_pinned:
            mark.num_protected = len(node)
            self._num_pinned += mark.num_protected
        elif mark.state is Worth.HIGH:
            mark.num_protected = len(node)
            self._num_high += mark.num_protected
            mark.high = mark.stamp, mark.serial
            self._high[mark.high] = node
        if claims == PLAIN:
            del self._marks[node]
        if node not in self._candidates:
            return
        if mark.state is Worth.NORMAL:
            self._inner.enter(node)
        else:
            if before is Worth.NORMAL:
                self._inner.leave(node)
            if mark.state is not None:
                mark.key = mark.state, mark.stamp, mark.serial
                self._ours[mark.key] = node

    def _unfile(self, mark: _Mark) -> None:
        if mark.state is None:
            self._num_pinned -= mark.num_protected
        elif mark.state is Worth.HIGH:
            self._num_high -= mark.num_protected
        mark.num_protected = 0
        if mark.high is not None:
            del self._high[mark.high]
        if mark.due is not None:
            del self._due[mark.due]
        if mark.key is not None:
            del self._ours[mark.key]
        mark.high = mark.due = mark.key = None
