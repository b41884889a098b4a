"""What requests that are over have left on the GPU is stored before the GPU evicts it, and not earlier."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from allocator import Pin
from evictor import Worth
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.common import Common, LateStores
from offload.scheduler.engine import Request, Stand
from offload.scheduler.given import Given
from offload.scheduler.groups import GpuBlocks
from offload.scheduler.holds import Holds
from offload.scheduler.leavings import Leavings, Left
from offload.scheduler.unused import Unused

_STEPS = 3
"""The window has what so many steps take at most: in that time a copy has ended, and its end is known. Where
steps overlap it is one step more."""
_MOST_COPIED = 1 / 4
"""Part of the GPU's blocks by which the window grows, at most, for what is being copied."""
_LEAST_PART = 16
"""Blocks of a request that have their turn together, at least, where the others may wait."""
_LOOKED_AT = 256
"""Requests that have their turn in one step."""
_LOOKED_BACK = 8
"""Requests that had their turn, the oldest, of which a step looks what the GPU still has, and of more if
those have lost something."""
_PATIENCE_SECONDS = 2.0
"""A request waits no longer for what it would have the GPU evict."""


class _Waiting(NamedTuple):
    """A request that waits for stores: until when at most, and what keeps its KV in the pool meanwhile."""

    until: float
    pin: Pin | None


