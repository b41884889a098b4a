"""Where bytes arrive that NIXL reads from peers: memory that is never a slot of the pool.

A transfer that is given up may still write, long after: NIXL over UCX cannot call one back, and forgets it
when asked to. So transfers end here. Slots are filled from here by this process alone, with what has arrived.
Memory to which something may yet be written is nobody's until the transfer is done; if it failed, for good.
"""

import ctypes
import logging
import mmap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from offload.messages import Ids
from offload.peering.frames import ProtocolError
from offload.worker.media.base import PoolSlots
from offload.worker.peers.near import pieces, runs
from offload.worker.peers.nixl import Agent, NixlError, State, places_of
from offload.worker.peers.protocol import LEAST_BYTES_PER_SECOND, Reachable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""A transfer that has not ended by then is given up: beside what its bytes take."""
_PART_BYTES = 4 << 20
_MOST_BYTES = 256 << 20
_LEAST_PARTS = 8
_AHEAD = 2
"""Parts of a fetch that are under way at once: one arrives while one is copied."""
_POLL_SECONDS = 50e-6
_KEPT: list[object] = []
"""What may be written to when its engine has ended; with it, all that is needed for that."""


class _Part(NamedTuple):
    """A piece of memory that transfers end in."""

    memory: mmap.mmap
    address: int
    registered: Any


class Transfer(NamedTuple):
    """One that has begun.

    Attributes:
        part: where its bytes arrive.
        name: of the agent that is read.
        handle: the library's.
    """

    part: _Part
    name: str
    handle: Any


class Landing:
    """Of one rank, for several threads.

    Parts of its memory are made when they are needed: one for each transfer that is under way. What is lost
    to transfers that have failed is made anew, up to 256 MiB, or eight parts. Then NIXL is used no more.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Make an agent. Raises NixlError. ``slot_bytes``: of a slot; a part has one at least."""
        self.part_slots = max(1, _PART_BYTES // slot_bytes)
        self._part_bytes = self.part_slots * slot_bytes
        self._most = max(_LEAST_PARTS, _MOST_BYTES // self._part_bytes)
        self._agent = Agent(serves=False)
        self._lock = threading.Lock()
        self._free: list[_Part] = []
        self._late: list[Transfer] = []  # given up, and under way when they were looked at last
        self._lost: list[Transfer] = []  # failed; something may come of them yet, and nobody can know
        self._num_made = 0
        self._num_used = 0  # by transfers that somebody waits for
        self._met: dict[str, bytes] = {}  # metadata by name
        self._users: Counter[str] = Counter()  # peers by name, and transfers
        self._is_closed = False

    def meet(self, told: Reachable) -> None:
        """Know a peer's agent. Raises NixlError: it is not what it is said to be."""
        with self._lock:
            if self._met.get(told.agent, told.metadata) != told.metadata:
                raise NixlError("two peers have one name")
            if told.agent not in self._met:
                name = self._agent.meet(told.metadata)
                if name != told.agent:
                    if name not in self._met:
                        self._agent.forget(name)
                    raise NixlError("it is another agent than it says")
                self._met[name] = told.metadata
            self._users[told.agent] += 1

    def forget(self, name: str) -> None:
        """A peer is not read by that name any more."""
        with self._lock:
            self._leave(name)

    def begin(self, name: str, there: Ids) -> Transfer:
        """Read that memory of a peer, one piece behind the other; ``there``: as for ``Agent.prepare``.

        Raises NixlError. Each transfer ends with ``give_back`` or ``give_up``, or with an error of ``wait``.
        """
        part = self._take()
        ends = np.cumsum(there[:, 1])
        here = np.stack([part.address + ends - there[:, 1], there[:, 1]], axis=1)
        with self._lock:
            try:
                if name not in self._met:
                    raise NixlError("the peer is gone")
                transfer = Transfer(part, name, self._agent.prepare(name, there, here))
            except NixlError:  # nothing has begun
                self._free.append(part)
                self._num_used -= 1
                raise
            self._users[name] += 1
        try:
            state = self._agent.begin(transfer.handle)
        except NixlError:
            self._lose(transfer)
            raise
        if state is State.FAILED:
            self._lose(transfer)
            raise NixlError("a transfer has failed at once")
        return transfer

    def wait(self, transfer: Transfer, until: float) -> None:
        """Until all of it has arrived. Raises NixlError: it has failed, or not by then; it is given up."""
        while (state := self._state(transfer)) is State.UNDER_WAY:
            if self._is_closed or time.monotonic() > until:
                self.give_up(transfer)
                raise NixlError("a transfer does not end" if not self._is_closed else "it is closed")
            time.sleep(_POLL_SECONDS)
        if state is State.FAILED:
            self._lose(transfer)
            raise NixlError("a transfer has failed")

    def give_back(self, transfer: Transfer) -> None:
        """It is done, and what has arrived is not needed any more."""
        is_released = self._is_released(transfer)
        with self._lock:
            self._num_used -= 1
            self._end(transfer) if is_released else self._lost.append(transfer)

    def give_up(self, transfer: Transfer) -> None:
        """Nobody waits for it any more. Its memory is used again once it is done."""
        with self._lock:
            self._num_used -= 1
            self._late.append(transfer)

    def close(self) -> None:
        """Nobody reads by it any more. What may yet be written to stays as it is. Idempotent."""
        self._is_closed = True
        with self._lock:
            self._reap()
            if self._late or self._lost or self._num_used:
                _KEPT.append(self)
                return
            self._agent.close()
            self._num_made -= len(self._free)
            self._free = []

    def check_invariants(self) -> None:
        """Each part is free, used, late or lost, and one of these."""
        with self._lock:
            kept = [*self._free, *(each.part for each in (*self._late, *self._lost))]
            assert len({part.address for part in kept}) == len(kept), "a part has two owners"
            assert len(kept) + self._num_used == self._num_made <= self._most, f"{self._num_made} parts"
            assert self._num_used >= 0, f"{self._num_used} parts are used"
            assert self._users.keys() == self._met.keys(), f"{self._users}, {list(self._met)}"

    # Private

    def _state(self, transfer: Transfer) -> State:
        try:
            return self._agent.state(transfer.handle)
        except NixlError:
            return State.FAILED

    def _is_released(self, transfer: Transfer) -> bool:
        """Have the library forget what is done; if it does not, the memory is not used again."""
        try:
            self._agent.release(transfer.handle)
        except NixlError as error:
            logger.warning("memory of a transfer that is done is not used again: %s", error)
            return False
        return True

    def _take(self) -> _Part:
        with self._lock:
            if self._is_closed:
                raise NixlError("it is closed")
            if not self._free:
                self._reap()
            if not self._free:
                self._free.append(self._make())
            self._num_used += 1
            return self._free.pop()

    def _lose(self, transfer: Transfer) -> None:
        with self._lock:
            self._num_used -= 1
            self._lost.append(transfer)

    # The lock is held

    def _make(self) -> _Part:
        if self._num_made >= self._most:
            raise NixlError(f"transfers that have failed have taken {self._most} pieces of memory")
        memory = mmap.mmap(-1, self._part_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        part = _Part(memory, address, self._agent.register(address, self._part_bytes))
        self._num_made += 1
        return part

    def _reap(self) -> None:
        """What was given up and is done by now."""
        late, self._late = self._late, []
        for transfer in late:
            state = self._state(transfer)
            if state is State.DONE and self._is_released(transfer):
                self._end(transfer)
            else:
                (self._late if state is State.UNDER_WAY else self._lost).append(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._free.append(transfer.part)
        self._leave(transfer.name)

    def _leave(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] > 0:
            return
        del self._users[name], self._met[name]
        try:
            self._agent.forget(name)
        except NixlError as error:
            logger.info("a peer's agent is not forgotten: %s", error)


def make_landing(slot_bytes: int) -> Landing | None:
    """Where bytes arrive; None, and one line, if NIXL cannot be used."""
    try:
        return Landing(slot_bytes)
    except NixlError as error:
        logger.warning("no peer is read by NIXL: %s", error)
        return None


class NixlPool:
    """The pool of a peer, read by NIXL while its owner goes on. Whether slots have changed its owner says."""

    def __init__(self, landing: Landing, told: Reachable, slot_bytes: int) -> None:
        """Know its agent. Raises NixlError, and ProtocolError."""
        if told.num_slots < 1 or told.address + told.num_slots * slot_bytes >= 1 << 63:
            raise ProtocolError(f"{told.num_slots} slots at {told.address}")
        landing.meet(told)
        self._landing = landing
        self._told = told
        self._slot_bytes = slot_bytes

    def check(self, slots: Ids) -> None:
        """Refuse slots that are none of it. Raises ProtocolError."""
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._told.num_slots:
            raise ProtocolError(f"slots to {slots.max()}: it has {self._told.num_slots}")

    def copy(self, sources: Ids, pool: PoolSlots, targets: Ids) -> Iterator[slice]:
        """Have slots in some of another pool, a part at a time. Raises NixlError; then nothing more comes.

        Yields which of them were just copied, while they are in the processor's cache.
        """
        landing, size = self._landing, self._slot_bytes
        until = time.monotonic() + PATIENCE_SECONDS + len(sources) * size / LEAST_BYTES_PER_SECOND
        begun: deque[tuple[slice, Transfer]] = deque()
        try:
            for start in range(0, len(sources), landing.part_slots):
                part = slice(start, min(start + landing.part_slots, len(sources)))
                edges = list(runs(sources[part]))
                there = places_of(self._told.address, size, edges, sources[part])
                begun.append((part, landing.begin(self._told.agent, there)))
                if len(begun) >= _AHEAD:
                    yield from self._land(*begun.popleft(), until, pool, targets)
            while begun:
                yield from self._land(*begun.popleft(), until, pool, targets)
        finally:
            for _, transfer in begun:
                landing.give_up(transfer)

    def forget(self) -> None:
        """It is not read any more; what is under way is. Call it once."""
        self._landing.forget(self._told.agent)

    def _land(
        self, part: slice, transfer: Transfer, until: float, pool: PoolSlots, targets: Ids
    ) -> Iterator[slice]:
        self._landing.wait(transfer, until)
        size, here = self._slot_bytes, targets[part]
        try:
            for start, stop in runs(here):
                at, to = transfer.part.address + start * size, pool.address + int(here[start]) * size
                for piece in pieces(stop - start, size):
                    offset = piece.start * size
                    ctypes.memmove(to + offset, at + offset, (piece.stop - piece.start) * size)
                    yield slice(part.start + start + piece.start, part.start + start + piece.stop)
        finally:
            self._landing.give_back(transfer)
