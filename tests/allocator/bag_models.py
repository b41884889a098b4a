"""Slow, obvious models of checkpoints: bags hang on single positions, and nothing is a segment."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.models import AllocatorModel, PinModel, Position, StoreModel


@dataclass(eq=False)
class BagModel:
    """The bag of a checkpoint right behind ``position``."""

    position: Position
    slots: set[int]
    complete: bool = False


@dataclass(eq=False)
class BagStoreModel(StoreModel):
    """A store in flight; ``positions`` may be none, ``bag`` may be None."""

    bag: BagModel | None = None

    @property
    def slots(self) -> set[int]:
        return super().slots | (self.bag.slots if self.bag else set())

    @property
    def first(self) -> Position:
        """What has to be there for the store to be wanted."""
        if self.positions:
            return self.positions[0]
        assert self.bag is not None
        return self.bag.position


@dataclass(eq=False)
class BagPinModel(PinModel):
    """A load in flight that reads ``bag``, too."""

    bag: BagModel


@dataclass
class CheckpointModel(AllocatorModel):
    """The allocator of a model with windows or states. Who leaves is for the allocator to say."""

    bags: dict[Position, BagModel] = field(default_factory=dict)
    leased_bags: list[BagModel] = field(default_factory=list)
    """One of each lease, also if it is gone."""
    open: set[Position] = field(default_factory=set)
    """Where a store without a checkpoint ended, and nobody went on or gave up."""

    @property
    def bagged(self) -> set[int]:
        return set().union(*(bag.slots for bag in self.bags.values() if bag.complete))

    @property
    def leaving(self) -> set[int]:
        read = set().union(*(pin.slots | pin.bag.slots for pin in self.pins if isinstance(pin, BagPinModel)))
        return read - self.slots_of(self.tree.positions.values()) - self.bagged

    @property
    def free(self) -> set[int]:
        return super().free - self.bagged

    @property
    def num_leased(self) -> int:
        return super().num_leased + sum(len(bag.slots) for bag in set(self.leased_bags))

    def children(self, position: Position) -> list[Position]:
        return [each for each in self.tree.positions.values() if each.parent is position]

    def usable(self, chain: Sequence[bytes], limit: int, beyond: int) -> int:
        """The deepest complete checkpoint of ``chain``, looked for one by one."""
        known = self.tree.known(chain[:limit])
        depths = [
            depth for depth, each in enumerate(known, 1) if each in self.bags and self.bags[each].complete
        ]
        return max([depth for depth in depths if depth > beyond], default=0)

    def is_servable(self, leaf: Position) -> bool:
        """Whether a leaf ends at a checkpoint, or there is a reason for it to be there all the same."""
        bag = self.bags.get(leaf)
        is_read = any(leaf in pin.path for pin in self.pins) or leaf in self.leased
        return not leaf.resident or is_read or leaf in self.open or (bag is not None and bag.complete)

    def has_filling_bag(self, leaf: Position) -> bool:
        """Somewhere before it: then the segment that it is in may be kept from eviction."""
        return any(each in self.bags and not self.bags[each].complete for each in leaf.path)

    # What changes

    def begin(
        self,
        plan_id: int,
        chain: Sequence[bytes],
        start: int,
        rows: Sequence[list[int]],
        bag: set[int] | None,
    ) -> None:
        stop = start + len(rows)
        if rows:
            if start:
                self.open.discard(self.tree.positions[chain[start - 1]])
            self.tree.append(chain[:start], chain[start:stop], rows)
        positions = [self.tree.positions[each] for each in chain[start:stop]]
        end = self.tree.positions[chain[stop - 1]]
        made = None if bag is None else BagModel(end, bag)
        if made is not None:
            assert end not in self.bags
            self.bags[end] = made
        else:
            self.open.add(end)
        self.stores[plan_id] = BagStoreModel(positions, bag=made)

    def commit(self, plan_id: int) -> list[Position]:
        before = dict(self.stores)
        settled = super().commit(plan_id)
        for key, store in before.items():
            if (
                key not in self.stores
                and not store.orphaned
                and isinstance(store, BagStoreModel)
                and store.bag
            ):
                store.bag.complete = True
        return settled

    def abandon(self, plan_id: int) -> list[Position]:
        store = self.stores[plan_id]
        assert isinstance(store, BagStoreModel)
        if store.orphaned or store.positions:
            return super().abandon(plan_id)
        assert store.bag is not None
        del self.bags[store.bag.position]
        store.orphaned = True
        return []

    def cut(self, positions: list[Position]) -> list[Position]:
        self.leave(positions)
        for store in self.stores.values():
            assert isinstance(store, BagStoreModel)
            store.orphaned |= store.first in positions
        self.stores = {key: each for key, each in self.stores.items() if not (each.orphaned and each.landed)}
        return [position for position in positions if position.resident]

    def leave(self, positions: Sequence[Position]) -> None:
        """``positions`` are gone, with their bags."""
        self.tree.remove(positions)
        for position in positions:
            self.bags.pop(position, None)
            self.open.discard(position)

    def _may_serve(self, store: StoreModel) -> bool:
        assert isinstance(store, BagStoreModel)
        if not store.positions:
            return store.landed and not store.orphaned and store.first.resident
        return super()._may_serve(store)
