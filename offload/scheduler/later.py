"""What requests that are over have left on the GPU is stored before the GPU evicts it, and not earlier."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from allocator import Pin
from offload.messages import Ids
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.groups import GpuBlocks
from offload.scheduler.holds import Holds

_STEPS = 4
"""The window has what so many steps take at most: in that time a copy has ended, and its end is known."""
_MOST_COPIED = 1 / 4
"""Part of the GPU's blocks by which the window grows, at most, for what is being copied."""
_LOOKED_AT = 256
"""Requests that have their turn in one step."""
_LOOKED_BACK = 8
"""Requests that had their turn, the oldest, of which a step looks what the GPU still has."""
_MOST_TIMES = 8
"""So many times the GPU's blocks are remembered, of all requests together."""
_PATIENCE_SECONDS = 2.0
"""A request waits no longer for what it would have the GPU evict."""


@dataclass(slots=True, eq=False)
class Left:
    """What a request has left on the GPU.

    Attributes:
        pending: the request; None: it has had its turn.
        chain: its prefix hashes.
        serial: counts requests by their ends.
        blocks: of its leading chain positions, one for each.
        ids: of these.
        num_owned: how many of them it was the last to use.
    """

    pending: Pending | None
    chain: Sequence[bytes]
    serial: int
    blocks: GpuBlocks
    ids: Ids
    num_owned: int


class _Waiting(NamedTuple):
    """A request that waits for stores: until when at most, and what keeps its KV in the pool meanwhile."""

    until: float
    pin: Pin | None


