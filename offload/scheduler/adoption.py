"""What a pool that outlived its engine holds: what all ranks have alike, as chains that make sense."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from allocator import CpuOffloadingBlockAllocator
from offload.messages import NAME_BYTES, Ids, Kept, PoolFacts
from offload.naming import BAG, WIDTH_SHIFT, NameIndex, keys_of
from offload.scheduler.groups import Groups
from offload.scheduler.tails import tails_of

logger = logging.getLogger(__name__)


class Stretch(NamedTuple):
    """Positions of a chain to be stored at once, and the bag of a checkpoint behind them.

    Attributes:
        hashes: prefix hashes, from the first of the chain on.
        num_bag: slots of the bag; None: there is no checkpoint.
        slots: that are to be filled, in the order in which a fresh pool hands them out.
    """

    hashes: list[bytes]
    num_bag: int | None
    slots: Ids


@dataclass(frozen=True, slots=True)
class Adoption:
    """What is adopted.

    Attributes:
        epoch: of this life.
        generations: of each slot, ``int64[slots]``; -1: it holds nothing.
        stretches: in the order in which they are to be stored.
        order: of all slots, those of the stretches first, then what holds nothing, and the oldest.
    """

    epoch: int
    generations: Ids
    stretches: Sequence[Stretch]
    order: Ids

    @property
    def num_slots(self) -> int:
        """That hold something."""
        return int((self.generations >= 0).sum())

    def into(self, allocator: CpuOffloadingBlockAllocator) -> None:
        """Let a fresh pool, which hands out slots in that order, have it."""
        for hashes, num_bag, slots in self.stretches:
            plan = allocator.plan_store(hashes, len(hashes), num_bag=num_bag)
            is_so = plan is not None and np.array_equal(plan.all_slots, slots)
            assert plan is not None and is_so, f"{slots} are adopted as {plan}"
            allocator.commit(plan)
        logger.info("%d blocks of the CPU pool are adopted", self.num_slots)


def adopt(facts: Sequence[PoolFacts], num_slots: int, groups: Groups) -> Adoption:
    """Find out what a pool of so many slots holds. O(slots), some loops in Python; once, at start.

    Of several slots of one name the newest count. What has no parent is free, and so is what is behind the
    last checkpoint of a model that needs one.
    """
    kept = _agreed(facts, num_slots)
    stretches = list(_stretches(kept, groups))
    taken: Ids = np.concatenate([np.zeros(0, dtype=np.int64), *(each.slots for each in stretches)])
    is_free = np.ones(num_slots, dtype=np.bool_)
    is_free[taken] = False
    generations: Ids = np.full(num_slots, -1, dtype=np.int64)
    generations[kept.slots] = kept.generations
    generations[is_free] = -1
    epoch = max(fact.epoch for fact in facts)
    oldest: Ids = np.full(num_slots, -1, dtype=np.int64)
    oldest[kept.slots] = kept.generations
    free = np.flatnonzero(is_free)
    free = free[np.argsort(oldest[free], kind="stable")]
    return Adoption(epoch, generations, stretches, np.concatenate([taken, free]))


def _agreed(facts: Sequence[PoolFacts], num_slots: int) -> Kept:
    """What all ranks say alike."""
    first, *others = (_within(fact.kept, num_slots) for fact in facts)
    for other in others:
        if not np.array_equal(first.slots, other.slots):
            both = np.intersect1d(first.slots, other.slots, assume_unique=True)
            first, other = first.rows(np.isin(first.slots, both)), other.rows(np.isin(other.slots, both))
        same = (first.generations == other.generations) & (first.marks == other.marks)
        same &= (first.names == other.names).all(axis=1) & (first.parents == other.parents).all(axis=1)
        first = first if same.all() else first.rows(same)
    return first


def _within(kept: Kept, num_slots: int) -> Kept:
    is_there = kept.slots < num_slots
    return kept if is_there.all() else kept.rows(is_there)


class _Positions(NamedTuple):
    """Positions that have all of their slots, each name once, the oldest first.

    Attributes:
        hashes: prefix hash of each.
        parents: which of them is before it, ``int64[n]``; a constant of ``naming`` if none is.
        slots: of each, ``int64[n, columns]``.
        bags: slots of the bags behind some of them.
    """

    hashes: list[bytes]
    parents: Ids
    slots: Ids
    bags: dict[int, Ids]


def _positions(kept: Kept, columns: int) -> _Positions:
    """Put slots together that are of one name and one job."""
    numbers, is_bag = kept.marks & (BAG - 1), (kept.marks & BAG) != 0
    order = np.lexsort((numbers, keys_of(kept.names), kept.generations, is_bag))
    kept, numbers, is_bag = kept.rows(order), numbers[order], is_bag[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (kept.names[1:] != kept.names[:-1]).any(axis=1)
    is_first[1:] |= (kept.generations[1:] != kept.generations[:-1]) | (is_bag[1:] != is_bag[:-1])
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(starts, len(order)))
    is_next = numbers == np.arange(len(order)) - np.repeat(starts, sizes)
    is_whole = np.logical_and.reduceat(is_next, starts) if len(starts) else is_next

    firsts = starts[is_whole & ~is_bag[starts] & (sizes == columns)]
    newest = keys_of(kept.names[firsts])[::-1]
    firsts = firsts[np.sort(len(firsts) - 1 - np.unique(newest, return_index=True)[1])]
    names = kept.names[firsts]
    index = NameIndex(names)
    bags = is_whole & is_bag[starts]
    ends = index.find(kept.names[starts[bags]])
    content, width = names.tobytes(), int(kept.marks[firsts[:1]].sum()) >> WIDTH_SHIFT
    return _Positions(
        [content[at : at + width] for at in range(0, len(content), NAME_BYTES)],
        index.find(kept.parents[firsts]),
        kept.slots[firsts[:, None] + np.arange(columns)],
        {
            end: kept.slots[start : start + size]
            for end, start, size in zip(
                ends.tolist(), starts[bags].tolist(), sizes[bags].tolist(), strict=True
            )
            if end >= 0
        },
    )


def _stretches(kept: Kept, groups: Groups) -> Iterator[Stretch]:
    positions = _positions(kept, groups.columns)
    is_placed = bytearray(len(positions.hashes))
    num_in_bag = cache(groups.num_in_bag)
    nothing: Ids = np.zeros(0, dtype=np.int64)
    tails = tails_of(positions.parents)
    for chain, start in zip(tails.wholes(tails.rows.tolist()), tails.depths.tolist(), strict=True):
        depths = [len(chain)]
        if groups.has_bags:  # it takes a bag to go on, or none is needed there
            behind = enumerate(chain[start:], start + 1)
            depths = [depth for depth, at in behind if len(positions.bags.get(at, ())) == num_in_bag(depth)]
        hashes = [positions.hashes[each] for each in chain]
        for depth in depths:
            first = depth
            while first and not is_placed[chain[first - 1]]:
                first -= 1
                is_placed[chain[first]] = True
            slots = positions.slots[chain[first:depth]].reshape(-1)
            bag = positions.bags.get(chain[depth - 1], nothing) if groups.has_bags else nothing
            num_bag = len(bag) if groups.has_bags else None
            yield Stretch(hashes[:depth], num_bag, np.concatenate([slots, bag]))
