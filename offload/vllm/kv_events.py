"""KV events as vLLM publishes them, so many in a step and no more."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from allocator import BagEvicted, BagStored, Evicted, Stored
from offload.messages import NAME_BYTES
from offload.scheduler.flow import ShortStored, TierEvent
from offload.scheduler.groups import Kind
from offload.scheduler.side import SchedulerSide
from offload.scheduler.spelling import Spelling
from offload.vllm.groups import EventGroup

MAX_HASHES = 1 << 14
"""Prefix hashes published in one step, but for the rest of a bag. The next step goes on with the others."""

_EVENT_COST = 32  # an event of its own costs as much as so many hashes
_INT_BYTES = 8
_UNSPELLED = Spelling((), 1)
_OF_BAGS = (BagStored, BagEvicted)
_AT_ONCE = (*_OF_BAGS, ShortStored)


class EventPlace(NamedTuple):
    """Where blocks are, in vLLM's words.

    Attributes:
        medium: the kind of memory.
        locality: ``LOCAL`` or ``REMOTE``; None: not said.
    """

    medium: str
    locality: str | None = None


POOL_PLACE = EventPlace("CPU")
DISK_PLACE = EventPlace("STORAGE", "LOCAL")
STORE_PLACE = EventPlace("STORAGE", "REMOTE")


class _Part(NamedTuple):
    """Hashes of one chain that groups have, or have no longer; ``spelling``: of just these, if known."""

    groups: Sequence[EventGroup]
    block_size: int
    hashes: Sequence[bytes]
    is_stored: bool
    parent: bytes | None = None
    spelling: Spelling | None = None


class _BagBlocks:
    """Blocks that bags have of groups that need the same: several bags may have the same block."""

    def __init__(self, groups: Sequence[EventGroup], position_tokens: int) -> None:
        self.groups = groups
        self._group = groups[0].group
        self._position_tokens = position_tokens
        self._num_bags = Counter[bytes]()

    def add(self, bag: BagStored) -> list[_Part]:
        """The blocks that no other bag has, in runs: bags of forks have any that come before a fork."""
        hashes = self._hashes(bag)
        parts = []
        before = len(bag.hashes) - len(hashes) - 1
        parent = bag.hashes[before] if before >= 0 else None
        is_spelled = self._group.block_size == self._position_tokens
        spelling = bag.note if is_spelled and isinstance(bag.note, Spelling) else None
        num_left = len(hashes)
        for is_known, run in groupby(hashes, key=self._num_bags.__contains__):
            blocks = list(run)
            num_left -= len(blocks)
            if not is_known:
                own = None if spelling is None else spelling.ending(len(blocks), num_left)
                parts.append(_Part(self.groups, self._group.block_size, blocks, True, parent, own))
            parent = blocks[-1]
        self._num_bags.update(hashes)
        return parts

    def remove(self, bag: BagStored) -> list[_Part]:
        """The blocks that no bag has any more."""
        hashes = self._hashes(bag)
        gone = [each for each in hashes if self._num_bags[each] == 1]
        self._num_bags.subtract(hashes)
        for each in gone:
            del self._num_bags[each]
        return [_Part(self.groups, self._group.block_size, gone, False)] if gone else []

    def check_invariants(self, bags: Iterable[BagStored]) -> None:
        """``bags`` are all there are."""
        counts = Counter(each for bag in bags for each in self._hashes(bag))
        assert counts == self._num_bags, f"{self._num_bags} counted, not {counts}"
        assert 0 not in self._num_bags.values(), f"counted though no bag has it: {self._num_bags}"

    def _hashes(self, bag: BagStored) -> list[bytes]:
        """Of its blocks that end where a position ends: others have no hash that is known here."""
        needed = self._group.needed(bag.depth * self._position_tokens)
        first = needed.start * self._group.block_size // self._position_tokens
        num = bag.depth - first
        assert num <= len(bag.hashes), f"{num} blocks of a bag have a name, {len(bag.hashes)} were told"
        return bag.hashes[len(bag.hashes) - num :]


class _BagEnds(_BagBlocks):
    """The same where each bag is told as a whole, by the hash of its last position: others are not known."""

    def add(self, bag: BagStored) -> list[_Part]:
        num_tokens = self._num_tokens(bag)
        return [_Part(self.groups, num_tokens, bag.hashes, True)] if num_tokens else []

    def remove(self, bag: BagStored) -> list[_Part]:
        num_tokens = self._num_tokens(bag)
        return [_Part(self.groups, num_tokens, bag.hashes, False)] if num_tokens else []

    def check_invariants(self, bags: Iterable[BagStored]) -> None:
        """Bags have one hash each."""
        assert all(len(bag.hashes) == 1 for bag in bags), f"{list(bags)} are not told by their ends"

    def _num_tokens(self, bag: BagStored) -> int:
        """That it has of the group."""
        return len(self._group.needed(bag.depth * self._position_tokens)) * self._group.block_size


class KvEventStream:
    """Turns the allocator's events into vLLM's, in their order.

    They name the group, as those of the GPU's cache do, and its kind and window. ``block_size`` tokens up to
    a hash are there. With full attention that is a position, though blocks of the group may be smaller.
    With windows and states it is a block. Of several in a position the last one is published: hashes of the
    others are not known here. What several bags have is published once, and removed with the last of them.

    Token ids are those of all blocks of an event, where these are known. They are not for blocks shorter than
    a position, whose hashes are not in one chain here, and for bags below the pool.

    A tier's unit is the extent: its hash is that of its last block, and its size the tokens of all of them. A
    bag there is such a unit for each group, with as many tokens as the group needs.

    A storm of events, such as a reset of a large pool, is spread over steps: an engine step waits until its
    hashes are converted. Removals that follow each other are one event for each group.
    """

    def __init__(
        self,
        groups: Sequence[EventGroup],
        position_tokens: int,
        place: EventPlace = POOL_PLACE,
        extent_positions: int | None = None,
    ) -> None:
        """Nothing is published.

        Args:
            groups: that events name.
            position_tokens: tokens of a position, a multiple of the groups' blocks.
            place: where.
            extent_positions: of a whole extent of a tier; None: it is the pool.
        """
        self._place = place
        self._unit_tokens = position_tokens * (1 if extent_positions is None else extent_positions)
        of_group = _BagBlocks if extent_positions is None else _BagEnds
        self._prefix_groups = [each for each in groups if each.group.kind is Kind.FULL]
        self._position_tokens = position_tokens
        others = [each for each in groups if each.group.kind is not Kind.FULL]
        self._of_bags = [
            of_group([each for each in others if each.group == alike], position_tokens)
            for alike in dict.fromkeys(each.group for each in others)
        ]
        self._bags: dict[bytes, BagStored] = {}  # by the last of their hashes
        self._waiting: deque[TierEvent] = deque()
        self._begun = 0  # hashes of the first waiting event that are published

    @property
    def is_behind(self) -> bool:
        """Whether there is more to publish than one step took."""
        return bool(self._waiting)

    def take(self, news: Iterable[TierEvent]) -> list[KVCacheEvent]:
        """What to publish now, after ``news``. O(news + MAX_HASHES)."""
        self._waiting.extend(news)
        events: list[KVCacheEvent] = []
        if not self._waiting:
            return events
        parts = self._next_parts()
        hashes = _converted([each for part in parts for each in part.hashes])
        removals: dict[int, BlockRemoved] = {}  # since the last store, by group
        at = 0
        for part in parts:
            stop = at + len(part.hashes)
            for group in part.groups:
                if part.is_stored:
                    removals.clear()
                    events.append(_stored(group, part, hashes[at:stop], self._place))
                elif group.group_id in removals:
                    removals[group.group_id].block_hashes.extend(hashes[at:stop])
                else:
                    removals[group.group_id] = _removed(group, hashes[at:stop], self._place)
                    events.append(removals[group.group_id])
            at = stop
        return events

    def check_invariants(self) -> None:
        """Only the first waiting event may be published in part, and none is published whole."""
        event = self._waiting[0] if self._waiting else None
        first = 0 if event is None or isinstance(event, _AT_ONCE) else len(event.hashes)
        assert 0 <= self._begun < max(first, 1), f"{self._begun} of {first} hashes are published"
        for blocks in self._of_bags:
            blocks.check_invariants(self._bags.values())

    def _next_parts(self) -> list[_Part]:
        """Take what one step publishes from what waits."""
        parts: list[_Part] = []
        room = MAX_HASHES
        num_groups = len(self._prefix_groups)
        while self._waiting and room > 0:
            event = self._waiting[0]
            if isinstance(event, _OF_BAGS):
                bag, of_bag = self._of_bag(event)
                parts += of_bag
                room -= (len(bag.hashes) + _EVENT_COST) * len(self._of_bags)
                room -= sum((len(part.hashes) + _EVENT_COST) * len(part.groups) for part in of_bag)
            elif isinstance(event, ShortStored):
                num_tokens = event.num_positions * self._position_tokens
                spelling = event.note if isinstance(event.note, Spelling) else None
                parts.append(
                    _Part(self._prefix_groups, num_tokens, [event.name], True, event.parent, spelling)
                )
                room -= (1 + _EVENT_COST) * num_groups
            elif num_groups:
                parts.append(self._of_positions(event, room // num_groups or 1))
                room -= (len(parts[-1].hashes) + _EVENT_COST) * num_groups
            else:
                room -= 1
            if not self._begun:
                self._waiting.popleft()
        return parts

    def _of_positions(self, event: Stored | Evicted, room: int) -> _Part:
        """What comes next of ``event``, up to so many hashes; ``_begun`` is 0 after the last of them."""
        begun = self._begun
        hashes = event.hashes[begun : begun + room]
        self._begun = begun + room if begun + room < len(event.hashes) else 0
        if isinstance(event, Evicted):
            return _Part(self._prefix_groups, self._unit_tokens, hashes, False)
        parent = event.hashes[begun - 1] if begun else event.parent_hash
        spelling = None
        if isinstance(event.note, Spelling):  # that of a plan may begin before its positions
            num = self._unit_tokens // self._position_tokens
            num_behind = event.num_behind + len(event.hashes) - begun - len(hashes)
            spelling = event.note.ending(len(hashes) * num, num_behind * num)
        return _Part(self._prefix_groups, self._unit_tokens, hashes, True, parent, spelling)

    def _of_bag(self, event: BagStored | BagEvicted) -> tuple[BagStored, list[_Part]]:
        """The bag, and what to publish of it."""
        if isinstance(event, BagStored):
            self._bags[event.hashes[-1]] = event
            return event, [part for blocks in self._of_bags for part in blocks.add(event)]
        bag = self._bags.pop(event.prefix_hash)
        return bag, [part for blocks in self._of_bags for part in blocks.remove(bag)]


class KvEvents:
    """Events of an engine's pool, of the tiers that it owns, and of what it writes to stores."""

    def __init__(
        self, groups: Sequence[EventGroup], position_tokens: int, side: SchedulerSide, hash_bytes: int
    ) -> None:
        """``hash_bytes``: of a prefix hash."""
        self._side = side
        self._hash_bytes = hash_bytes
        self._pool = KvEventStream(groups, position_tokens)
        self._tiers = [
            (
                below.events,
                KvEventStream(
                    groups,
                    position_tokens,
                    STORE_PLACE if below.events.is_shared else DISK_PLACE,
                    below.events.positions,
                ),
            )
            for below in side.below
            if below.events is not None
        ]

    @property
    def is_behind(self) -> bool:
        """Whether there is more to publish, without anything that happens."""
        is_listing = self._side.allocator.is_listing or any(each.is_listing() for each, _ in self._tiers)
        return is_listing or self._pool.is_behind or any(stream.is_behind for _, stream in self._tiers)

    def take(self) -> list[KVCacheEvent]:
        """What to publish now. Cost as of ``KvEventStream.take``, for each place."""
        events = self._pool.take(self._side.allocator.take_events())
        for below, stream in self._tiers:
            events += stream.take(map(self._named, below.take()))
        return events

    def check_invariants(self) -> None:
        """Those of all streams."""
        self._pool.check_invariants()
        for _, stream in self._tiers:
            stream.check_invariants()

    def _named(self, event: TierEvent) -> TierEvent:
        """With prefix hashes in place of names, which are as long as the longest hash."""
        size = self._hash_bytes
        if size == NAME_BYTES:
            return event
        match event:
            case Stored():
                hashes = [each[:size] for each in event.hashes]
                return event._replace(hashes=hashes, parent_hash=_cut(event.parent_hash, size))
            case ShortStored():
                return event._replace(name=event.name[:size], parent=_cut(event.parent, size))
            case BagStored():
                return BagStored(event.depth, [each[:size] for each in event.hashes])
            case BagEvicted():
                return BagEvicted(event.prefix_hash[:size])
            case Evicted():
                return Evicted([each[:size] for each in event.hashes])


