"""A restore: all loads for one admission of one request."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from allocator import Pin
from offload.messages import Ids


class Droppable(Protocol):
    """Lets go of what is wrong, as the allocator does."""

    def drop(self, chain: Sequence[bytes], position: int) -> None: ...
    def drop_bag(self, chain: Sequence[bytes], depth: int) -> None: ...


@dataclass(slots=True, eq=False)
class Restore:
    """All loads for one admission of one request, which the engine waits for as a whole.

    Attributes:
        restore_id: the id of its first job.
        request: who gets the KV.
        first: chain position of the first block.
        chain: prefix hashes of the request's positions, up to the last one loaded.
        block_ids: GPU blocks that are filled: ``columns`` for each position, then those of a bag.
        columns: blocks for a chain position.
        is_whole: nobody can use less than all of it.
        pin: holds the slots; None while a plan under way does, and where nothing is left to hold.
        follows: it began while some of its slots were being filled.
        num_coming: plans that fill some of them, and have not ended.
        is_lost: some of its slots have left the pool; seals tell if others fill them.
        bad: the first block whose bytes turned out to be bad before these have ended.
        parts_left: its load jobs in flight.
        num_blocks_landed: leading blocks that are complete on all ranks.
        num_shared: leading positions that the GPU's prefix cache has been given.
        followers: requests that share a beginning: how many positions of it.
        depths: the different ones among these numbers, in order.
        is_void: a part has failed; nobody may wait for the rest.
        is_cancelled: the bytes are no longer wanted, though nothing may be wrong with them.
        was_stuck: a part was given up, so the engine computes all of it again.
        is_sound: nothing has gone wrong. What is not good, if anything, did not come from below.
    """

    request: Any
    first: int
    chain: list[bytes]
    block_ids: Ids
    columns: int = 1
    is_whole: bool = False
    pin: Pin | None = None
    follows: bool = False
    num_coming: int = 0
    is_lost: bool = False
    bad: int | None = None
    restore_id: int = -1
    parts_left: int = 0
    num_blocks_landed: int = 0
    num_shared: int = 0
    followers: dict[str, int] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)
    is_void: bool = False
    is_cancelled: bool = False
    was_stuck: bool = False
    is_sound: bool = True
    _ended: dict[int, int] = field(default_factory=dict)  # ended parts: where from, up to where good

    @property
    def num_positions(self) -> int:
        """How many it brings."""
        return len(self.chain) - self.first

    @property
    def num_landed(self) -> int:
        """Leading positions of which somebody can make use."""
        if self.is_whole:
            return self.num_positions if self.num_blocks_landed == len(self.block_ids) else 0
        return self.num_blocks_landed // self.columns

    def position_of(self, index: int) -> int | None:
        """The chain position that block ``index`` of it belongs to; None: it is one of the bag."""
        num_prefix = self.columns * self.num_positions
        return self.first + index // self.columns if index < num_prefix else None

    def drop_from(self, holder: Droppable, index: int) -> None:
        """The bytes for block ``index`` of it are bad: what they were read from is to let go of them."""
        position = self.position_of(index)
        if position is None:
            holder.drop_bag(self.chain, len(self.chain))
        else:
            holder.drop(self.chain, position)

    def brings(self, chain: Sequence[bytes], position: int) -> bool:
        """Whether the block of ``chain`` at ``position`` is one of these. O(1)."""
        ours = self.chain
        return self.first <= position < min(len(ours), len(chain)) and ours[position] == chain[position]

    def num_common(self, chain: Sequence[bytes], known: int = 0) -> int:
        """How many leading blocks are also of ``chain``, at least those before position ``known``.

        O(log n): equal hashes have equal beginnings.
        """
        ours = self.chain
        low, high = max(self.first, known), min(len(ours), len(chain))
        if low < high and ours[high - 1] == chain[high - 1]:  # as most of those who wait ask for all of it
            return high - self.first
        while low < high:  # bisect with a key takes three times as long
            middle = (low + high) // 2
            if ours[middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        return low - self.first

    def follow(self, request_id: str, depth: int) -> None:
        """That request waits for the first ``depth`` blocks. O(log n) and a move of other depths."""
        self.followers[request_id] = depth
        at = bisect_right(self.depths, depth)
        if not at or self.depths[at - 1] != depth:
            insort(self.depths, depth)

    @property
    def num_wanted(self) -> int:
        """How many leading blocks to share now: they have landed, and somebody waits for so many.

        Once no part is left, nobody has to wait for more. O(log n).
        """
        at = bisect_right(self.depths, self.num_landed)
        if not self.parts_left and at < len(self.depths):
            return self.num_landed
        return self.depths[at - 1] if at else 0

    def end_part(self, start: int, good_stop: int) -> None:
        """The part that began at ``start`` has ended, good up to ``good_stop``."""
        self.parts_left -= 1
        self._ended[start] = good_stop
        while (stop := self._ended.get(self.num_blocks_landed, 0)) > self.num_blocks_landed:
            self.num_blocks_landed = stop


class LoadPart(NamedTuple):
    """Blocks ``start <= i < stop`` of a restore, which one job loads."""

    restore: Restore
    start: int
    stop: int
