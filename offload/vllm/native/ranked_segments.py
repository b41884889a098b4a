"""Runs of keys as leaves for an eviction policy: the tree of a cache whose owner thinks in single keys.

    [k0..k99] ──┬── [k100..k179]        one segment = consecutive keys with the same past
                └── [j100..j131]

The allocator has a tree of its own, which knows slots and is prefix-closed. This one is for caches that are
not. Their owner says of every key when it is in use, may take out one in the middle, and cannot decline
newcomers. Those that the policy would rather keep out are *guests* until a request asks for them again. They
are evicted first, whatever the policy thinks of the others.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat

from evictor import EvictionPolicy, Newcomer
from evictor.caller import Caller
from offload.vllm.native.segments import Arrival, Evicted, Key, Segment, num_common, num_free


class RankedSegments(Caller[Segment]):
    """Segments and the policy that ranks them, in step.

    ``policy`` has to be a fresh one.
    """

    def __init__(self, policy: EvictionPolicy[Segment]) -> None:
        super().__init__(policy)
        self._segments: dict[Key, Segment] = {}
        self._busy: set[Key] = set()
        self._guests: dict[Segment, None] = {}  # oldest first; the policy has none of them as a candidate
        self._root = Segment(None, [])

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, key: Key) -> bool:
        return key in self._segments

    def use(self, chain: list[Key]) -> int:
        """A request asks for ``chain``; return how many leading keys are here. O(n), in whole lists."""
        depth, path = 0, []
        while depth < len(chain):
            segment = self._segments.get(chain[depth])
            if segment is None:
                break
            size = num_common(segment.keys, chain, depth)
            if not size:
                break
            segment = self._split(segment, size)
            if segment in self._guests:
                del self._guests[segment]
                self.refresh(segment)
            path.append(segment)
            depth += size
        self._policy.used(path[::-1], chain, depth)
        return depth

    def append(
        self, keys: Sequence[Key], before: Key, after: Key, busy: set[Key], as_guests: bool = False
    ) -> None:
        """``keys`` came, those in ``busy`` in use.

        They follow ``before`` in their chain, as far as it is here, and ``after`` follows them; either may be
        None. O(n), in whole lists.
        """
        node = self._segments.get(before)
        if node is not None and node.keys[-1] != before:
            node = self._split(node, node.keys.index(before) + 1)
        for start, stop in self.stretches(keys):
            part = list(keys[start:stop])
            node = self._hang(node, part, busy.intersection(part), as_guests)
            self._policy.stored(node, part, keys[stop] if stop < len(keys) else after)
            self.refresh(node)

    def set_busy(self, key: Key) -> None:
        """``key`` is in use, and so are those before it: they are not evicted."""
        if key not in self._busy:
            self._busy.add(key)
            segment = self._segments[key]
            segment.num_busy += 1
            if segment.num_busy == 1:
                self._policy.leave(segment)

    def set_idle(self, key: Key) -> None:
        """``key`` is no longer in use."""
        if key in self._busy:
            self._busy.remove(key)
            segment = self._segments[key]
            segment.num_busy -= 1
            if not segment.num_busy:
                self.refresh(segment)

    def evict(
        self, num_keys: int, protected: AbstractSet[Key], arrivals: Sequence[Arrival] = ()
    ) -> Evicted | None:
        """Take out guests, then what is worth least, the tails of leaves first.

        Args:
            num_keys: exactly that many.
            protected: keys that stay, and so do those before them.
            arrivals: what the others are evicted for; what they follow stays.

        Returns:
            None, and nothing has changed, if there are not that many. O(log n) for each segment that is met,
            O(1) for each guest, plus O(1) per key.
        """
        parents = [self._segments.get(each.before, self._root) for each in arrivals]
        met = dict.fromkeys(parent for parent in parents if parent is not self._root)
        for segment in met:
            self._policy.leave(segment)
        for_guests = self._policy.choose() is not None and any(
            self._policy.choose(Newcomer(parent, each.keys[0], len(each.keys))) is None
            for parent, each in zip(parents, arrivals, strict=True)
        )
        chosen = self._select(num_keys, protected, met)
        evicted: list[Key] = []
        for leaf, size in chosen or ():
            gone = leaf.keys[-size:]
            del leaf.keys[-size:]
            evicted += gone
            for key in gone:
                del self._segments[key]
            self._unlink_if_empty(leaf)
            self.after_eviction(leaf, gone, len(gone), leaf.parent)
        for segment in met:
            if segment.keys:
                self.refresh(segment)
        return None if chosen is None else Evicted(evicted, for_guests)

    def discard(self, keys: Iterable[Key]) -> None:
        """``keys`` are not here, in use or not. O(n) and their segments."""
        gone = set(keys)
        for segment in {self._segments.pop(key) for key in gone}:
            segment.num_busy -= len(self._busy.intersection(segment.keys) & gone)
            left = [key for key in segment.keys if key not in gone]
            num_gone, segment.keys = len(segment) - len(left), left
            self._unlink_if_empty(segment)
            self.after_drop(segment, num_gone, segment.parent)
            if left:
                self.refresh(segment)
        self._busy -= gone

    def refresh(self, node: Segment) -> None:
        """It may have become evictable, or not evictable; a guest is no candidate."""
        if node in self._guests:
            self._policy.leave(node)
        else:
            super().refresh(node)

    def check_invariants(self) -> None:
        """Segments, keys and policy agree. O(n); for tests."""
        segments = set(self._segments.values())
        self._policy.check_invariants(segments)
        assert self._busy <= self._segments.keys(), "a key in use is unknown"
        assert sum(map(len, segments)) == len(self._segments), "a segment holds unknown keys"
        for segment in segments:
            assert all(self._segments[key] is segment for key in segment.keys), "a key is elsewhere"
            num_busy = len(self._busy.intersection(segment.keys))
            assert segment.num_busy == num_busy, f"{segment.num_busy} keys counted in use, not {num_busy}"
            assert segment.children <= segments, "a child is gone"
            assert all(child.parent is segment for child in segment.children), "a child has another parent"
            assert segment.parent is None or segment in segment.parent.children, "a parent lost a child"
        leaf = self._policy.choose()
        assert leaf is None or (leaf in segments and leaf.is_evictable), f"the policy offers {leaf!r}"
        assert leaf not in self._guests, "the policy offers a guest"
        assert self._guests.keys() <= segments, "a guest is gone"

    def _select(
        self, num_keys: int, protected: AbstractSet[Key], met: dict[Segment, None]
    ) -> list[tuple[Segment, int]] | None:
        """What goes: segments and how many of their last keys, children first; None if it is not enough.

        Whose candidacy has changed is noted in ``met``, and of those that are there already it does not.
        """
        chosen: list[tuple[Segment, int]] = []
        guests = [guest for guest in reversed(self._guests) if guest.is_evictable and guest not in met]
        bared: dict[Segment, int] = {}  # how many children are chosen as a whole
        while num_keys:
            leaf = guests.pop() if guests else self._policy.choose()
            if leaf is None:
                return None
            self._policy.leave(leaf)
            met[leaf] = None
            size = num_free(leaf.keys, num_keys, protected)
            if size:
                chosen.append((leaf, size))
                num_keys -= size
            parent = leaf.parent
            if size < len(leaf) or parent is None:
                continue
            bared[parent] = bared.get(parent, 0) + 1
            if bared[parent] == len(parent.children) and not parent.num_busy and parent not in met:
                if parent in self._guests:
                    guests.append(parent)
                else:
                    self._policy.enter(parent)
                    met[parent] = None
        return chosen

    def _hang(self, node: Segment | None, part: list[Key], busy: set[Key], as_guest: bool) -> Segment:
        """Put ``part`` at the end of ``node`` or in a new child of it."""
        if node is not None:
            self._policy.leave(node)
        if (
            node is not None
            and not node.children
            and (node in self._guests) == as_guest
            and self._policy.joins(node, part[0])
        ):
            node.keys += part
        else:
            parent, node = node, Segment(node, part)
            if parent is not None:
                parent.children.add(node)
            if as_guest:
                self._guests[node] = None
        self._segments.update(zip(part, repeat(node)))
        self._busy |= busy
        node.num_busy += len(busy)
        return node

    def _split(self, segment: Segment, size: int) -> Segment:
        """Make the first ``size`` keys of ``segment`` one of their own; return it."""
        if size == len(segment):
            return segment
        new = segment.split(size)
        self._segments.update(zip(new.keys, repeat(new)))
        if segment.num_busy:
            new.num_busy = len(self._busy.intersection(new.keys))
            segment.num_busy -= new.num_busy
        if segment in self._guests:
            self._guests[new] = None
        self.after_split(segment, new)
        return new if segment.parent is new else segment

    def _unlink_if_empty(self, segment: Segment) -> None:
        """An empty segment leaves its children to its parent."""
        if not segment.keys:
            segment.unlink()
            self._guests.pop(segment, None)
