"""What KV events say of extents where some end at checkpoints: how long each is, which bags are whole."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from allocator import BagEvicted, BagStored, Event, Evicted, Stored
from offload.naming import bag_name
from offload.scheduler.flow import ShortStored, TierEvent
from offload.scheduler.groups import Groups
from offload.scheduler.spelling import Spelling
from offload.scheduler.tiers.names import Grid, Path


class ExtentsNote(NamedTuple):
    """What the events about extents say beside their names.

    Attributes:
        path: that these are names of.
        spelling: of their positions, from the extent ``first`` on; None: it is not known.
        first: index of an extent.
    """

    path: Path
    spelling: Spelling | None = None
    first: int = 0

    def part(self, index: int, num: int, positions: int) -> Spelling | None:
        """Of the prefix extents ``index`` and behind it, ``num`` of them, each of so many positions."""
        if self.spelling is None:
            return None
        start = (index - self.first) * positions
        return self.spelling.part(start, min(start + num * positions, self.spelling.num_positions))


def spelled(events: Iterable[Event], positions: int) -> Iterator[Event]:
    """The same, each with the spelling of just its extents. All are whole: of so many positions."""
    for event in events:
        if isinstance(event, Stored) and isinstance(event.note, ExtentsNote):
            first = event.note.path.names.index(event.hashes[0])
            event = event._replace(note=event.note.part(first, len(event.hashes), positions))
        yield event


class ToldExtents:
    """Turns events about names of extents into those about positions and bags.

    A bag is there with the last of its extents, as all before that are, and gone with that, which goes first.
    Each event ``Stored`` has an ``ExtentsNote``.
    """

    def __init__(self, positions: int) -> None:
        """Nothing was told; ``positions``: of a whole extent."""
        self._positions = positions
        self._bags: dict[bytes, bytes | None] = {}  # extents of bags: the end of what was told with them

    def turned(self, events: Iterable[Event]) -> Iterator[TierEvent]:
        """The same in other words. O(names)."""
        for event in events:
            if isinstance(event, Stored):
                yield from self._stored(event)
            elif isinstance(event, Evicted):
                yield from self._evicted(event.hashes)

    def check_invariants(self) -> None:
        """A checkpoint is told with one extent of its bag."""
        ends = [end for end in self._bags.values() if end is not None]
        assert len(ends) == len(set(ends)), f"{len(ends) - len(set(ends))} checkpoints are told twice"

    def _stored(self, event: Stored) -> Iterator[TierEvent]:
        note, names = event.note, event.hashes
        assert isinstance(note, ExtentsNote), f"{names} are of no path"
        path = note.path
        first = path.names.index(names[0])
        num_whole = path.stop // self._positions if self._positions else 0
        whole = names[: max(0, num_whole - first)]
        if whole:
            yield Stored(whole, event.parent_hash, note.part(first, len(whole), self._positions))
        if first <= num_whole < min(path.num_prefix, first + len(names)):
            parent = path.names[num_whole - 1] if num_whole else None
            last = note.part(num_whole, 1, self._positions)
            yield ShortStored(path.stop % self._positions, path.names[num_whole], parent, last)
        bags = names[max(0, path.num_prefix - first) :]
        self._bags.update(dict.fromkeys(bags))
        if bags and bags[-1] == path.names[-1]:
            self._bags[bags[-1]] = path.end
            yield BagStored(path.stop, [path.end])

    def _evicted(self, names: Sequence[bytes]) -> Iterator[TierEvent]:
        for is_bag, run in groupby(names, key=self._bags.__contains__):
            if not is_bag:
                yield Evicted(list(run))
                continue
            for name in run:
                end = self._bags.pop(name)
                if end is not None:
                    yield BagEvicted(end)


def kept_path(names: Sequence[bytes], num_slots: Sequence[int], grid: Grid, groups: Groups) -> Path:
    """The path that extents of earlier lives are the beginning of; ``num_slots``: of each.

    Without full attention nothing tells how deep a checkpoint is. A bag that is as large as bags get is
    of any depth from ``groups.reach`` on. Of others the path seems to go on, so they are not told.
    O(extents of a bag), and O(extents) to copy them.
    """
    num_prefix = _num_prefix(names, -(-groups.bag_slots // grid.slots)) if grid.columns else 0
    if not num_prefix:
        end, num_bag = bag_name(names[0], 0), sum(num_slots)
        if num_bag == groups.bag_slots == groups.num_in_bag(groups.reach):
            return Path(list(names), groups.reach, 0, num_bag, end)
        return Path([*names, bag_name(end, len(names))], 0, 0, num_bag, end)
    end, stop = names[num_prefix - 1], (num_prefix - 1) * grid.positions
    stop += num_slots[num_prefix - 1] // grid.columns
    num_bag = groups.num_in_bag(stop) if num_prefix < len(names) else 0
    bag = [bag_name(end, index) for index in range(-(-num_bag // grid.slots))]
    return Path([*names[:num_prefix], *bag], stop, num_prefix, num_bag, end)


def _num_prefix(names: Sequence[bytes], most: int) -> int:
    """How many of them are not of a bag, which has ``most`` extents at most.

    One of a bag tells the name before the bag by its number there.
    """
    last = len(names) - 1
    for index in range(min(last, most)):
        if bag_name(names[last], index) == names[last - 1 - index]:
            return last - index
    return len(names)
