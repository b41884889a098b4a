"""What requests that are over have left on the GPU: which block is whose, and which is evicted next."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from allocator import Pin
from offload.messages import Ids
from offload.scheduler.backlog import Pending
from offload.scheduler.common import Common
from offload.scheduler.groups import GpuBlocks

_LOOKED_AT = 256
"""Requests that one call looks at."""
_ASKED = 32
"""Requests that one call asks whether they give up slots."""
_PIECE = 256
"""Blocks that are looked at together."""
_MOST_TIMES = 8
"""So many times the GPU's blocks are remembered, of all requests together."""


@dataclass(slots=True, eq=False)
class Left:
    """What a request has left on the GPU, or a part of it.

    Attributes:
        pending: the request; None: it has had its turn.
        chain: its prefix hashes.
        serial: counts those that are left.
        blocks: of its chain positions from ``first`` on, one for each.
        ids: of these.
        num_owned: how many of them it was the last to use.
        first: chain position of the first of them.
        claim: keeps these positions, and those before them, in the pool's tree, where they may lack slots.
        paying: chain position up to which slots pay for what has none; None: nobody has asked yet.
    """

    pending: Pending | None
    chain: Sequence[bytes]
    serial: int
    blocks: GpuBlocks
    ids: Ids
    num_owned: int
    first: int = 0
    claim: Pin | None = None
    paying: int | None = None

    @property
    def stop(self) -> int:
        """The chain position after the last block."""
        return self.first + len(self.blocks)

    def part(self, start: int, stop: int) -> GpuBlocks:
        """Blocks of these chain positions."""
        return self.blocks[start - self.first : stop - self.first]