def _cut(prefix_hash: bytes | None, size: int) -> bytes | None:
    return None if prefix_hash is None else prefix_hash[:size]


def _stored(group: EventGroup, part: _Part, hashes: list[Any], place: EventPlace) -> BlockStored:
    spelling = part.spelling or _UNSPELLED
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if part.parent is None else maybe_convert_block_hash(BlockHash(part.parent)),
        token_ids=list(spelling.token_ids),
        block_size=part.block_size,
        lora_id=spelling.lora_id,
        medium=place.medium,
        lora_name=spelling.lora_name,
        extra_keys=None if spelling.extra_keys is None else list(spelling.extra_keys),
        group_idx=group.group_id,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.window,
        locality=place.locality,
    )


def _removed(group: EventGroup, hashes: list[Any], place: EventPlace) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=hashes, medium=place.medium, group_idx=group.group_id, locality=place.locality
    )


def _converted(hashes: Sequence[bytes]) -> list[Any]:
    """``maybe_convert_block_hash`` of each, all at once: as bytes, or as the last 64 bits."""
    if not hashes or not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return list(hashes)
    size = len(hashes[0])
    content = b"".join(hashes)
    if size < _INT_BYTES or len(content) != size * len(hashes):
        return [maybe_convert_block_hash(BlockHash(each)) for each in hashes]
    rows = np.frombuffer(content, dtype=np.uint8).reshape(len(hashes), size)
    return rows[:, -_INT_BYTES:].copy().view(">u8")[:, 0].tolist()  # type: ignore[no-any-return]