class Later:
    """Requests by their ends. That is the order in which the GPU evicts their blocks, tails first.

    A block belongs to the last request that used it, and to none while one runs that has it. The window is at
    the end that the GPU evicts next. A request whose blocks come into it has its *turn*, once: what has no
    copy waits in the backlog's queue from then on, held. So what the GPU evicts has been stored before, as
    far as the pool takes it. Blocks that were copied are the first to be evicted: they are *due*, as those in
    the queue are.

    The window has what a few steps take at most, and what is being copied: so it grows while more is taken
    than has been copied. It also grows by what a restore is about to take at once. The restore waits, for a
    while, until that is stored. Where running requests may be preempted, ``is_pressed`` says so.

    When the pool is full, what the GPU has, too, goes first. For models whose positions are one block, and
    nothing else. No step looks at more than a few requests, each with O(1) array work per position.
    """

    def __init__(self, common: Common, backlog: Backlog, holds: Holds, *, step_tokens: int) -> None:
        """Nobody is over. ``step_tokens``: that a step computes at most."""
        self._allocator = common.allocator
        self._engine = common.engine
        self._clock = common.clock
        self._backlog = backlog
        self._holds = holds
        self._block_size = common.block_size
        self._step_blocks = -(-step_tokens // common.block_size)
        self._line: dict[int, Left] = {}  # those whose turn is to come
        self._due: dict[int, Left] = {}  # those that have had it
        self._owners: Ids = np.zeros(common.engine.num_blocks, dtype=np.int64)  # serials, by GPU block
        self._num_ended = 0
        self._num_due = 0  # blocks
        self._num_remembered = 0  # positions
        self._num_running = 0
        self._num_unused = common.engine.num_blocks  # at most
        self._has_twice: dict[int, Left] = {}  # of the line: some of it was in the pool when they ended
        self._waiting: dict[str, _Waiting] = {}
        self._strangers: set[str] = set()  # requests that run, and will not leave all that others left them
        holds.release_late = self._release

    @property
    def num_pins(self) -> int:
        """Of requests that wait."""
        return sum(each.pin is not None for each in self._waiting.values())

    # Requests

    def has_begun(self, request: Request, num_local: int, num_storable: int) -> None:
        """A request has blocks. The GPU had its leading tokens; ``num_storable`` blocks of it may be stored.

        The others have their turn now: nobody else knows of them once it has ended.
        """
        self._stop_waiting(request.request_id)
        num_blocks = num_local // self._block_size
        if not num_blocks or not (self._line or self._due):
            return
        tables = self._engine.tables(request.request_id)
        ids = self._engine.ids(self._engine.groups.prefix(tables, range(num_blocks)))
        for serial in np.unique(self._owners[ids[num_storable:]]).tolist():
            if serial in self._line:
                self._take_turn(self._line[serial])
        if num_storable < num_blocks:
            self._strangers.add(request.request_id)
        self._own(ids, 0)

    def has_ended(self, pending: Pending, blocks: GpuBlocks) -> None:
        """A request is over, and its leading blocks, all full, are freed next, from the last one on."""
        if blocks:
            self._leave(pending, blocks)
            self._take_turns(self._window, ended=pending)

    def must_wait(self, request: Request, num_local: int, num_external: int) -> bool:
        """Whether a request, for which we have so many tokens, waits for stores of what it has evicted.

        They are begun. What the pool has of it stays there meanwhile.
        """
        waiting = self._waiting.get(request.request_id)
        if waiting is not None and waiting.until <= self._clock():
            self._unpin(request.request_id)
            return False
        num_blocks = min(num_external // self._block_size, self._engine.num_free)
        self._take_turns(self._window + num_blocks)
        if self._num_held == 0 or self._num_ready >= num_blocks:
            if waiting is not None:
                self._unpin(request.request_id)
            return False
        if waiting is None or waiting.pin is None:
            until = self._clock() + _PATIENCE_SECONDS if waiting is None else waiting.until
            chain = self._engine.chain(request)
            stop = (num_local + num_external) // self._block_size
            depth = self._allocator.resident_depth(chain[:stop])
            pin = self._allocator.pin(chain, depth - 1, depth) if depth else None  # and all before that
            self._waiting[request.request_id] = _Waiting(until, pin)
        return True

    def finish(self, request: Request) -> None:
        """A request is over, in whatever state."""
        self._stop_waiting(request.request_id)
        self._strangers.discard(request.request_id)

    def forget(self, is_meant: Callable[[Request], bool] | None = None) -> None:
        """What these requests have left is worthless; None: what all have, and no copy is awaited."""
        for left in list(self._line.values()):
            if is_meant is None or (left.pending is not None and is_meant(left.pending.request)):
                self._disown(left, 0)
        if is_meant is None:
            for left in list(self._due.values()):
                self._disown(left, 0)
            for request_id in list(self._waiting):
                self._stop_waiting(request_id)

    # Steps

    def step(self, num_running: int) -> None:
        """A step is scheduled, of that many requests: what has come into the window has its turn."""
        self._num_running = num_running
        for left in list(islice(self._due.values(), _LOOKED_BACK)):
            num_owned = left.num_owned
            self._refresh(left)
            if left.num_owned == num_owned and not self._num_held:
                break  # what is evicted after it is there, too
        now = self._clock()
        for request_id in [name for name, each in self._waiting.items() if each.until <= now]:
            self._unpin(request_id)
        self._take_turns(self._window)

    def is_pressed(self, num_admitted: int) -> bool:
        """Whether running requests may be preempted, and lose blocks before they have their turn."""
        return num_admitted > 1 and self._engine.num_free < self._window

    def make_room(self, chain: Sequence[bytes], depth: int, num_slots: int) -> None:
        """Have so many slots free, by what the GPU has, too, as far as there is any.

        What the GPU evicts last goes first, but for the first ``depth`` positions of ``chain``.
        """
        num_lacking = num_slots - self._allocator.num_free
        if num_lacking <= 0 or not self._has_twice:
            return
        lease = self._allocator.leases.begin(chain, depth) if depth else None
        for left in list(islice(reversed(self._has_twice.values()), _LOOKED_AT)):
            start, stop = self._refresh(left)
            num_shed = self._allocator.shedding.shed(left.chain, start, stop, num_lacking) if stop else 0
            num_lacking -= num_shed
            if num_lacking <= 0:
                break
            self._has_twice.pop(left.serial, None)
        if lease is not None:
            self._allocator.leases.end(lease)

    def check_invariants(self) -> None:
        """Requests stand in the order of their ends, and each has as many blocks as it is the owner of."""
        for each in (self._line, self._due, self._has_twice):
            assert all(left.serial == serial for serial, left in each.items()), f"{each} is filed wrongly"
        assert list(self._line) == sorted(self._line), f"{list(self._line)} are not in order"
        assert self._has_twice.keys() <= self._line.keys(), "one that has had its turn is looked at for room"
        lefts = [*self._line.values(), *self._due.values()]
        serials, counts = np.unique(self._owners, return_counts=True)
        owned = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        owned.pop(0, None)
        assert owned == {left.serial: left.num_owned for left in lefts}, f"{owned} are owned, by {lefts}"
        for left in lefts:
            num_there = int(np.count_nonzero(self._owners[left.ids] == left.serial))
            assert num_there == left.num_owned, f"{left} owns others than its own"
            assert len(left.blocks) == len(left.ids) <= len(left.chain), f"{left}"
        num_due = sum(left.num_owned for left in self._due.values())
        assert num_due == self._num_due, f"{num_due} blocks are due, {self._num_due} counted"
        num_remembered = sum(len(left.blocks) for left in lefts)
        assert num_remembered == self._num_remembered, f"{num_remembered}, {self._num_remembered} counted"
        assert self.num_pins <= self._allocator.num_pins, f"{self.num_pins} pins, {self._allocator.num_pins}"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {"requests that wait for stores": [*self._waiting, *self._strangers]}

    # Private: the window

    @property
    def _window(self) -> int:
        """GPU blocks, of those that are evicted next, that are due."""
        return _STEPS * (self._step_blocks + self._num_running)

    def _count_unused(self) -> int:
        """Free blocks that nothing has been in yet. They are taken before all others, in the order of ids.

        Once something is lost with the next one there are none.
        """
        first = self._engine.next_unhashed
        self._num_unused = 0 if first is None else min(self._num_unused, self._engine.num_blocks - first)
        return self._num_unused

    @property
    def _num_held(self) -> int:
        """Blocks that wait for their copies or are copied."""
        return self._backlog.num_queued + self._holds.num_held

    @property
    def _num_ready(self) -> int:
        """Blocks that can be evicted without a loss, at least."""
        return self._count_unused() + self._num_due - self._num_held

    def _take_turns(self, window: int, ended: Pending | None = None) -> None:
        """Requests have their turn until so many blocks are due, or unused, beside those that are held.

        ``ended`` still has its own.
        """
        window += min(self._num_held, int(self._engine.num_blocks * _MOST_COPIED)) - self._count_unused()
        for left in list(islice(self._line.values(), _LOOKED_AT)):
            if self._num_due >= window:
                break
            self._take_turn(left, is_freed=left.pending is not ended)

    def _take_turn(self, left: Left, *, is_freed: bool = True) -> None:
        """What has no copy is held for the queue, as far as those that run can do without."""
        _, stop = self._refresh(left)
        pending = left.pending
        if not stop or pending is None:
            return
        start = self._allocator.known_depth(left.chain, stop)
        blocks = left.blocks[start:stop]
        blocks = blocks[: self._engine.num_intact(blocks, left.chain[start:stop])]
        if is_freed:
            blocks = blocks[: max(0, self._engine.num_free - self._holds.to_run_with)]
        self._file_as_due(left)
        if blocks:
            self._engine.hold(blocks)
            pending.is_late = True
            self._backlog.end(pending, start, blocks)

    def _refresh(self, left: Left) -> tuple[int, int]:
        """The positions that a request owns and the GPU still has, from the first to behind the last one.

        The GPU evicts the last of them first. 0 and 0: there are none, and it is forgotten.
        """
        owned = self._owners[left.ids] == left.serial
        low = start = int(owned.argmax()) if left.num_owned else 0
        high = len(owned) if left.num_owned else 0
        while low < high:
            middle = (low + high) // 2
            after = middle + 1
            if self._engine.num_intact(left.blocks[middle:after], left.chain[middle:after]):
                low = after
            else:
                high = middle
        if low == start:
            self._disown(left, 0)
            return 0, 0
        if low < len(owned):
            self._disown(left, low)
        return start, low

    def _release(self, blocks: Iterable[Any]) -> None:
        """Blocks are due that were held: they are reused after the other due ones, and before the line."""
        for left in list(islice(self._line.values(), _LOOKED_BACK)):
            _, stop = self._refresh(left)
            if stop and not self._engine.num_holds(int(left.ids[stop - 1])):
                self._engine.release_before(blocks, left.blocks[stop - 1])
                return
        self._engine.release(blocks)

    # Private: who owns what

    def _leave(self, pending: Pending, blocks: GpuBlocks) -> None:
        """A request leaves these blocks, which it may still hold, or a step under way. Others may, too."""
        self._num_ended += 1
        ids = self._engine.ids(blocks)
        left = Left(pending, pending.chain, self._num_ended, blocks, ids, len(blocks))
        self._own(ids, left.serial)
        self._line[left.serial] = left
        if self._allocator.known_depth(left.chain, len(blocks)):
            self._has_twice[left.serial] = left
        self._num_remembered += len(blocks)
        others_have = self._engine.holds_of(blocks) > 1
        if self._strangers and others_have.any():
            self._take_turn(left, is_freed=False)
        self._own(ids[others_have], 0)
        most = _MOST_TIMES * self._engine.num_blocks
        while self._num_remembered > most and (self._line or self._due):
            if self._due:
                self._disown(next(iter(self._due.values())), 0)
            else:
                self._take_turn(next(iter(self._line.values())))

    def _own(self, ids: Ids, serial: int) -> None:
        """These blocks belong to that request from now on; 0: to one that runs."""
        serials, counts = np.unique(self._owners[ids], return_counts=True)
        self._owners[ids] = serial
        for loser, num in zip(serials.tolist(), counts.tolist(), strict=True):
            if loser:
                self._lose(self._find(loser), num)

    def _disown(self, left: Left, stop: int) -> None:
        """Nothing of it is left behind that position."""
        gone = left.ids[stop:]
        gone = gone[self._owners[gone] == left.serial]
        self._owners[gone] = 0
        self._num_remembered -= len(left.blocks) - stop
        left.blocks, left.ids = left.blocks[:stop], left.ids[:stop]
        self._lose(left, len(gone))

    def _lose(self, left: Left, num_blocks: int) -> None:
        left.num_owned -= num_blocks
        if left.serial in self._due:
            self._num_due -= num_blocks
        if not left.num_owned:
            self._num_remembered -= len(left.blocks)
            left.blocks, left.ids = [], left.ids[:0]
            for each in (self._line, self._due, self._has_twice):
                each.pop(left.serial, None)

    def _file_as_due(self, left: Left) -> None:
        left.pending = None
        del self._line[left.serial]
        self._has_twice.pop(left.serial, None)
        self._due[left.serial] = left
        self._num_due += left.num_owned

    def _find(self, serial: int) -> Left:
        found = self._line.get(serial)
        return self._due[serial] if found is None else found

    # Private: who waits

    def _stop_waiting(self, request_id: str) -> None:
        self._unpin(request_id)
        self._waiting.pop(request_id, None)

    def _unpin(self, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting.pin is not None:
            self._waiting[request_id] = waiting._replace(pin=None)
            self._allocator.unpin(waiting.pin)
