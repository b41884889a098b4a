"""What is on its way into the pool from below, and the restores that follow it to the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator import CpuOffloadingBlockAllocator, Pin, StorePlan
from offload.messages import Ids
from offload.scheduler.fetched import Fetched
from offload.scheduler.restore import Restore


@dataclass(slots=True, eq=False)
class Arrival:
    """A plan that a place below fills.

    Attributes:
        plan: its positions, and its bag.
        end: prefix hash of the last position.
        cuts: where its jobs begin, in blocks of the plan.
        followers: restores that read what it brings.
        is_over: it has ended, or will not be whole.
    """

    plan: StorePlan
    end: bytes
    cuts: Sequence[int]
    followers: list[Restore] = field(default_factory=list)
    is_over: bool = False


class Held(NamedTuple):
    """What a restore reads.

    Attributes:
        slots: of its positions, ``int64[positions, columns]``.
        bag: of its bag; None without one.
        pin: on them; None where some are being filled.
        path: the plans that fill them.
        cuts: where jobs of these begin, in blocks of the restore.
    """

    slots: Ids
    bag: Ids | None
    pin: Pin | None
    path: Sequence[Arrival] = ()
    cuts: Sequence[int] = ()


class Arrivals:
    """Plans in flight by where they begin and end, and promises that restores may follow them.

    A restore that follows reads slots that are being filled. Each rank begins to copy them when they are, so
    no step of the engine lies between the two copies. Until its plans have ended it needs no pin: nothing is
    evicted that leads to what is being filled. Then it gets one. Should a plan fail, the restore ends short.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator, most_blocks: int) -> None:
        """Nothing is on its way. ``most_blocks`` of the GPU may be held by restores that follow."""
        self._allocator = allocator
        self.fetched = Fetched(allocator.num_slots)
        self._most_blocks = most_blocks
        self._by_first: dict[bytes, Arrival] = {}
        self._by_end: dict[bytes, Arrival] = {}  # those with a bag
        self._num_blocks = 0  # of the GPU, that restores which follow hold

    def add(self, arrival: Arrival) -> None:
        """It is on its way."""
        if arrival.plan.bag is not None:
            self._by_end[arrival.end] = arrival
        else:
            self._by_first[arrival.plan.hashes[0]] = arrival

    def end(self, arrival: Arrival) -> None:
        """It has landed, or will not: who follows needs a pin from now on, on what there is."""
        self._forget(arrival)
        for restore in arrival.followers:
            restore.num_coming -= 1
            if restore.bad is not None and not restore.is_cancelled:
                restore.drop_from(self._allocator, restore.bad)  # which had nothing to drop then
            if not restore.num_coming:
                self._pin(restore)

    def give_up(self, arrival: Arrival) -> None:
        """It will not be whole, and has not ended: nobody follows it any more, and none goes past it."""
        self._forget(arrival)
        for restore in arrival.followers:
            self._pin(restore)

    def may_follow(self, chain: Sequence[bytes], stop: int, num_blocks: int) -> bool:
        """Whether a restore of the first ``stop`` positions may begin now, into so many GPU blocks.

        All of them are resident or on their way, and few enough follow.
        """
        return self._num_blocks + num_blocks <= self._most_blocks and bool(self.path(chain, stop))

    def path(self, chain: Sequence[bytes], stop: int) -> list[Arrival]:
        """Those that bring what is not resident of the first ``stop`` positions; none if some do not come.

        With bags it is one that ends there. O(arrivals).
        """
        depth = self._allocator.resident_depth(chain[:stop])
        last = self._by_end.get(chain[stop - 1])
        if last is not None and last.plan.stop == stop:
            return [last] if last.plan.start <= depth else []
        found = []
        while depth < stop:
            arrival = self._by_first.get(chain[depth])
            if arrival is None:
                return []
            found.append(arrival)
            depth = arrival.plan.stop
        return found

    def slots(self, chain: Sequence[bytes], positions: range) -> Held:
        """Slots of these positions, pinned if all are resident; else they may be followed."""
        first, stop = positions.start, positions.stop
        path = self.path(chain, stop) if self._by_first or self._by_end else []
        if not path:
            pin = self._allocator.pin(chain, first, stop)
            return Held(pin.slots, pin.bag, pin)
        begin, columns = path[0].plan.start, self._allocator.columns
        rows, cuts = [self._allocator.lookup(chain[:begin]).slots[first:]], []
        for arrival in path:
            plan = arrival.plan
            rows.append(plan.slots[max(first - plan.start, 0) : stop - plan.start])
            cuts += [(plan.start - first) * columns + cut for cut in arrival.cuts]
        return Held(np.concatenate(rows), path[-1].plan.bag, None, path, cuts)

    def follow(self, restore: Restore, path: Sequence[Arrival]) -> None:
        """That restore reads what these bring."""
        if not path:
            return
        restore.follows = True
        restore.num_coming = len(path)
        self._num_blocks += len(restore.block_ids)
        for arrival in path:
            arrival.followers.append(restore)

    def left(self, restore: Restore) -> None:
        """A restore that followed has ended."""
        self._num_blocks -= len(restore.block_ids)

    def clear(self) -> None:
        """Nothing that is under way is of use."""
        for arrival in (*self._by_first.values(), *self._by_end.values()):
            arrival.is_over = True
        self._by_first.clear()
        self._by_end.clear()

    def check_invariants(self, restores: Sequence[Restore]) -> None:
        """Blocks of those of these restores that follow are counted, and arrivals are filed right."""
        num_blocks = sum(len(restore.block_ids) for restore in restores if restore.follows)
        assert num_blocks <= self._most_blocks, f"{num_blocks} of {self._most_blocks} blocks wait for tiers"
        assert num_blocks == self._num_blocks, (
            f"{num_blocks} blocks wait for tiers, {self._num_blocks} counted"
        )
        for restore in restores:
            is_whole = (
                restore.pin is not None and len(restore.pin.slots) == len(restore.chain) - restore.first
            )
            is_held = is_whole or restore.num_coming or restore.is_lost or restore.is_cancelled
            assert is_held, f"nothing holds what {restore} reads"
        over = [each for each in (*self._by_first.values(), *self._by_end.values()) if each.is_over]
        assert not over, f"{over} are over, and restores may follow them"
        for first, arrival in self._by_first.items():
            assert arrival.plan.hashes[0] == first, f"{arrival} is filed under {first!r}"
        for end, arrival in self._by_end.items():
            assert arrival.end == end, f"{arrival} is filed under {end!r}"

    # Private

    def _forget(self, arrival: Arrival) -> None:
        arrival.is_over = True
        if arrival.plan.bag is not None:
            if self._by_end.get(arrival.end) is arrival:
                del self._by_end[arrival.end]
        elif self._by_first.get(arrival.plan.hashes[0]) is arrival:
            del self._by_first[arrival.plan.hashes[0]]

    def _pin(self, restore: Restore) -> None:
        """A pin on what is resident of it: nothing that comes protects it any more."""
        if restore.pin is not None or restore.is_cancelled or not restore.parts_left:
            return
        chain, allocator = restore.chain, self._allocator
        depth = allocator.resident_depth(chain)
        has_all = allocator.usable_depth(chain, len(chain)) == len(chain)
        restore.is_lost = not has_all
        if has_all or (depth > restore.first and not restore.is_whole):
            restore.pin = allocator.pin(chain, restore.first, depth)
