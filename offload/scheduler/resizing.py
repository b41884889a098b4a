"""The pool is given more memory, or less, while the engine runs."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from allocator import CpuOffloadingBlockAllocator
from offload.messages import Ids, Resize, Resized
from offload.scheduler.pool_target import PoolBounds, PoolTarget

logger = logging.getLogger(__name__)

_STEP_SLOTS = 4096  # that are evicted, closed, or asked for in a step
_STEP_BITES = 128  # in which they are evicted, at most
_STEP_NODES = 128  # segments that are looked at in a step
_LOOK_STEPS = 16  # from one look at closed units to the next, once all segments were looked at
_TELL_SECONDS = 0.1  # from one time that steps say how much is pinned to the next
_LATE_SECONDS = 60.0  # without a word of ranks that take memory, or give it back
_PATIENCE_SECONDS = 5.0  # in which room is made for large units, before what is in them goes


class _Unit(IntEnum):
    """What a unit of the pool's memory is."""

    OPEN = 0
    """Of the pool."""
    CLOSED = 1
    """Not of the pool any more, but jobs or KV are in it."""
    OUT = 2
    """Without memory, or about to be."""
    COMING = 3
    """Its memory is being taken."""


@dataclass(slots=True)
class _UnderWay:
    """A ``Resize`` that ranks carry out."""

    units: Ids
    takes: bool
    num_left: int
    error: str = ""


