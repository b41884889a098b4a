"""Store plans that have not ended, and what has become of each."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from allocator.errors import StalePlanError
from allocator.plans import StorePlan
from allocator.slot_pool import Slots


class PlansInFlight:
    """A plan is *copying*, then perhaps *landed*: its bytes are here, those of an earlier position are not.

    An *orphan* is one that is still copying while its positions are no longer wanted.
    """

    def __init__(self) -> None:
        self._copying: dict[int, StorePlan] = {}
        self._landed: dict[int, StorePlan] = {}
        self._orphans: dict[int, StorePlan] = {}

    def begin(self, plan: StorePlan) -> None:
        """Its bytes are on their way."""
        self._copying[plan.plan_id] = plan

    def land(self, plan: StorePlan) -> None:
        """Its bytes are here."""
        self._landed[plan.plan_id] = self._copying.pop(plan.plan_id)

    def end(self, plan: StorePlan) -> None:
        """Its bytes are here, and nothing is awaited."""
        del self._copying[plan.plan_id]

    def landed(self) -> list[StorePlan]:
        """Plans that wait for an earlier position."""
        return list(self._landed.values())

    def end_landed(self, plan: StorePlan) -> None:
        """All before it is resident, and so is it."""
        del self._landed[plan.plan_id]

    def orphan(self, plan: StorePlan) -> bool:
        """It is no longer wanted. False if that was known.

        Raises:
            StalePlanError: it is not copying.
        """
        if plan.plan_id in self._orphans:
            return False
        if plan.plan_id not in self._copying:
            raise _stale(plan)
        self._orphans[plan.plan_id] = self._copying.pop(plan.plan_id)
        return True

    def orphan_all(self, is_gone: Callable[[StorePlan], bool]) -> list[StorePlan]:
        """Those whose positions are gone are no longer wanted. Returns those that had landed: they end."""
        for plan in [plan for plan in self._copying.values() if is_gone(plan)]:
            self.orphan(plan)
        ended = [plan for plan in self._landed.values() if is_gone(plan)]
        for plan in ended:
            del self._landed[plan.plan_id]
        return ended

    def end_orphan(self, plan: StorePlan) -> bool:
        """It has ended. False if it was still wanted.

        Raises:
            StalePlanError: it had ended before.
        """
        if plan.plan_id in self._copying:
            return False
        if self._orphans.pop(plan.plan_id, None) is None:
            raise _stale(plan)
        return True

    def all(self) -> Iterator[StorePlan]:
        """Those that have not ended."""
        return chain(self._copying.values(), self._landed.values(), self._orphans.values())

    def wanted(self) -> Iterator[StorePlan]:
        """All but orphans."""
        return chain(self._copying.values(), self._landed.values())

    def wanted_slots(self) -> Slots:
        """Slots of all plans but orphans, those of bags too, absent columns left out."""
        return _slots_of(self.wanted())

    def orphaned_slots(self) -> Slots:
        """Slots of orphans, those of bags too, absent columns left out."""
        return _slots_of(self._orphans.values())

    def check_invariants(self) -> None:
        """Each plan is in one state and filed under its id."""
        states = (self._copying, self._landed, self._orphans)
        for plan_id, plan in chain.from_iterable(plans.items() for plans in states):
            assert plan.plan_id == plan_id, f"store plan {plan.plan_id} is filed under {plan_id}"
        plan_ids = list(chain.from_iterable(states))
        assert len(set(plan_ids)) == len(plan_ids), f"store plans {sorted(plan_ids)} are in several states"


def _slots_of(plans: Iterable[StorePlan]) -> Slots:
    return np.concatenate([*(plan.all_slots for plan in plans), np.empty(0, dtype=np.int64)])


def _stale(plan: StorePlan) -> StalePlanError:
    return StalePlanError(f"store plan {plan.plan_id} was ended before, or is not this allocator's")
