"""Positions whose KV only the GPU has: they are in the tree, and have no slot."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from allocator.departures import Cause
from allocator.errors import StalePlanError
from allocator.events import EventLog
from allocator.node import NO_PINS, Claim, Node, Pin, Place
from allocator.planning import Planning
from allocator.plans import Note, StorePlan
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.room import Room
from allocator.slot_pool import SlotPool, Slots, SlotState, flat
from allocator.store_plans import StorePlans
from evictor import EvictionPolicy, KeepHints

HOLLOW = -1
"""The slot of a position without one."""

_LOOKED_AT = 16
"""Segments behind a position that are looked at."""


class Hollow:
    """Which positions the GPU has, and stores of those that have no slot.

    So the tree is that of both, the GPU's cache and the pool, and the policy ranks what is in either. A
    position is claimed while the GPU has it. Claimed ones may be hollow, and may become hollow again. A
    hollow one that nobody claims any more leaves, with all behind it: nobody could go on there.

    For models with one column and without checkpoints. Without claims it costs nothing.
    """

    def __init__(
        self,
        tree: PrefixTree,
        ranking: Ranking,
        pool: SlotPool,
        policy: EvictionPolicy[Node],
        room: Room,
        stores: StorePlans,
        planning: Planning,
        pins: Iterable[Pin],
        log: EventLog,
        cut: Callable[[Place], None],
    ) -> None:
        """Nothing is claimed. ``pins``: of loads in flight; ``cut``: ends what is after a place."""
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._policy = policy
        self._room = room
        self._stores = stores
        self._planning = planning
        self._pins = pins
        self._log = log
        self._cut = cut
        self._claims: set[Pin] = set()
        stores.end_claim = self.end

    def __len__(self) -> int:
        """Claims that have not ended, but for those of stores. O(stores in flight)."""
        return len(self._claims) - self._stores.num_claims

    def claim(self, chain: Sequence[bytes], stop: int, hints: KeepHints | None = None) -> Claim | None:
        """The GPU has the first ``stop`` positions of ``chain``: they stay in the tree until ``end``.

        Unknown ones become hollow, unless something before them is filling: then they are not claimed. None
        if nothing is. O(log n), and O(1) array work per new position.
        """
        self._tree.is_gapped = True
        self._stores.orphan()  # or what was cut off would be known anew, and take what is on its way
        place = self._tree.find(chain, stop)
        if place.depth < stop and self._tree.resident_part(place).depth == place.depth:
            place = self._append(place, chain, stop, hints)
        if not place.depth:
            return None
        node = self._ranking.node_ending_at(place)
        claim = Claim(node, np.empty((0, self._tree.columns), dtype=np.int64))
        self._claims.add(claim)
        self._ranking.claimed.add(node)
        self._policy.leave(node)
        return claim

    def heed(self, claim: Pin, hints: KeepHints) -> None:
        """A request used what is claimed, with these hints. It may have come before it was known."""
        if claim.node is not None:
            self._ranking.heed(claim.node, hints, 0)

    def end(self, claim: Pin) -> None:
        """The GPU may lose what it was for. O(log n), O(segments) and O(1) array work per position.

        Raises:
            StalePlanError: it was ended before.
        """
        if claim not in self._claims:
            raise StalePlanError("this claim was ended before, or belongs to another allocator")
        self._claims.remove(claim)
        node = claim.node
        if node is None:
            return
        self._ranking.claimed.remove(node)
        node.pins = node.pins - {claim} or NO_PINS
        self._ranking.refresh(node)
        for each in self._tree.path(node) if self._tree.has_dead else ():
            if each.is_dead and each.parent is not None:
                node = each.parent  # what was not cut off is claimed no more, either
        if not self._tree.is_dead(node):
            self._cut_hollow(node)

    def depth(self, chain: Sequence[bytes]) -> int:
        """How many leading positions of ``chain`` the pool has, or else the GPU, as claimed. O(log n)."""
        return self._tree.resident_part(self._tree.find(chain, len(chain))).depth

    def lacking(self, chain: Sequence[bytes], start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of positions ``start <= p < stop`` have no slot, known or not. O(1) array work for each."""
        place = self._tree.find(chain, stop)
        lacks = np.ones(stop - start, dtype=np.bool_)
        if place.depth > start:
            has_gaps = self._tree.is_gapped
            lacks[: place.depth - start] = has_gaps and self._tree.slots_of(place, start)[:, 0] < 0
        return lacks

    def has_slots(self, claim: Pin) -> bool:
        """Whether anything of what is claimed has a slot. O(segments), and array work for these."""
        path = () if claim.node is None else self._tree.path(claim.node)
        return any((node.slots[:, 0] >= 0).any() for node in path)

    def first_lacking(self, chain: Sequence[bytes], start: int, stop: int) -> range:
        """The first stretch of these positions without slots, known or not; empty, at ``stop``: none."""
        edges = np.flatnonzero(np.diff(self.lacking(chain, start, stop), prepend=False, append=False))
        return range(start + int(edges[0]), start + int(edges[1])) if len(edges) else range(stop, stop)

    def paying(self, chain: Sequence[bytes], start: int, stop: int) -> int:
        """Up to where slots pay for positions ``start <= p < stop`` of ``chain``; ``start``: for none.

        They do for all where as many are free; otherwise up to the last one of which the policy says so.
        O(log n) and O(segments).
        """
        place = self._tree.find(chain, stop)
        if place.depth < stop or self._pool.num_free >= stop - start:
            return stop
        for node in self._tree.path(place.node):
            if node.end <= start:
                break
            if self._policy.earns_copy(node):
                return min(node.end, stop)
        return start

    def earns_emptying(self, claim: Pin, num_asked: int) -> bool:
        """Whether slots of what is claimed earn more elsewhere while the GPU has it; see ``earns_room``.

        Its last segment decides for all of it.
        """
        return claim.node is not None and self._policy.earns_room(claim.node, num_asked)

    def leads_on(self, chain: Sequence[bytes], stop: int) -> bool:
        """Whether there are slots behind the first ``stop`` positions of ``chain``, or may be.

        No more than a few segments are looked at.
        """
        place = self._tree.find(chain, stop)
        if place.depth < stop:
            return False
        ahead = [(place.node, stop - place.node.start)]
        for _ in range(_LOOKED_AT):
            if not ahead:
                return False
            node, start = ahead.pop()
            if node.is_dead:  # looked at like others, or those behind it would count as without slots
                continue
            if (node.slots[start:, 0] >= 0).any():
                return True
            ahead += [(child, 0) for child in islice(self._tree.children(node), _LOOKED_AT)]
        return bool(ahead)

    def plan(
        self,
        chain: Sequence[bytes],
        start: int,
        stop: int,
        limit: int,
        note: Note | None = None,
    ) -> StorePlan | None:
        """Give slots to hollow positions of ``chain[start:stop]``, ``limit`` at most; the first is hollow.

        What is worth least leaves for them, of all that nobody claims. None if that is they themselves. Ends
        as other store plans. Claimed until then.
        """
        place = self._tree.find(chain, stop)
        hollow = self.first_lacking(chain, start, max(start, place.depth))
        num_wanted = min(len(hollow), limit)
        if num_wanted <= 0:
            return None
        is_tail = hollow.stop == place.depth == place.node.end and not place.node.child
        num_stored = self._planning.room_for(num_wanted, place.node, is_tail=is_tail)
        if not num_stored:
            return None
        told = None if note is None else note(start, start + num_stored)
        hashes = list(chain[start : start + num_stored])
        slots = self._pool.take(num_stored).reshape(num_stored, 1)
        claim = self.claim(chain, start + num_stored)
        lead = self._tree.lead(chain, start)
        return self._stores.begin(start, hashes, slots, lead, None, told, claim)

    def empty(self, chain: Sequence[bytes], start: int, stop: int, most: int) -> int:
        """The first claimed positions of ``chain[start:stop]``, ``most`` at most, become hollow.

        Those that loads read stay as they are. So do those that nobody claims: what was claimed may have been
        cut off, and be known anew. Returns how many slots are free by that.
        """
        place = self._tree.resident_part(self._tree.find(chain, stop))
        while place.depth > start and place.node not in self._ranking.claimed:
            place = Place(place.node.parent or self._tree.root, place.node.start)
        if place.depth <= start:
            return 0
        slots = self._tree.slots_of(place, start)[:, 0]
        at = np.flatnonzero(self._may_go(slots))[:most]
        self._tree.set_slots(place, start + at, np.full(len(at), HOLLOW, dtype=np.int64))
        self._emptied(slots[at], (chain[start + index] for index in at.tolist()))
        return len(at)

    def empty_node(self, node: Node, is_meant: npt.NDArray[np.bool_]) -> None:
        """Resident positions of a claimed node, those that are meant, become hollow if no load reads them."""
        rows = node.slots[: node.resident, 0]
        at = np.flatnonzero(is_meant & self._may_go(rows))
        gone = rows[at].copy()
        rows[at] = HOLLOW
        self._emptied(gone, map(node.hash_at, at.tolist()))

    def check_invariants(self) -> None:
        """Claims hang where they say, what is hollow is claimed."""
        nodes = [*self._tree.nodes(), *self._tree.dead_nodes()]
        hanging = {pin for node in nodes for pin in node.pins if isinstance(pin, Claim)}
        known = {claim for claim in self._claims if claim.node is not None}
        assert hanging == known, f"{len(hanging)} claims hang in the tree, {len(known)} are known"
        self._ranking.claimed.check_invariants(nodes, hanging)
        for node in self._tree.nodes() if self._tree.columns == 1 else ():
            if (node.slots < 0).any():
                assert node in self._ranking.claimed, f"{node!r} is hollow, and nobody claims it"
                assert (node.slots[node.resident :] >= 0).all(), f"{node!r} is hollow where it is filling"

    # Private

    def _append(self, place: Place, chain: Sequence[bytes], stop: int, hints: KeepHints | None) -> Place:
        """Hollow positions up to ``stop`` behind ``place``, where what is known of ``chain`` ends."""
        node, start = self._ranking.node_ending_at(place), place.depth
        self._policy.leave(node)
        hashes = list(chain[start:stop])
        data = self._tree.packed(hashes)
        admission = self._ranking.heed(node, hints, len(hashes))
        slots = np.full((len(hashes), 1), HOLLOW, dtype=np.int64)
        next_hash = chain[stop] if stop < len(chain) else None
        node = self._ranking.append(Place(node, start), hashes, data, slots, next_hash, admission)
        self._tree.settle(node, start, stop)
        return Place(node, stop)

    def _emptied(self, slots: Slots, hashes: Iterable[bytes]) -> None:
        """Positions with these hashes had these slots, and have none now."""
        self._log.emptied(list(hashes) if self._log.is_on else [])
        self._pool.move(slots, SlotState.RESIDENT, SlotState.FREE)

    def _may_go(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these slots there are, and no load reads."""
        read = [flat(pin.slots) for pin in self._pins]
        may_go: npt.NDArray[np.bool_] = slots >= 0
        return may_go & ~np.isin(slots, np.concatenate(read)) if read else may_go

    def _cut_hollow(self, node: Node) -> None:
        """What is hollow up to the end of ``node``, and not claimed, leaves with all behind it."""
        unclaimed = []
        while node.parent is not None and node not in self._ranking.claimed:
            unclaimed.append(node)
            node = node.parent
        for each in reversed(unclaimed):
            is_hollow = each.slots[:, 0] < 0
            if is_hollow.any():
                self._evict(unclaimed, each, each.start + int(is_hollow.argmax()))
                return

    def _evict(self, path: Sequence[Node], first: Node, position: int) -> None:
        """Nodes of ``path``, upwards, go up to that position in ``first``; cut off if others go on there."""
        for node in path:
            if not node.is_evictable:
                left = first.hash_at(position - first.start)
                self._room.departures.note(left, Cause.UNSTORED)
                self._cut(Place(first, position))
                return
            self._room.shed(node, node.end - max(position, node.start))
            if node is first:
                return
