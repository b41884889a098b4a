"""Slow, obvious models of the allocator's stateful classes: one entry per slot, per chain position.

No segments, no borders, no split: what takes the real classes thought is a loop over everything here.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from allocator.slot_pool import SlotState


class SlotPoolModel:
    """A list of free slots, used as a stack, and a dict of states."""

    def __init__(self, capacity: int) -> None:
        self.free = list(range(capacity))[::-1]
        self.state = dict.fromkeys(range(capacity), SlotState.FREE)
        self.closed: set[int] = set()

    def take(self, num_slots: int) -> list[int]:
        taken = [self.free.pop() for _ in range(num_slots)]
        self.state.update(dict.fromkeys(taken, SlotState.FILLING))
        return taken

    def move(self, slots: Iterable[int], target: SlotState) -> None:
        """The first of ``slots`` is the first that ``take`` hands out again."""
        for slot in list(slots)[::-1]:
            is_gone = target is SlotState.FREE and slot in self.closed
            self.state[slot] = SlotState.WITHDRAWN if is_gone else target
            if target is SlotState.FREE and not is_gone:
                self.free.append(slot)

    def close(self, slots: Iterable[int]) -> None:
        """Free ones are withdrawn now, others when they become free."""
        self.closed.update(slots)
        gone = [slot for slot in self.free if slot in self.closed]
        self.state.update(dict.fromkeys(gone, SlotState.WITHDRAWN))
        self.free = [slot for slot in self.free if slot not in self.closed]

    def open(self, slots: list[int]) -> None:
        """Those withdrawn are free again, the first of them first."""
        self.closed.difference_update(slots)
        self.move([slot for slot in slots if self.state[slot] is SlotState.WITHDRAWN], SlotState.FREE)

    def slots_in(self, state: SlotState) -> list[int]:
        return [slot for slot, its_state in self.state.items() if its_state is state]


@dataclass(eq=False)
class Position:
    """One chain position with slots. Compared by identity: stored again, it is another one."""

    prefix_hash: bytes
    parent: "Position | None"
    slots: tuple[int, ...]
    resident: bool = False
    last_use: int = 0

    @property
    def path(self) -> list["Position"]:
        """The positions from the start of the chain up to this one."""
        return [*(self.parent.path if self.parent else []), self]


class TreeModel:
    """Chain positions by prefix hash, each knowing the one before it."""

    def __init__(self) -> None:
        self.positions: dict[bytes, Position] = {}

    def known(self, chain: Iterable[bytes]) -> list[Position]:
        """The leading positions of ``chain`` that have slots."""
        return [self.positions[each] for each in takewhile(self.positions.__contains__, chain)]

    def resident(self, chain: Iterable[bytes]) -> list[Position]:
        return list(takewhile(lambda position: position.resident, self.known(chain)))

    def rows(self, chain: Sequence[bytes], start: int, stop: int) -> list[list[int]]:
        return [list(position.slots) for position in self.known(chain)[start:stop]]

    def append(self, before: Sequence[bytes], hashes: Sequence[bytes], rows: Iterable[Iterable[int]]) -> None:
        """``hashes`` follow the last of ``before``, which are all known."""
        parent = self.positions[before[-1]] if before else None
        for prefix_hash, row in zip(hashes, rows, strict=True):
            assert prefix_hash not in self.positions
            parent = Position(prefix_hash, parent, tuple(map(int, row)))
            self.positions[prefix_hash] = parent

    def from_on(self, prefix_hash: bytes) -> list[Position]:
        """The position with that hash and everything after it, in any chain."""
        first = self.positions[prefix_hash]
        return [position for position in self.positions.values() if first in position.path]

    def remove(self, positions: Iterable[Position]) -> None:
        for position in positions:
            del self.positions[position.prefix_hash]

    def leaves(self) -> list[Position]:
        parents = {position.parent for position in self.positions.values()}
        return [position for position in self.positions.values() if position not in parents]


@dataclass(eq=False)
class StoreModel:
    """A store in flight: its positions, and whether their bytes are here."""

    positions: list[Position]
    landed: bool = False
    orphaned: bool = False

    @property
    def slots(self) -> set[int]:
        return {slot for position in self.positions for slot in position.slots}


@dataclass(eq=False)
class PinModel:
    """A load in flight: the positions it keeps from eviction, the slots it reads."""

    path: list[Position]
    slots: set[int]


@dataclass
class AllocatorModel:
    """LRU over single positions: whoever uses one uses all before it; of equals the tail goes first."""

    capacity: int
    columns: int
    tree: TreeModel = field(default_factory=TreeModel)
    stores: dict[int, StoreModel] = field(default_factory=dict)
    pins: list[PinModel] = field(default_factory=list)
    leases: list[list[Position]] = field(default_factory=list)
    """Paths."""
    clock: Iterable[int] = field(default_factory=lambda: count(1))

    # Slots: who owns what follows from the tree, the stores and the pins

    def slots_of(self, positions: Iterable[Position]) -> set[int]:
        return {slot for position in positions for slot in position.slots}

    @property
    def resident(self) -> set[int]:
        return self.slots_of(each for each in self.tree.positions.values() if each.resident)

    @property
    def filling(self) -> set[int]:
        return set().union(*(store.slots for store in self.stores.values()))

    @property
    def leaving(self) -> set[int]:
        return set().union(*(pin.slots for pin in self.pins)) - self.slots_of(self.tree.positions.values())

    @property
    def free(self) -> set[int]:
        return set(range(self.capacity)) - self.resident - self.filling - self.leaving

    @property
    def leased(self) -> set[Position]:
        """Positions in the tree that a lease keeps."""
        known = set(self.tree.positions.values())
        return {position for path in self.leases for position in path} & known

    @property
    def num_leased(self) -> int:
        """Slots that leases keep."""
        return len(self.leased) * self.columns

    # Recency

    def touch(self, positions: Sequence[Position]) -> None:
        now = next(iter(self.clock))
        for position in positions:
            position.last_use = now

    def candidates(self, newcomer_path: Collection[Position] = ()) -> list[Position]:
        """What may be evicted: resident tails that no load needs and no newcomer continues."""
        kept = {position for pin in self.pins for position in pin.path} | set(newcomer_path) | self.leased
        return [leaf for leaf in self.tree.leaves() if leaf.resident and leaf not in kept]

    # Stores

    def store(self, plan_id: int, chain: Sequence[bytes], start: int, rows: Sequence[Iterable[int]]) -> None:
        hashes = chain[start : start + len(rows)]
        self.tree.append(chain[:start], hashes, rows)
        self.touch(self.tree.known(chain[: start + len(rows)]))
        self.stores[plan_id] = StoreModel([self.tree.positions[each] for each in hashes])

    def commit(self, plan_id: int) -> list[Position]:
        """Return what became resident, in any order."""
        if self.stores[plan_id].orphaned:
            del self.stores[plan_id]
            return []
        self.stores[plan_id].landed = True
        settled: list[Position] = []
        while ready := [store for store in self.stores.values() if self._may_serve(store)]:
            for store in ready:
                settled += store.positions
            for position in settled:
                position.resident = True
            self.stores = {key: store for key, store in self.stores.items() if store not in ready}
        return settled

    def abort(self, plan_id: int) -> list[Position]:
        """Return what was resident and left."""
        store = self.stores.pop(plan_id)
        return [] if store.orphaned else self.cut(self.tree.from_on(store.positions[0].prefix_hash))

    def abandon(self, plan_id: int) -> list[Position]:
        """Its positions leave, its slots do not. Return what was resident and left."""
        store = self.stores[plan_id]
        return [] if store.orphaned else self.cut(self.tree.from_on(store.positions[0].prefix_hash))

    def cut(self, positions: list[Position]) -> list[Position]:
        """Remove ``positions``; stores whose positions left are orphans. Return what was resident."""
        self.tree.remove(positions)
        for store in self.stores.values():
            store.orphaned |= store.positions[0] in positions
        self.stores = {
            key: store for key, store in self.stores.items() if not (store.orphaned and store.landed)
        }
        return [position for position in positions if position.resident]

    def _may_serve(self, store: StoreModel) -> bool:
        before = store.positions[0].parent
        return store.landed and not store.orphaned and (before is None or before.resident)
