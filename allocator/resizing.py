"""Takes slots out of the pool while it is in use, and gives them back to it."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from allocator.bags import BagState
from allocator.departures import Cause
from allocator.node import Node, Place
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.room import Room
from allocator.slot_pool import SlotPool, Slots, SlotState
from evictor import EvictionPolicy, HintedPolicy

_LOOK_POSITIONS = 1 << 16  # that one call of ``empty`` looks at, and what is left of a segment


class Resizing:
    """Closes slots, empties them and opens them again; see ``SlotPool``.

    What jobs read or write is not touched. Its slots are withdrawn when those have ended. What is leased, or
    pinned by a hint, stays where it is until that is over.
    """

    def __init__(
        self,
        tree: PrefixTree,
        ranking: Ranking,
        pool: SlotPool,
        policy: EvictionPolicy[Node],
        room: Room,
        cut: Callable[[Place], None],
        empty: Callable[[Node, npt.NDArray[np.bool_]], None],
    ) -> None:
        """``cut``: ends what is after a place; ``empty``: of ``Hollow.empty_node``."""
        self._tree = tree
        self._covered = ranking.covered
        self._claimed = ranking.claimed
        self._empty_claimed = empty
        self._pool = pool
        self._policy = policy
        self._room = room
        self._cut = cut
        self._next_id = 0  # of nodes, of those that ``empty`` is yet to look at

    @property
    def num_withdrawn(self) -> int:
        """Slots that are no part of the pool."""
        return self._pool.num_in(SlotState.WITHDRAWN)

    @property
    def num_closed(self) -> int:
        """Slots that are withdrawn, or will be."""
        return self._pool.capacity - self._pool.num_open

    @property
    def num_used(self) -> int:
        """Slots that are neither free nor withdrawn."""
        return self._pool.capacity - self._pool.num_free - self.num_withdrawn

    @property
    def num_ids(self) -> int:
        """Of segments: as many looks, in ``empty``, go round once."""
        return self._tree.num_ids

    @property
    def num_pinned(self) -> int:
        """Slots of what hints have pinned: nothing gives them up before that is over.

        Where positions may be hollow, it is O(segments with such hints), and O(1) array work per position.
        """
        if not isinstance(self._policy, HintedPolicy):
            return 0
        num_pinned = self._policy.num_pinned
        if not num_pinned or not self._tree.is_gapped:
            return num_pinned
        return num_pinned - sum(int(np.count_nonzero(node.slots < 0)) for node in self._policy.pinned())

    def num_used_in(self, starts: Slots) -> Slots:
        """As ``num_used``, between each of ``starts`` and the next one. O(pool) array work."""
        return self._pool.num_used(starts)

    def free(self, num_slots: int) -> Slots:
        """So many slots that are free, or all of them: those that would be handed out last. O(slots)."""
        return self._pool.last_free(num_slots)

    def evict(self, num_slots: int, num_bites: int | None = None) -> int:
        """Evict until ``num_slots`` more are free, in so many bites at most. Returns how many became free.

        See ``CpuOffloadingBlockAllocator.evict``. A bite is O(log n), and array work.
        """
        with self._room.departures.shrinking():
            return self._room.evict(num_slots, num_bites)

    def protect(self, num_slots: int) -> None:
        """Hints may protect so many slots from now on. What is pinned beyond that stays until it is over."""
        if isinstance(self._policy, HintedPolicy):
            self._policy.allow(num_slots)

    def close(self, slots: Slots) -> None:
        """``slots``, all different, are no part of the pool any more as soon as they are free."""
        self._pool.close(slots)
        self._room.resized()

    def open(self, slots: Slots) -> None:
        """``slots``, all different and closed, are of the pool again."""
        self._pool.open(slots)
        self._room.resized()

    def empty(self, num_nodes: int) -> bool:
        """What is resident in closed slots leaves the pool, with all that follows it.

        Looks at so many segments, or fewer long ones, and goes on from there the next time. Returns whether
        all closed slots are withdrawn. Array work is O(1) for each position looked at.
        """
        num_positions = 0
        for _ in range(min(num_nodes, self._tree.num_ids)):
            if self.num_withdrawn == self.num_closed or num_positions > _LOOK_POSITIONS:
                break
            self._next_id = (self._next_id + 1) % self._tree.num_ids
            node = self._tree.by_id(self._next_id)
            if node is not None and node.parent is not None and not self._tree.is_dead(node):
                num_positions += node.resident
                with self._room.departures.shrinking():
                    self._empty(node)
        return self.num_withdrawn == self.num_closed

    def check_invariants(self) -> None:
        """It goes on at a node that there may be."""
        assert 0 <= self._next_id < max(1, self._tree.num_ids), f"node {self._next_id}"

    def _empty(self, node: Node) -> None:
        if node in self._covered or (isinstance(self._policy, HintedPolicy) and self._policy.pins(node)):
            return
        rows = node.slots[: node.resident]
        is_closed: npt.NDArray[np.bool_] = np.any(self._pool.is_closed(rows) & (rows >= 0), axis=1)
        if is_closed.any():
            if node in self._claimed:
                self._empty_claimed(node, is_closed)
                return
            position = node.start + int(np.argmax(is_closed))
            self._room.departures.note(node.hash_at(position - node.start), Cause.EVICTED)
            self._cut(Place(node, position))
            return
        for checkpoint in list(node.bags or ()):
            if checkpoint.state is BagState.COMPLETE and self._pool.is_closed(checkpoint.slots).any():
                self._room.remove_bag(node, checkpoint.depth, BagState.COMPLETE)
