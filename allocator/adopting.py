"""A fresh pool whose slots hold something already: what a store does from its plan to its end, at once."""

from collections.abc import Sequence

from allocator.events import EventLog
from allocator.node import Node, Place
from allocator.plans import StorePlan
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.slot_pool import SlotPool, Slots, SlotState, flat
from evictor import EvictionPolicy

_NO_ID = -1
"""Of what has no plan in flight."""


class Adopting:
    """Hangs resident positions into the tree. It has no state of its own."""

    def __init__(
        self,
        tree: PrefixTree,
        ranking: Ranking,
        pool: SlotPool,
        policy: EvictionPolicy[Node],
        log: EventLog,
    ) -> None:
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._policy = policy
        self._log = log

    def adopt(self, chain: Sequence[bytes], note: object = None) -> Slots:
        """The unknown positions of ``chain`` are in the slots that are handed out next, which it returns.

        As ``plan_store`` of all of it and ``commit``, in half the time, where there is room, no checkpoint
        and nothing in flight. O(log n), plus O(1) array work per position. ``note``: of ``StorePlan``.
        """
        assert not self._tree.has_checkpoints, "of models with checkpoints"
        place = self._tree.find(chain, len(chain))
        start = place.depth
        hashes = list(chain[start:])
        slots = self._pool.take(len(hashes) * self._tree.columns).reshape(len(hashes), self._tree.columns)
        if not hashes:
            return slots
        node = self._ranking.node_ending_at(place)
        self._policy.leave(node)
        admission = self._ranking.heed(node, None, slots.size)
        data = self._tree.packed(hashes)
        node = self._ranking.append(Place(node, start), hashes, data, slots, None, admission)
        self._tree.settle(node, start, len(chain))
        self._pool.move(flat(slots), SlotState.FILLING, SlotState.RESIDENT)
        self._ranking.refresh(node)
        if self._log.is_on:
            lead = self._tree.lead(chain, start)
            self._log.settled([StorePlan(_NO_ID, start, hashes, slots, lead, note=note)])
        return slots