class Later:
    """Requests by their ends. That is the order in which the GPU evicts their blocks, tails first.

    The window is at the end that the GPU evicts next. A request whose blocks come into it has its *turn*,
    once: what has no copy waits in the backlog's queue from then on, held. So what the GPU evicts has been
    stored before, as far as the pool takes it. Blocks that were copied are the first to be evicted: they are
    *due*, as those in the queue are.

    Where the pool may lack what the GPU has, only the blocks in the window have their turn. Otherwise all of
    the request has it, as the pool has no position without those before it. There a copy also has to pay:
    nothing is copied of a request whose KV earns too little. What is on the GPU, too, keeps its slot where
    that earns less elsewhere than another copy costs.

    The window has what a few steps take at most, and what is being copied: so it grows while more is taken
    than has been copied. It also grows by what a restore is about to take at once. The restore waits, for a
    while, until that is stored. Where running requests may be preempted, ``is_pressed`` says so.

    When the pool is full, what the GPU has, too, goes first where that pays. For models whose positions are
    one block, and nothing else. No step looks at more than a few requests, each with O(1) array work per
    position.
    """

    def __init__(
        self, common: Common, late: LateStores, backlog: Backlog, holds: Holds, *, step_tokens: int
    ) -> None:
        """Nobody is over. ``step_tokens``: that a step computes at most."""
        self._allocator = common.allocator
        self._engine = common.engine
        self._clock = common.clock
        self._backlog = backlog
        self._holds = holds
        self._block_size = common.block_size
        self._step_blocks = -(-step_tokens // common.block_size)
        self._is_gapped = late.is_gapped
        self._fills_room = late.fills_room
        self._num_steps = _STEPS + late.overlaps
        self._left = Leavings(common)
        self._num_running = 0
        self._unused = Unused(common.engine)
        self._waiting: dict[str, _Waiting] = {}
        self._strangers: set[str] = set()  # requests that run, and will not leave all that others left them
        self._given = Given(common, self._left)
        self._num_free_then: int | None = None  # when it was looked back last, in this step
        self._num_refused: float = math.inf  # blocks, the fewest for which a request waits in this step
        self._stood: Stand | None = None  # as the last step left it, if nobody came or went since
        holds.release_late = self._release

    @property
    def num_pins(self) -> int:
        """Of requests that wait."""
        return sum(each.pin is not None for each in self._waiting.values())

    # Requests

    def has_begun(self, request: Request, num_local: int, num_external: int, num_storable: int) -> None:
        """A request has blocks. The GPU had its leading tokens; ``num_storable`` blocks of it may be stored.

        The others have their turn now: nobody else knows of them once it has ended. ``num_external`` tokens
        are loaded behind those that the GPU had.
        """
        self._stood = None
        self._stop_waiting(request.request_id)
        if self._is_gapped:
            self._given.begins(request, (num_local + num_external) // self._block_size)
        num_blocks = num_local // self._block_size
        if num_storable < num_blocks:
            self._strangers.add(request.request_id)
        if not num_blocks or not self._left:
            return
        tables = self._engine.tables(request.request_id)
        ids = self._engine.ids(self._engine.groups.prefix(tables, range(num_blocks)))
        for serial in self._left.owners(ids[num_storable:]):
            if serial in self._left.line:
                self._take_turn(self._left.line[serial])
        self._left.own(ids, 0)

    def has_ended(self, pending: Pending, blocks: GpuBlocks) -> None:
        """A request is over, and its leading blocks, all full, are freed next, from the last one on."""
        self._stood = None
        if blocks:
            self._leave(pending, blocks)
            self._take_turns(ended=pending)
        self._given.let_go()

    def must_wait(self, request: Request, num_local: int, num_external: int) -> bool:
        """Whether a request, for which we have so many tokens, waits for stores of what it has evicted.

        They are begun. What the pool has of it stays there until it has blocks, or patience ends.
        """
        self._stood = None
        start, stop = num_local // self._block_size, (num_local + num_external) // self._block_size
        num_blocks = min(stop - start, self._engine.num_free)
        waiting = self._waiting.get(request.request_id)
        is_patient = waiting is not None and waiting.pin is not None and waiting.until > self._clock()
        if is_patient and num_blocks >= self._num_refused:
            return True  # as one before it in this step, which wants no more
        chain = self._engine.chain(request)
        if self._is_gapped:
            self._given.claim_for_step(chain, stop)  # what the GPU has lost might else cut it off
        if waiting is not None and waiting.until <= self._clock():
            self._unpin(request.request_id)
            return False
        own = chain[:start]
        if self._num_free_then != self._engine.num_free:  # or nobody has been given blocks since
            self._look_back()
        num_own = self._left.num_due_of(own)  # which it is given: they are not evicted for it
        self._take_turns(num_blocks + num_own, own=own)
        if waiting is None or waiting.pin is None:
            until = self._clock() + _PATIENCE_SECONDS if waiting is None else waiting.until
            depth = self._allocator.usable_depth(chain, stop, start)
            pin = self._allocator.pin(chain, start, depth) if depth else None  # and all before that
            self._waiting[request.request_id] = _Waiting(until, pin)
        if not self._num_held:
            return False
        if self._num_ready < num_blocks:
            self._num_refused = min(self._num_refused, num_blocks)
        return self._num_ready < num_blocks + num_own

    def finish(self, request: Request) -> None:
        """A request is over, in whatever state."""
        self._stood = None
        self._stop_waiting(request.request_id)
        self._strangers.discard(request.request_id)
        self._given.ends(request.request_id)

    def preempted(self, request_id: str) -> None:
        """It has lost its blocks. What the pool has of it is needed."""
        self._stood = None
        self._given.preempted(request_id)

    def forget(self, is_meant: Callable[[Request], bool] | None = None) -> None:
        """What these requests have left is worthless; None: what all have, and no copy is awaited."""
        self._stood = None
        for left in list(self._left.line.values()):
            if is_meant is None or (left.pending is not None and is_meant(left.pending.request)):
                self._left.forget(left)
        if is_meant is None:
            for left in list(self._left.due.values()):
                self._left.forget(left)
            for request_id in list(self._waiting):
                self._stop_waiting(request_id)

    def reset(self) -> None:
        """All KV is forgotten, and perhaps the GPU's blocks were emptied. O(blocks)."""
        self.forget()
        self._unused.has_reset()

    # Steps

    def step(self, num_running: int) -> None:
        """A step is scheduled, of that many requests: what has come into the window has its turn.

        Nothing has where all is as the last step left it, as in most steps: they are to cost nothing.
        """
        self._left.refused.clear()
        if self.is_settled and self._stood == self._stand(num_running):
            return
        self._num_running = num_running
        self._given.let_go()
        num_due = self._left.num_due
        self._look_back()
        has_lost = self._left.num_due < num_due  # and perhaps more than it has seen
        self._num_free_then, self._num_refused = None, math.inf
        now = self._clock()
        for request_id in [name for name, each in self._waiting.items() if each.until <= now]:
            self._unpin(request_id)
        is_done = self._take_turns() and not has_lost
        self._stood = self._stand(num_running) if is_done else None

    @property
    def is_settled(self) -> bool:
        """Whether a step has nothing to do that is as the last one, as far as requests, free blocks go."""
        return self._stood is not None and not (self._num_held or self._waiting)

    def is_pressed(self, num_admitted: int) -> bool:
        """Whether blocks are to be stored as they fill.

        So they are while running requests may be preempted, and lose blocks before they have their turn.
        Where nobody has asked for late stores, they also are while the pool has room: what the GPU has, too,
        is then in nobody's place, and over a slow link what comes late is not stored in time. Not so where
        copies take cores that compute: then no link is slow, and a copy of what the GPU has costs compute.
        """
        if self._fills_room and self._allocator.num_free > self._window:
            return True
        return num_admitted > 1 and self._engine.num_free < self._window

    def make_room(self, pending: Pending, depth: int, num_slots: int) -> None:
        """Have so many slots free, by what the GPU has, too, as far as there is any.

        What the GPU evicts last goes first, but for the first ``depth`` positions of that request. Nothing
        goes for what asks to replace nothing.
        """
        num_lacking = num_slots - self._allocator.num_free
        if pending.keep is not None and pending.keep.worth < Worth.NORMAL:
            return
        if num_lacking > 0 and self._given.has_twice and self._engine.num_free >= self._window:
            num_lacking -= self._given.empty(num_lacking)
        if num_lacking <= 0 or not self._left.has_twice:
            return
        is_loose = depth > 0 and not self._is_gapped
        lease = self._allocator.leases.begin(pending.chain, depth) if is_loose else None
        self._left.shed(num_lacking)
        if lease is not None:
            self._allocator.leases.end(lease)

    def check_invariants(self) -> None:
        """Whoever waits has a pin, whoever is claimed runs, and all that is left agrees."""
        self._left.check_invariants()
        self._unused.check_invariants()
        assert self.num_pins <= self._allocator.num_pins, f"{self.num_pins} pins, {self._allocator.num_pins}"
        self._given.check_invariants()
        num_claims = self._left.num_claims + len(self._given)
        assert num_claims == len(self._allocator.hollow), f"{num_claims} claims, {self._allocator.hollow}"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {"requests that wait for stores": [*self._waiting, *self._strangers, *self._given.requests]}

    # Private: the window

    def _stand(self, num_running: int) -> Stand:
        return Stand.of(self._engine, num_running)

    @property
    def _window(self) -> int:
        """GPU blocks, of those that are evicted next, that are due."""
        return self._num_steps * (self._step_blocks + self._num_running)

    @property
    def _num_held(self) -> int:
        """Blocks that wait for their copies or are copied."""
        return self._backlog.num_queued + self._holds.num_held

    @property
    def _num_ready(self) -> int:
        """Blocks that can be evicted without a loss, at least."""
        return self._unused.count() + self._left.num_due - self._num_held

    def _look_back(self) -> None:
        """What has been evicted of those that are due is due no more."""
        self._num_free_then = self._engine.num_free
        for index, left in enumerate(list(islice(self._left.due.values(), _LOOKED_AT))):
            num_owned = left.num_owned
            self._left.refresh(left)
            if left.num_owned == num_owned and (index >= _LOOKED_BACK or not self._num_held):
                break  # what is evicted after it is there, too

    def _take_turns(self, num_more: int = 0, ended: Pending | None = None, own: Sequence[bytes] = ()) -> bool:
        """Requests have their turn until the blocks of the window are due, or unused.

        Beside it are ``num_more``, or those that are held, if they are more. ``ended`` still has its own.
        What has the hashes of ``own`` stays where it is. Returns whether no more could have it.
        """
        num_held = min(self._num_held, int(self._engine.num_blocks * _MOST_COPIED))
        window = self._window + max(num_more, num_held) - self._unused.count()
        if self._left.num_due >= window:
            return True
        line = self._left.line
        for left in list(islice(line.values(), _LOOKED_AT)):
            while self._left.num_due < window and left.serial in line:
                num_others = left.num_owned - self._left.num_of(left, own)
                if num_others <= 0:
                    break
                part = left
                if self._is_gapped:
                    num_blocks = max(window - self._left.num_due, _LEAST_PART)
                    part = self._left.tail_of(left, min(num_blocks, num_others))
                self._take_turn(part, is_freed=left.pending is not ended)
        return self._left.num_due >= window or not line

    def _take_turn(self, left: Left, *, is_freed: bool = True) -> None:
        """What has no copy is held for the queue, as far as those that run can do without."""
        start, stop = self._left.refresh(left)
        pending = left.pending
        if not stop or pending is None:
            return
        if not self._is_gapped:
            start = self._allocator.known_depth(left.chain, stop)
        blocks = left.part(start, stop)
        stop = start + self._engine.num_intact(blocks, left.chain[start:stop])
        stretches = self._left.lacking(left, start, stop) if self._is_gapped else [(start, stop)]
        if self._is_gapped and stretches:
            stretches = self._paying(left, pending, start, stop, stretches)
        room = max(0, self._engine.num_free - self._holds.to_run_with) if is_freed else len(blocks)
        self._left.file_as_due(left)
        for first, last in stretches:
            blocks = left.part(first, min(last, first + room))
            room -= len(blocks)
            if blocks:
                self._engine.hold(blocks)
                self._backlog.end(replace(pending, blocks=[], num_in_flight=0, is_late=True), first, blocks)

    def _paying(
        self, left: Left, pending: Pending, start: int, stop: int, stretches: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """What slots pay for of these stretches, of which ``start <= p < stop`` are in question."""
        depth = self._left.paying(left, start, stop)
        refused = [(max(first, depth), last) for first, last in stretches if last > depth]
        if refused:
            pending.lose("not_admitted", refused[0][0])
            self._holds.count_unstored(sum(last - first for first, last in refused), "not_admitted")
        return [(first, min(last, depth)) for first, last in stretches if first < depth]

    def _release(self, blocks: Iterable[Any]) -> None:
        """Blocks are due that were held: they are reused after the other due ones, and before the line."""
        for left in list(islice(self._left.line.values(), _LOOKED_BACK)):
            _, stop = self._left.refresh(left)
            if stop and not self._engine.num_holds(int(left.ids[-1])):
                self._engine.release_before(blocks, left.blocks[-1])
                return
        self._engine.release(blocks)

    # Private: who owns what

    def _leave(self, pending: Pending, blocks: GpuBlocks) -> None:
        """A request leaves these blocks, which it may still hold, or a step under way. Others may, too."""
        left = self._left.leave(pending, blocks)
        ids = left.ids
        others_have = self._engine.holds_of(blocks) > 1
        if self._strangers and others_have.any():
            self._take_turn(left, is_freed=False)
        self._left.own(ids[others_have], 0)
        while self._left.are_too_many:
            if self._left.due:
                self._left.forget(next(iter(self._left.due.values())))
            else:
                self._take_turn(next(iter(self._left.line.values())))

    # Private: who waits

    def _stop_waiting(self, request_id: str) -> None:
        self._unpin(request_id)
        self._waiting.pop(request_id, None)

    def _unpin(self, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting.pin is not None:
            self._waiting[request_id] = waiting._replace(pin=None)
            self._allocator.unpin(waiting.pin)