class Leavings:
    """All of them by their ends: *the line*, those whose turn is to come, and those that are *due*.

    A block belongs to the last request that used it, and to none while one runs that has it. Where the pool
    may lack what the GPU has, its tree has all that is left, claimed.
    """

    def __init__(self, common: Common) -> None:
        """Nothing is left."""
        self._allocator = common.allocator
        self._hollow = common.allocator.hollow
        self._engine = common.engine
        self._is_gapped = common.is_gapped
        self._is_spelled = common.record_events
        self.line: dict[int, Left] = {}
        """Those whose turn is to come, by serial: the next to be evicted first."""
        self.due: dict[int, Left] = {}
        """Those that have had it. They are evicted before the line, from the first one on."""
        self.has_twice: dict[int, Left] = {}
        """Of the line: some of it was in the pool when it was left."""
        self.num_due = 0
        """Blocks of those that are due."""
        self.refused: set[Pin] = set()
        """Claims of what has kept its slots in this step, though slots were lacking."""
        self._owners: Ids = np.zeros(common.engine.num_blocks, dtype=np.int64)  # serials, by GPU block
        self._num_left = 0
        self._num_remembered = 0  # blocks of all of them
        self._most_remembered = _MOST_TIMES * common.engine.num_blocks

    def __bool__(self) -> bool:
        return bool(self.line or self.due)

    @property
    def are_too_many(self) -> bool:
        """Whether more is remembered than may be."""
        return bool(self) and self._num_remembered > self._most_remembered

    @property
    def num_claims(self) -> int:
        """Claims of all that is left. O(that)."""
        return sum(left.claim is not None for left in (*self.line.values(), *self.due.values()))

    # Coming and going

    def leave(self, pending: Pending, blocks: GpuBlocks) -> Left:
        """A request leaves these blocks, its leading ones. It is the last that has used them.

        The GPU may keep them for long. So no more is kept of the request than will be read.
        """
        pending.request = self._engine.remains(pending.request, is_spelled=self._is_spelled)
        ids = self._engine.ids(blocks)
        left = Left(pending, pending.chain, self._next_serial(), blocks, ids, len(blocks))
        if self._is_gapped:
            self._claim(left)
            if pending.keep is not None and left.claim is not None:
                self._hollow.heed(left.claim, pending.keep)
        self.own(ids, left.serial)
        self.line[left.serial] = left
        if self._is_twice(left):
            self.has_twice[left.serial] = left
        self._num_remembered += len(blocks)
        return left

    def own(self, ids: Ids, serial: int) -> None:
        """These blocks belong to that one from now on; 0: to a request that runs."""
        before = self._owners[ids]
        self._owners[ids] = serial
        for loser, num in _counts(before[before > 0]):
            self._lose(self._find(loser), num)

    def owners(self, ids: Ids) -> list[int]:
        """Serials of those that these blocks belong to, each once; 0: some belong to nobody."""
        return [serial for serial, _ in _counts(self._owners[ids])]

    def num_of(self, left: Left, chain: Sequence[bytes]) -> int:
        """How many of its blocks have a hash of ``chain``. O(log n) and array work."""
        low, high = left.first, min(left.stop, len(chain))
        if low >= high or left.chain[low] != chain[low]:
            return 0
        while low < high:
            middle = (low + high) // 2
            if left.chain[middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        return int(np.count_nonzero(self._owners[left.ids[: max(0, low - left.first)]] == left.serial))

    def num_due_of(self, chain: Sequence[bytes]) -> int:
        """How many of the blocks that are due have a hash of ``chain``."""
        return sum(self.num_of(left, chain) for left in self.due.values()) if chain else 0

    def refresh(self, left: Left) -> tuple[int, int]:
        """The positions that it owns and the GPU still has, from the first to behind the last one.

        The GPU evicts the last of them first. 0 and 0: there are none, and it is forgotten.
        """
        low = start = self._first_owned(left)
        high = stop = len(left.ids) if left.num_owned else 0
        while low < high:
            middle = (low + high) // 2
            if self._engine.is_intact(left.blocks[middle], left.chain[left.first + middle]):
                low = middle + 1
            else:
                high = middle
        if low == start:
            self.forget(left)
            return 0, 0
        if low < stop:
            self._disown(left, low)
        return left.first + start, left.first + low

    def forget(self, left: Left) -> None:
        """Nothing of it is left."""
        self._disown(left, 0)

    def file_as_due(self, left: Left) -> None:
        """It has its turn."""
        left.pending = None
        del self.line[left.serial]
        self.has_twice.pop(left.serial, None)
        self.due[left.serial] = left
        self.num_due += left.num_owned

    # Positions without slots

    def tail_of(self, left: Left, num_blocks: int) -> Left:
        """Its last so many blocks, as one that is left by itself; or all of it, if there are no more."""
        start, stop = self.refresh(left)
        cut = stop - num_blocks
        if cut <= start:
            return left
        self._judge(left, start, stop)
        at = cut - left.first
        blocks, ids = left.blocks[at:], left.ids[at:]
        is_owned = self._owners[ids] == left.serial
        num_owned = int(np.count_nonzero(is_owned))
        tail = Left(left.pending, left.chain, self._next_serial(), blocks, ids, num_owned, cut)
        tail.paying = left.paying
        self._claim(tail)
        self._owners[ids[is_owned]] = tail.serial
        left.num_owned -= num_owned
        left.blocks, left.ids = left.blocks[:at], left.ids[:at]
        self._claim(left)
        self.line[tail.serial] = tail
        return tail

    def lacking(self, left: Left, start: int, stop: int) -> list[tuple[int, int]]:
        """Stretches of these positions that it owns, and that have no slot. O(1) array work per position."""
        lacks = self._hollow.lacking(left.chain, start, stop)
        lacks &= self._owners[left.ids[start - left.first : stop - left.first]] == left.serial
        if not lacks.any():
            return []  # as nearly always where all has a copy
        edges = start + np.flatnonzero(np.diff(lacks, prepend=False, append=False))
        return [(first, last) for first, last in edges.reshape(-1, 2).tolist()]

    def paying(self, left: Left, start: int, stop: int) -> int:
        """Up to where slots pay for these positions; for all of them if there are slots behind them."""
        depth = self._judge(left, start, stop)
        return stop if depth >= stop or self._hollow.leads_on(left.chain, stop) else depth

    def earns_room(self, claim: Pin | None) -> bool:
        """Whether slots of what the GPU has earn more elsewhere than another copy costs, if it is needed.

        Who has been refused is refused until ``refused`` is cleared.
        """
        if claim is None:
            return not self._is_gapped
        if claim in self.refused or not self._hollow.earns_emptying(claim, self._engine.num_blocks):
            self.refused.add(claim)
            return False
        return True

    def shed(self, num_slots: int) -> None:
        """Have so many slots free, of what the GPU has, too, and evicts last, where that pays.

        Its first positions go first if the pool may lack them, else its last ones.
        """
        shed = self._hollow.empty if self._is_gapped else self._allocator.shedding.shed
        latest = islice(reversed(self.has_twice.values()), _LOOKED_AT)
        for left in list(islice((each for each in latest if each.claim not in self.refused), _ASKED)):
            if not self.earns_room(left.claim):
                continue
            start, stop = self.refresh(left)
            num_slots -= shed(left.chain, start, stop, num_slots) if stop else 0
            if num_slots <= 0:
                break
            self.has_twice.pop(left.serial, None)

    def check_invariants(self) -> None:
        """They stand in the order of their ends, and each has as many blocks as it is the owner of."""
        for each in (self.line, self.due, self.has_twice):
            assert all(left.serial == serial for serial, left in each.items()), f"{each} is filed wrongly"
        assert list(self.line) == sorted(self.line), f"{list(self.line)} are not in order"
        assert self.has_twice.keys() <= self.line.keys(), "one that has had its turn is looked at for room"
        lefts = [*self.line.values(), *self.due.values()]
        serials, counts = np.unique(self._owners, return_counts=True)
        owned = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        owned.pop(0, None)
        assert owned == {left.serial: left.num_owned for left in lefts}, f"{owned} are owned, by {lefts}"
        for left in lefts:
            num_there = int(np.count_nonzero(self._owners[left.ids] == left.serial))
            assert num_there == left.num_owned, f"{left} owns others than its own"
            assert len(left.blocks) == len(left.ids) and left.stop <= len(left.chain), f"{left}"
            assert self._is_gapped or left.claim is None, f"{left} is claimed"
            node = None if left.claim is None else left.claim.node
            assert node is None or node.end <= left.stop, f"{left} claims more than it has"
        num_due = sum(left.num_owned for left in self.due.values())
        assert num_due == self.num_due, f"{num_due} blocks are due, {self.num_due} counted"
        num_remembered = sum(len(left.blocks) for left in lefts)
        assert num_remembered == self._num_remembered, f"{num_remembered}, {self._num_remembered} counted"

    # Private

    def _next_serial(self) -> int:
        self._num_left += 1
        return self._num_left

    def _find(self, serial: int) -> Left:
        found = self.line.get(serial)
        return self.due[serial] if found is None else found

    def _first_owned(self, left: Left) -> int:
        """Which of its blocks is the first that it owns; 0: it owns none.

        In pieces: longer arrays, and ``argmax``, would let go of the interpreter's lock in every step.
        """
        for first in range(0, len(left.ids), _PIECE):
            owned = self._owners[left.ids[first : first + _PIECE]] == left.serial
            at: int = owned.tobytes().find(1)
            if at >= 0:
                return first + at
        return 0

    def _disown(self, left: Left, num_blocks: int) -> None:
        """Nothing of it is left behind its first ``num_blocks``."""
        gone = left.ids[num_blocks:]
        gone = gone[self._owners[gone] == left.serial]
        self._owners[gone] = 0
        self._num_remembered -= len(left.blocks) - num_blocks
        left.blocks, left.ids = left.blocks[:num_blocks], left.ids[:num_blocks]
        self._lose(left, len(gone))
        if left.claim is not None:
            self._claim(left)

    def _lose(self, left: Left, num_blocks: int) -> None:
        left.num_owned -= num_blocks
        if left.serial in self.due:
            self.num_due -= num_blocks
        if not left.num_owned:
            self._num_remembered -= len(left.blocks)
            left.blocks, left.ids = [], left.ids[:0]
            for each in (self.line, self.due, self.has_twice):
                each.pop(left.serial, None)
            if left.claim is not None:
                claim, left.claim = left.claim, None
                self._hollow.end(claim)

    def _claim(self, left: Left) -> None:
        """What it has is claimed, and nothing else any more."""
        keep = None if left.pending is None else left.pending.keep
        before, left.claim = left.claim, self._hollow.claim(left.chain, left.stop, keep)
        if before is not None:
            self._hollow.end(before)

    def _judge(self, left: Left, start: int, stop: int) -> int:
        """Up to where slots pay for what it has, these positions, as it was when somebody asked first."""
        if left.paying is None:
            left.paying = self._hollow.paying(left.chain, start, stop)
        return left.paying

    def _is_twice(self, left: Left) -> bool:
        """Whether any of it is in the pool, too."""
        if self._is_gapped:
            return left.claim is not None and self._hollow.has_slots(left.claim)
        return self._allocator.known_depth(left.chain, left.stop) > 0


def _counts(serials: Ids) -> list[tuple[int, int]]:
    """Each of these numbers, and how often it is there. Of one number, as nearly always, without sorting."""
    if not len(serials):
        return []
    first = int(serials[0])
    if (serials == first).all():
        return [(first, len(serials))]
    found, counts = np.unique(serials, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))
