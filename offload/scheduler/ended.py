"""The queue of requests that are over: stores of what they have left, a few in each step."""

from collections.abc import Callable
from typing import Any

from allocator import StorePlan
from offload.messages import Order
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.holds import Holds
from offload.scheduler.later import Later

_AT_ONCE = 16
"""Stores that begin from one step to the next."""


class Ended:
    """Begins the stores of the backlog's queue, from its beginning on."""

    def __init__(
        self,
        common: Common,
        backlog: Backlog,
        holds: Holds,
        breaker: CircuitBreaker,
        later: Later | None,
        begin: Callable[[Pending, StorePlan, list[Any]], Order],
    ) -> None:
        """``later`` makes room in the pool, if blocks are stored late.

        ``begin`` copies blocks, which are held for it, into the slots of a plan.
        """
        self._common = common
        self._allocator = common.allocator
        self._backlog = backlog
        self._holds = holds
        self._breaker = breaker
        self._later = later
        self._begin = begin
        self._num_left = _AT_ONCE

    def begin_step(self) -> None:
        """As many may begin again."""
        self._num_left = _AT_ONCE

    def store(self) -> list[Order]:
        """Store what is first in the queue, as much as may be held now."""
        orders: list[Order] = []
        if not self._backlog.num_queued:
            return orders
        if self._backlog.is_overdue:
            self._holds.give_up("overdue")
        while self._num_left and self._holds.leave_room and self._breaker.allows:
            pending = self._backlog.first
            if pending is None:
                break
            self._num_left -= 1
            orders += self._open(pending)
        if self._breaker.is_outage:
            self._holds.give_up("outage")
        return orders

    def check_invariants(self) -> None:
        """No more of them begin in a step than may, and those that are late are known."""
        if self._later is not None:
            self._later.check_invariants()
        assert 0 <= self._num_left <= _AT_ONCE, f"{self._num_left} may begin"

    # Private

    def _open(self, pending: Pending) -> list[Order]:
        """Store the leading blocks of the first in the queue, and give up what has become worthless."""
        stop = pending.stop
        known = self._allocator.known_depth(pending.chain, stop)
        if self._common.is_gapped and known >= pending.start:
            return self._open_lacking(pending, known)
        if known < pending.start:  # what is before it has left the pool
            self._drop_first(stop - pending.start, "cut_off")
            return []
        if known > pending.start:  # another request has stored it
            self._drop_first(known - pending.start, None)
        limit = self._holds.limit(self._breaker) // self._common.engine.groups.columns
        if self._later is not None:
            self._later.make_room(pending, known, min(stop - known, limit))
        note = self._common.note_of(pending.request)
        plan = self._allocator.plan_store(pending.chain, stop, limit, pending.keep, note=note)
        num_planned = len(plan.hashes) if plan is not None else 0
        orders = [] if plan is None else [self._begin(pending, plan, self._backlog.take(num_planned))]
        if known + num_planned < stop and num_planned < limit:
            self._drop_first(stop - pending.start, "not_admitted")
        return orders

    def _open_lacking(self, pending: Pending, known: int) -> list[Order]:
        """Store what has no slot of the first in the queue. ``known``: depth of its chain, slots or not."""
        stop = pending.stop
        lacking = self._allocator.hollow.first_lacking(pending.chain, pending.start, stop)
        start = lacking.start
        if start > pending.start:
            self._drop_first(start - pending.start, None)
        if not lacking:
            return []
        num_wanted = min(self._holds.limit(self._breaker), len(lacking))
        if self._later is not None:
            self._later.make_room(pending, start, num_wanted)
            known = self._allocator.known_depth(pending.chain, stop)  # what the GPU has lost may have gone
        if known < start:
            self._drop_first(stop - start, "cut_off")
            return []
        note = self._common.note_of(pending.request)
        if known > start:
            num_wanted = min(num_wanted, known - start)
            plan = self._allocator.hollow.plan(pending.chain, start, min(stop, known), num_wanted, note)
        else:
            plan = self._allocator.plan_store(pending.chain, stop, num_wanted, pending.keep, note=note)
        num_planned = len(plan.hashes) if plan is not None else 0
        orders = [] if plan is None else [self._begin(pending, plan, self._backlog.take(num_planned))]
        if num_planned < num_wanted:
            self._drop_first(stop - start - num_planned, "not_admitted")
        return orders

    def _drop_first(self, num_positions: int, why: str | None) -> None:
        """Release positions of the first in the queue; nothing is lost if there is no reason ``why``."""
        first = self._backlog.first
        is_late = first is not None and first.is_late
        self._holds.release(self._backlog.take(num_positions, why)[::-1], why, is_late=is_late)
