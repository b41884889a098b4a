"""Store plans from begin to end: when their positions become resident, and which are no longer wanted."""

from collections.abc import Callable
from itertools import count

import numpy as np

from allocator.events import EventLog
from allocator.in_flight import PlansInFlight
from allocator.node import Node, Pin, Place
from allocator.plans import StorePlan
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.slot_pool import SlotPool, Slots, SlotState, flat


class StorePlans:
    """Ends store plans in any order; positions become resident in that of their chain.

    What is cut off the tree may have plans in flight. They are looked for once for all cuts since the last
    time: ``orphan``.
    """

    def __init__(self, tree: PrefixTree, ranking: Ranking, pool: SlotPool, log: EventLog) -> None:
        """Nothing is in flight."""
        self._log = log
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._plan_ids = count()
        self._has_cut = False
        self.end_claim: Callable[[Pin], None] = lambda claim: None
        """Ends that of a plan; whoever makes plans with claims says how."""
        self.plans = PlansInFlight()
        """Those that have not ended."""

    @property
    def num_claims(self) -> int:
        """Of plans that have not ended. O(these)."""
        return sum(plan.claim is not None for plan in self.plans.all())

    def begin(
        self,
        start: int,
        hashes: list[bytes],
        slots: Slots,
        lead: list[bytes],
        bag: Slots | None = None,
        note: object = None,
        claim: Pin | None = None,
    ) -> StorePlan:
        """A plan for positions from ``start`` on, filling in the tree. ``lead``: of ``PrefixTree``.

        ``bag``: of a checkpoint after them, filling in the tree too; ``note``, ``claim``: of ``StorePlan``.
        """
        plan = StorePlan(next(self._plan_ids), start, hashes, slots, lead, bag, note, claim)
        self.plans.begin(plan)
        return plan

    def commit(self, plan: StorePlan) -> list[StorePlan] | None:
        """The bytes of ``plan`` are here. Returns the plans whose positions are resident now.

        None if nobody wants these bytes: the positions of ``plan`` have left the tree.

        Raises:
            StalePlanError: the plan was ended before.
        """
        if self._is_gone(plan):
            self.plans.orphan(plan)
        if self.end_orphan(plan):
            return None
        if plan.claim is not None:
            return self._fill(plan, plan.claim)
        self.plans.land(plan)
        settled = [plan] if self._settle(plan) else []
        while settled and (more := [landed for landed in self.plans.landed() if self._settle(landed)]):
            settled += more  # one that settled may be what another waited for
        self._log.settled(settled)
        return settled

    def abandon(self, plan: StorePlan) -> Node | None:
        """The bytes of ``plan`` will not come, but may still be written until ``end_orphan``.

        Returns where its positions begin, for these to be cut off; None if that is done.

        Raises:
            StalePlanError: the plan was ended before.
        """
        if not self.plans.orphan(plan) or plan.claim is not None:
            return None
        node = self._node_of(plan)
        assert node or self._has_cut, f"store plan {plan.plan_id} is in flight but not in the tree"
        return node

    def end_orphan(self, plan: StorePlan) -> bool:
        """Free the slots of an orphaned plan. False if the plan is still wanted."""
        if is_orphan := self.plans.end_orphan(plan):
            self._pool.move(plan.all_slots, SlotState.FILLING, SlotState.FREE)
            if plan.claim is not None:
                self.end_claim(plan.claim)
        return is_orphan

    def note_cut(self) -> None:
        """Positions were cut off the tree."""
        self._has_cut = True

    def orphan(self) -> None:
        """Plans whose positions left the tree: free what has landed, remember what is still coming.

        Once for all that was cut off since it was asked last. O(plans), if that is not nothing.
        """
        if not self._has_cut:
            return
        self._has_cut = False
        for plan in self.plans.orphan_all(lambda plan: self._node_of(plan) is None):
            self._pool.move(plan.all_slots, SlotState.FILLING, SlotState.FREE)

    def check_invariants(self) -> None:
        """Each plan is in one state, and what is wanted is in the tree."""
        self.plans.check_invariants()
        lost = [plan.plan_id for plan in self.plans.wanted() if self._node_of(plan) is None]
        assert not lost or self._has_cut, f"store plans {lost} are in flight but not in the tree"

    # Private

    def _node_of(self, plan: StorePlan) -> Node | None:
        """Where positions of a plan are, or its checkpoint hangs; None once they have left the tree."""
        position = plan.start if plan.hashes else plan.start - 1
        if plan.claim is not None:
            position = plan.stop - 1  # a cut may be anywhere before it
        return self._tree.node_at(plan.hashes, plan.start, position, plan.lead)

    def _is_gone(self, plan: StorePlan) -> bool:
        """Whether its positions have left the tree since plans were last asked. Asks no other plan."""
        return self._has_cut and self._node_of(plan) is None

    def _fill(self, plan: StorePlan, claim: Pin) -> list[StorePlan] | None:
        """Positions of a plan have their slots, those that are still hollow. None if none of them is."""
        self.plans.end(plan)
        node = self._node_of(plan)
        assert node is not None, f"store plan {plan.plan_id} fills what is not in the tree"
        place, slots = Place(node, plan.stop), flat(plan.slots)
        is_hollow = self._tree.slots_of(place, plan.start)[:, 0] < 0
        self._tree.set_slots(place, plan.start + np.flatnonzero(is_hollow), slots[is_hollow])
        self._pool.move(slots[is_hollow], SlotState.FILLING, SlotState.RESIDENT)
        self._pool.move(slots[~is_hollow], SlotState.FILLING, SlotState.FREE)
        self._log.filled(plan, is_hollow)
        self.end_claim(claim)  # what it has kept may leave with it
        return [plan] if is_hollow.any() else None

    def _settle(self, plan: StorePlan) -> bool:
        """Make a landed plan resident, if what is before it is, and if it is wanted still."""
        if self._is_gone(plan):
            return False
        stop = plan.stop
        last = self._tree.node_at(plan.hashes, plan.start, stop - 1, plan.lead)
        assert last is not None, f"store plan {plan.plan_id} has landed but is not in the tree"
        if not self._tree.settle(last, plan.start, stop):
            return False
        self.plans.end_landed(plan)
        self._pool.move(flat(plan.slots), SlotState.FILLING, SlotState.RESIDENT)
        if plan.bag is not None:
            self._tree.checkpoints.complete(last, stop)
            self._pool.move(plan.bag, SlotState.FILLING, SlotState.BAGGED)
        self._ranking.refresh(last)
        return True