class PoolResizing:
    """Makes the pool as large as its target says, a bounded part of the way in each step.

    To shrink, what is worth least is evicted. A unit of one slot is closed once it is free, so nothing else
    leaves. Of larger ones those that are empty are closed at once. Where these are too few, enough slots
    are made free first; then one that is not whole is closed, and those with the fewest slots in use. What
    is left in them leaves with all that follows it, but for what is pinned: that is waited for. When a unit
    is empty on the scheduler's side no job has it on any rank, since jobs end on all of them. Then ranks
    give its memory back. To grow, ranks take memory, one piece after the other. Its slots are opened when
    all of them have it.
    """

    def __init__(
        self,
        allocator: CpuOffloadingBlockAllocator,
        target: PoolTarget,
        bounds: PoolBounds,
        num_ranks: int,
        resized: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """The pool has the first slots of ``allocator``, as many as ``bounds`` says.

        ``resized``: called when it has another size, and does not go on from there at once. ``clock`` in
        seconds.
        """
        self._allocator = allocator
        self._target = target
        self._num_ranks = num_ranks
        self._resized = resized
        self._clock = clock
        self._unit_slots = bounds.unit_slots or allocator.num_slots
        self._starts = np.arange(0, allocator.num_slots, self._unit_slots, dtype=np.int64)
        self._units: npt.NDArray[np.int8] = np.full(len(self._starts), _Unit.OPEN, dtype=np.int8)
        num_open = len(self._starts)
        if bounds.num_slots < allocator.num_slots:
            num_open = bounds.num_slots // self._unit_slots
            out = np.arange(num_open, len(self._starts))
            self._units[out] = _Unit.OUT
            allocator.resizing.close(self._slots_of(out))
        self._wanted = num_open
        self._under_way: dict[int, _UnderWay] = {}
        self._tells_at = -math.inf
        self._heard_at = clock()  # when ranks told something, or were told something and had nothing to do
        self._is_late = False  # what is under way, so long that nobody waits for it
        self._next: list[Resize] = []
        self._number = self._num_steps = 0
        self._began = 0.0  # by the clock: when it was last asked for another size
        self._num_unseen = 0  # segments that are yet to be looked at
        self._is_busy = self._has_moved = False
        self._seen = self._standing()
        self._size = allocator.capacity  # as ``resized`` knows it
        target.begin(bounds, allocator.capacity)

    @property
    def is_busy(self) -> bool:
        """Whether the pool does not have the size yet that was taken up. Steps are counted until then."""
        return self._is_busy

    @property
    def is_moving(self) -> bool:
        """Whether the next step goes on with something. What waits for jobs, or for pins to end, does not."""
        if not self._is_busy:
            return self._target.is_asked
        is_told = bool(self._under_way) and not self._is_late
        return (
            is_told
            or bool(self._next)
            or self._target.is_asked
            or self._has_moved
            or self._standing() != self._seen
        )

    def step(self) -> list[Resize]:
        """What ranks are to do. O(1) while nothing changes, else O(pool) array work."""
        if (now := self._clock()) >= self._tells_at:
            self._target.tell_pinned(self._allocator.resizing.num_pinned)
            self._tells_at = now + _TELL_SECONDS
        asked = self._target.take()
        if asked is not None:
            self._wanted = max(1, -(-asked // self._unit_slots))
            self._is_busy, self._began = True, self._clock()
            self._wait_for_ranks()
        if not self._is_busy:
            return []
        self._num_steps += 1
        self._has_moved = False
        if self._under_way and not self._is_late and self._clock() - self._heard_at > _LATE_SECONDS:
            self._wait_no_more()
        num_open, num_coming = self._num(_Unit.OPEN), self._num(_Unit.COMING)
        if num_open > self._wanted:
            self._shrink(num_open - self._wanted)
        elif num_open < self._wanted and not num_coming:
            self._grow(self._wanted - num_open)
        if self._num(_Unit.CLOSED):
            self._empty()
        self._is_busy = bool(
            self._under_way or self._num(_Unit.CLOSED) or self._num(_Unit.OPEN) != self._wanted
        )
        if not self._is_busy:
            self._target.settle(self._allocator.capacity)
        self._seen = self._standing()
        if self._allocator.capacity != self._size and not (self._has_moved or self._under_way):
            self._size = self._allocator.capacity
            self._resized()
        orders, self._next = self._next, []
        return orders

    def hear(self, resized: dict[int, Resized]) -> None:
        """Ranks have carried these out. What nobody was told to do is ignored."""
        if resized:
            self._wait_for_ranks()
        for number, (num_ranks, error) in resized.items():
            order = self._under_way.get(number)
            if order is None:
                logger.warning("ranks tell of resize %d of the pool, which is not under way", number)
                continue
            order.num_left -= num_ranks
            order.error = max(order.error, error)
            if order.num_left > 0:
                continue
            del self._under_way[number]
            if order.takes and order.error:
                self._wanted = min(self._wanted, self._num(_Unit.OPEN))
                self._units[order.units] = _Unit.OUT
                self._order(order.units, takes=False)  # ranks that have it
                self._target.tell(self._allocator.capacity, order.error)
            elif order.takes:
                self._units[order.units] = _Unit.OPEN
                self._allocator.resizing.open(self._slots_of(order.units))
                self._target.tell(self._allocator.capacity)
            elif order.error:
                logger.warning("memory of the CPU pool was not given back: %s", order.error)

    def check_invariants(self) -> None:
        """What is open is the pool, and what is out has nothing in it."""
        closed = self._slots_of(np.flatnonzero(self._units != _Unit.OPEN))
        assert len(closed) == self._allocator.resizing.num_closed, f"{len(closed)} closed"
        used = self._allocator.resizing.num_used_in(self._starts)
        away = np.flatnonzero((self._units == _Unit.OUT) | (self._units == _Unit.COMING))
        assert not used[away].any(), f"units {away[used[away] > 0]} are given back, and in use"
        assert self._is_busy or not self._under_way, f"{self._under_way} is forgotten"
        assert self._is_busy or self._num(_Unit.OPEN) == self._wanted, f"not {self._wanted} units are open"
        assert self._under_way or not self._is_late, "nothing is under way, and is late"

    # Private

    def _shrink(self, num_units: int) -> None:
        resizing, unit = self._allocator.resizing, self._unit_slots
        shortage = num_units * unit - self._allocator.num_free
        if shortage > 0:
            freed = resizing.evict(min(shortage, _STEP_SLOTS), _STEP_BITES)
            self._has_moved, shortage = freed > 0, shortage - freed
        if unit == 1:
            self._close(np.sort(resizing.free(min(num_units, _STEP_SLOTS))))
            return
        waits = shortage > 0 and self._clock() - self._began < _PATIENCE_SECONDS
        if waits and (self._allocator.num_free < unit or not (self._has_moved or self._is_turn)):
            return
        most_slots = _STEP_SLOTS if shortage <= 0 else min(_STEP_SLOTS, self._allocator.num_free)
        most = max(1, most_slots // unit)
        candidates = np.flatnonzero(self._units == _Unit.OPEN)
        used = resizing.num_used_in(self._starts)[candidates]
        is_whole = (
            self._starts[candidates] + unit <= self._allocator.num_slots
        )  # alone, others may be too few
        order = np.lexsort((-candidates, used, is_whole))[: min(num_units, most)]
        self._close(np.sort(candidates[order if not waits else order[used[order] == 0]]))

    def _close(self, units: Ids) -> None:
        if len(units):
            self._units[units] = _Unit.CLOSED
            self._allocator.resizing.close(self._slots_of(units))
            self._num_unseen = self._allocator.resizing.num_ids
            self._has_moved = True
            self._target.tell(self._allocator.capacity)

    def _grow(self, num_units: int) -> None:
        most = max(1, _STEP_SLOTS // self._unit_slots)
        closed = np.flatnonzero(self._units == _Unit.CLOSED)[: min(num_units, most)]
        if len(closed):
            self._units[closed] = _Unit.OPEN
            self._allocator.resizing.open(self._slots_of(closed))
            self._has_moved = True
            self._target.tell(self._allocator.capacity)
            return
        out = np.flatnonzero(self._units == _Unit.OUT)[: min(num_units, most)]
        if len(out):
            self._units[out] = _Unit.COMING
            self._order(out, takes=True)

    def _empty(self) -> None:
        resizing = self._allocator.resizing
        if resizing.num_withdrawn == resizing.num_closed:
            empty = np.flatnonzero(self._units == _Unit.CLOSED)
        elif self._num_unseen > 0 or self._is_turn:
            resizing.empty(_STEP_NODES)
            self._num_unseen -= _STEP_NODES
            self._has_moved |= self._num_unseen > 0
            if self._num_unseen > 0 and not self._is_turn:
                return
            used = resizing.num_used_in(self._starts)
            empty = np.flatnonzero((self._units == _Unit.CLOSED) & (used == 0))
        else:
            return
        if len(empty):
            self._units[empty] = _Unit.OUT
            self._order(empty, takes=False)

    def _order(self, units: Ids, *, takes: bool) -> None:
        """``units``, in order. Neighbours are one run."""
        firsts = np.flatnonzero(np.diff(units, prepend=-2) != 1)
        lasts = np.append(firsts[1:], len(units)) - 1
        starts = self._starts[units[firsts]]
        stops = np.minimum(self._starts[units[lasts]] + self._unit_slots, self._allocator.num_slots)
        if not self._under_way:
            self._wait_for_ranks()
        self._next.append(Resize(self._number, starts, stops, takes))
        self._under_way[self._number] = _UnderWay(units, takes, self._num_ranks)
        self._number += 1
        self._is_busy = True

    def _wait_for_ranks(self) -> None:
        """So long as ever, from now on."""
        self._heard_at = self._clock()
        if self._is_late:
            self._is_late = False
            self._target.note("")

    def _wait_no_more(self) -> None:
        """The engine may come to rest and shut down. What ranks say later counts all the same."""
        self._is_late = True
        problem = (
            f"ranks have not said for {_LATE_SECONDS:g} s whether they have taken memory of the pool, or "
            f"given it back; that goes on when they do; if they never do, restart the engine"
        )
        self._target.note(problem)
        logger.warning("%s", problem)

    @property
    def _is_turn(self) -> bool:
        """Whether all units are looked at in this step, though nothing is known to have become free."""
        return not self._num_steps % _LOOK_STEPS

    def _standing(self) -> tuple[int, ...]:
        """It changes when jobs end."""
        allocator = self._allocator
        return allocator.num_free, allocator.num_filling, allocator.num_leaving, allocator.num_pins

    def _num(self, state: _Unit) -> int:
        return int(np.count_nonzero(self._units == state))

    def _slots_of(self, units: Ids) -> Ids:
        slots = (self._starts[units][:, None] + np.arange(self._unit_slots)).reshape(-1)
        return slots[slots < self._allocator.num_slots]
