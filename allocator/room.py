"""Room in the pool: what leaves it, in which order, and where its slots go."""

from collections.abc import Sequence

from allocator.bags import BagState, Checkpoint
from allocator.departures import Cause, Departures
from allocator.events import EventLog
from allocator.giving_back import give_back, give_back_bag
from allocator.node import Node, Place, Removed
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.slot_pool import SlotPool, SlotState, flat
from evictor import Admission, EvictionPolicy, Newcomer

_SLACK = 1024
_HOLLOW_WORK = 1 << 12
"""Positions that are taken away beside those that are needed, where some have no slot to give."""


class Room:
    """Evicts until there is room, and gives back the slots of what left the tree.

    First goes what was cut off. Then go bags of inner checkpoints, as long as bags have more than half of the
    pool; in pools of bags alone, all of them. Then go tails of leaves, as the policy says.
    """

    def __init__(
        self,
        tree: PrefixTree,
        ranking: Ranking,
        pool: SlotPool,
        policy: EvictionPolicy[Node],
        log: EventLog,
        admits_all: bool,
    ) -> None:
        self._admits_all = admits_all
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._policy = policy
        self._log = log
        self.departures = Departures()
        self.slack = 0
        """Positions that a bite may take beyond what is needed, 1/1024 of the pool."""
        self.resized()
        self.num_evicted = 0
        """Positions evicted for new ones, ever."""
        self.num_thinned = 0
        """Bags of inner checkpoints evicted, ever."""

    def resized(self) -> None:
        """The pool has been given another number of slots."""
        self.slack = self._pool.num_open // max(self._tree.columns, 1) // _SLACK

    def may_be_made(self, num_slots: int, place: Place) -> bool:
        """Whether anything is free, or could be, if its worth did not matter.

        With checkpoints: whether so many slots fit the pool beside what leads to ``place`` and what is on its
        way in or out. To evict for what does not fit would be in vain.
        """
        tree, pool = self._tree, self._pool
        if tree.has_checkpoints:
            in_use = pool.num_in(SlotState.FILLING) + pool.num_in(SlotState.LEAVING)
            in_use += tree.resident_part(place).depth * tree.columns
            return num_slots + in_use <= pool.num_open
        return bool(pool.num_free or tree.has_dead) or self._policy.choose() is not None

    def admit(
        self,
        parent: Node,
        hashes: Sequence[bytes],
        num_bag: int,
        admission: Admission[Node],
        *,
        must: bool = False,
    ) -> int | None:
        """Evict for ``hashes`` below ``parent``, and a bag after them, as far as that pays, or they ``must``.

        Returns how many of them then fit, None if that is not enough. With checkpoints it takes all of them.
        """
        if not hashes:
            self.make(num_bag, None, admission, parent)
        for start, stop in self._ranking.stretches(hashes):
            of_bag = num_bag if stop == len(hashes) else 0
            if self._pool.num_free < stop * self._tree.columns + of_bag:
                weight = (stop - start) * self._tree.columns + of_bag
                newcomer = Newcomer(parent, hashes[start], stop - start, weight)
                asks = None if self._admits_all or must else newcomer
                self.make(stop * self._tree.columns + of_bag, asks, admission, parent)
                if self._pool.num_free < stop * self._tree.columns + of_bag:
                    break
        needed = len(hashes) * self._tree.columns + num_bag
        if self._tree.has_checkpoints:
            return len(hashes) if self._pool.num_free >= needed else None
        return min(len(hashes), self._pool.num_free // self._tree.columns) or None

    def make(
        self,
        num_slots: int,
        newcomer: Newcomer[Node] | None,
        admission: Admission[Node],
        growing: Node | None = None,
        most_bites: int | None = None,
    ) -> None:
        """Evict from the tails of leaves until ``num_slots`` are free or the policy would rather not.

        The last of them may lose a little more than that, ``slack``. A bite costs the same whatever its size,
        and the leaf that loses its tail is likely to be next, too. ``growing``: of ``Ranking.take_away``.
        ``most_bites``: stop after so many, whatever is free then.
        """
        num_bites = 0
        while (shortage := num_slots - self._pool.num_free) > 0 and num_bites != most_bites:
            num_bites += 1
            if self._tree.has_dead:
                num_hollow = _HOLLOW_WORK if self._tree.is_gapped else 0
                self.take_away(-(-shortage // max(self._tree.columns, 1)) + num_hollow, growing)
            elif not (
                self._thin_if_many()
                or self._evict(shortage, newcomer, admission, growing)
                or (admission.choose() is None and self._thin())
            ):
                return

    def evict(self, num_slots: int, most_bites: int | None = None) -> int:
        """Have ``num_slots`` more free, for nobody, as ``make`` does; return how many became free."""
        before = self._pool.num_free
        self.make(before + num_slots, None, self._policy, most_bites=most_bites)
        return self._pool.num_free - before

    def shed(self, leaf: Node, num_positions: int) -> None:
        """The last so many positions of an evictable leaf go, whatever they are worth."""
        self._give(self._ranking.shed(leaf, num_positions), Cause.EVICTED)

    def take_away(self, work: int, growing: Node | None = None) -> int:
        """Give back slots of what was cut off; return how much of ``work`` is left."""
        removed, work = self._ranking.take_away(work, growing)
        give_back(self._pool, removed)
        if self._ranking.loose:
            self.trim_loose(growing)
        return work

    def trim_loose(self, growing: Node | None = None, cause: Cause = Cause.DROPPED) -> None:
        """What is behind the last checkpoint of a leaf goes, where nobody goes on; after what was cut off.

        ``cause``: why what was behind it has left.
        """
        while not self._tree.has_dead and (removed := self._ranking.trim_loose(growing)) is not None:
            self._give(removed, cause)

    def remove_bag(self, node: Node, depth: int, state: BagState) -> None:
        """The bag at ``depth`` leaves the pool, if it is in that state."""
        checkpoint = None if node.bags is None else node.bags.at(depth)
        if checkpoint is not None and checkpoint.state is state:
            self._give_bag(checkpoint)
            self._ranking.refresh(node)
            self.trim_loose()

    # Private

    def _evict(
        self,
        num_slots: int,
        newcomer: Newcomer[Node] | None,
        admission: Admission[Node],
        growing: Node | None,
    ) -> bool:
        removed = self._ranking.evict(num_slots, self.slack, newcomer, admission, growing)
        if removed is None:
            return False
        self._give(removed, Cause.EVICTED)
        if self._ranking.loose:
            self.trim_loose(growing, Cause.EVICTED)
        return True

    def _give(self, removed: Removed, cause: Cause) -> None:
        self._log.evicted(removed)
        if len(removed.slots):
            is_hollow = self._tree.is_gapped and int(removed.slots[0, 0]) < 0
            self.departures.note(removed.hashes[0], Cause.UNSTORED if is_hollow else cause)
        slots = flat(removed.slots)
        self.num_evicted += len(slots) if self._tree.is_gapped else len(removed.slots)
        self._pool.move(slots, SlotState.RESIDENT, SlotState.FREE)
        for checkpoint in removed.bags or ():
            give_back_bag(self._pool, checkpoint)

    def _thin_if_many(self) -> bool:
        most = self._pool.num_open // 2 if self._tree.columns else 0
        return self._pool.num_in(SlotState.BAGGED) > most and self._thin()

    def _thin(self) -> bool:
        """Evict the bag of the inner checkpoint unused for longest. False if there is none."""
        checkpoint = self._tree.checkpoints.oldest()
        if checkpoint is None:
            return False
        self._give_bag(checkpoint)
        self.num_thinned += 1
        return True

    def _give_bag(self, checkpoint: Checkpoint) -> None:
        node = self._ranking.remove_bag(checkpoint)
        self._log.bag_removed(node, checkpoint)
        give_back_bag(self._pool, checkpoint, node.pins)
