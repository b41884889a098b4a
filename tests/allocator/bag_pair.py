"""An allocator with checkpoints and its model, doing the same thing and compared in all that can be seen.

Who leaves is read from the allocator's events, and from the bags that are left. The model says who may.
"""

from collections.abc import Collection
from typing import Any

from allocator import BagEvicted, BagStored, CpuOffloadingBlockAllocator, Event, Evicted, Pin, StorePlan
from allocator.bags import BagState
from evictor import EvictionPolicy
from tests.allocator.bag_models import BagModel, BagPinModel, CheckpointModel
from tests.allocator.pair import Pair
from tests.models import Position

BAG_REACH = 3
"""Hashes that an event of a bag has."""


class BagPair(Pair):
    """``Pair`` of a model with windows or states, with or without full attention beside them."""

    model: CheckpointModel

    def __init__(
        self,
        capacity: int,
        columns: int = 1,
        bag_slots: int = 3,
        policy: EvictionPolicy[Any] | None = None,
        stride: int = 2,
    ) -> None:
        super().__init__(capacity, 1, None, stride)
        self._leased_bags: dict[Pin, BagModel] = {}
        self.allocator = CpuOffloadingBlockAllocator(
            capacity,
            columns=columns,
            bag_slots=bag_slots,
            policy=policy,
            record_events=True,
            bag_reach=BAG_REACH,
        )
        self.allocator._tree._index.stride = stride
        self.model = CheckpointModel(capacity, columns)
        self._num_thinned = 0
        self._replayed_bags: set[bytes] = set()

    # Stores

    def store(self, chain: list[bytes], num_bag: int | None = 1) -> None:  # type: ignore[override]
        """Plan and commit all of ``chain``, and a checkpoint at its end."""
        plan = self.plan_store(chain, num_bag=num_bag)
        if plan is not None:
            self.commit(plan)

    def plan_store(
        self,
        chain: list[bytes],
        stop: int | None = None,
        limit: int | None = None,
        num_bag: int | None = None,
    ) -> StorePlan | None:
        stop = len(chain) if stop is None else min(stop, len(chain))
        known = self.model.tree.known(chain[:stop])
        wanted = stop - len(known) if limit is None else min(stop - len(known), limit)
        reaches = len(known) + wanted == stop > 0
        has_one = not wanted and bool(known) and known[-1] in self.model.bags
        bag = num_bag if reaches and not has_one else None
        needed = max(wanted, 0) * self.model.columns + (bag or 0)
        had_room = not self.has_carried and len(self.model.free) >= needed
        plan = self.allocator.plan_store(chain, stop, limit, num_bag=num_bag)
        self._follow(needed, known)
        if plan is None:
            assert wanted < 0 or (not wanted and bag is None) or not had_room, "there was room for it"
            return None
        assert (plan.start, plan.stop) == (len(known), len(known) + wanted)
        assert plan.hashes == chain[plan.start : plan.stop]
        assert plan.slots.shape == (wanted, self.model.columns)
        assert (plan.bag is None) == (bag is None) and (bag is None or len(plan.bag) == bag)
        slots = [*plan.slots.reshape(-1).tolist(), *([] if plan.bag is None else plan.bag.tolist())]
        assert len(set(slots)) == len(slots)
        assert self.model.free.issuperset(slots), "slots in use were handed out"
        in_bag = None if plan.bag is None else set(plan.bag.tolist())
        self.model.begin(plan.plan_id, chain, plan.start, plan.slots.tolist(), in_bag)
        return plan

    def commit(self, plan: StorePlan) -> None:
        is_wanted = not self.model.stores[plan.plan_id].orphaned
        assert self.allocator.commit(plan) is is_wanted
        self._unsaid.update(_hashes(self.model.commit(plan.plan_id)))
        self._follow()

    def abort(self, plan: StorePlan) -> None:
        self.allocator.abort(plan)
        self.model.abandon(plan.plan_id)
        self.model.stores.pop(plan.plan_id)
        self._follow()

    def abandon(self, plan: StorePlan) -> None:
        self.allocator.abandon(plan)
        self.model.abandon(plan.plan_id)
        self._follow()

    def close(self, chain: list[bytes]) -> None:
        self.allocator.close(chain)
        known = self.model.tree.known(chain)
        if known:
            self.model.open.discard(known[-1])
        self._follow()

    # Loads

    def pin(self, chain: list[bytes], start: int, stop: int) -> Pin:
        path = self.model.tree.resident(chain)[:stop]
        bag = self.model.bags[path[-1]]
        pin = self.allocator.pin(chain, start, stop)
        assert pin.slots.tolist() == self.model.tree.rows(chain, start, stop)
        assert pin.bag is not None and set(pin.bag.tolist()) == bag.slots
        self._pins[pin] = BagPinModel(path, self.model.slots_of(path[start:]), bag)
        self.model.pins.append(self._pins[pin])
        self._follow()
        return pin

    def unpin(self, pin: Pin) -> None:
        self.allocator.unpin(pin)
        self.model.pins.remove(self._pins.pop(pin))
        self._follow()

    def lease(self, chain: list[bytes]) -> Pin:
        lease = self.allocator.leases.begin(chain, len(chain))
        path = self._leases[lease] = self.model.tree.known(chain)
        self.model.leases.append(path)
        self._leased_bags[lease] = self.model.bags[path[-1]]
        self.model.leased_bags.append(self._leased_bags[lease])
        self._follow()
        return lease

    def end_lease(self, lease: Pin) -> None:
        path = self._leases.pop(lease)
        self.allocator.leases.end(lease)
        self.model.leased_bags.remove(self._leased_bags.pop(lease))
        self.model.leases = [each for each in self.model.leases if each is not path]
        self._follow()

    # Recency and leaving

    def use(self, chain: list[bytes]) -> None:
        super().use(chain)
        self._follow()

    def evict(self, num_slots: int) -> None:
        before = self.allocator.num_free
        self.allocator.evict(num_slots)
        self._follow(before + num_slots)

    def tidy(self) -> None:
        self.allocator.tidy()
        self._follow()

    def drop(self, chain: list[bytes]) -> None:
        """The last position of ``chain``."""
        position = self.model.tree.positions.get(chain[-1])
        is_resident = position is not None and position.resident
        gone = self.model.cut(self.model.tree.from_on(chain[-1])) if is_resident else []
        self.allocator.drop(chain, len(chain) - 1)
        self._owed.update(_hashes(gone))
        self._follow()

    def drop_bag(self, chain: list[bytes]) -> None:
        """That of the checkpoint at the end of ``chain``."""
        position = self.model.tree.positions.get(chain[-1])
        if position is not None and position in self.model.bags and self.model.bags[position].complete:
            del self.model.bags[position]
        self.allocator.drop_bag(chain, len(chain))
        self._follow()

    def reset(self) -> None:
        gone = self.model.cut(list(self.model.tree.positions.values()))
        self.allocator.reset()
        self._owed.update(_hashes(gone))
        self._follow()

    # What must agree after every step

    def check(self) -> None:
        allocator, model = self.allocator, self.model
        allocator.check_invariants()
        assert allocator.take_events() == []
        if not self.has_carried:
            assert allocator.num_free == len(model.free)
            assert allocator.num_leaving == len(model.leaving)
            assert allocator.num_resident == len(model.resident)
            assert allocator.num_bagged == len(model.bagged)
        assert allocator.num_free <= len(model.free)
        assert allocator.num_filling == len(model.filling)
        assert allocator.num_evicted == self._num_evicted
        assert _slots_in_all(allocator) == allocator.capacity
        self._check_events()
        self._check_leases()
        if not self.has_carried:
            assert self._replayed_bags == _hashes(self._complete())
        assert self._bags_of_allocator() == {each: set(bag.slots) for each, bag in self._complete().items()}
        for leaf in model.tree.leaves():
            self.lookup([position.prefix_hash for position in leaf.path])
            is_kept = self.has_carried or model.has_filling_bag(leaf)
            assert is_kept or model.is_servable(leaf), f"{leaf} serves no hit"

    def lookup(self, chain: list[bytes]) -> None:
        super().lookup(chain)
        for limit in range(len(chain) + 1):
            for beyond in {0, limit // 2, limit}:
                usable = self.allocator.usable_depth(chain, limit, beyond)
                assert usable == self.model.usable(chain, limit, beyond), f"{limit}, {beyond}"

    # Who left

    def _follow(self, needed: int = 0, newcomer_path: Collection[Position] = ()) -> None:
        """Let the model lose what the allocator evicted, if it may go; ``needed`` slots were asked for."""
        was_short = len(self.model.free) < needed
        for event in self.allocator.take_events():
            if not self._is_eviction(event):
                continue
            assert isinstance(event, Evicted)
            hashes = list(event.hashes)
            last = self.model.tree.positions[hashes[-1]]
            is_loose = not self.model.is_servable(last)
            assert is_loose or len(self.model.free) < needed, "evicted without need"
            for prefix_hash in reversed(hashes):
                victim = self.model.tree.positions[prefix_hash]
                assert victim in self.model.candidates(() if is_loose else newcomer_path), (
                    f"{victim} may not go"
                )
                assert victim not in self.model.bags or self.model.bags[victim].complete, "under a store"
                self.model.leave([victim])
                self._replayed.remove(prefix_hash)
                self._num_evicted += 1
        self._follow_thinning(was_short)

    def _is_eviction(self, event: Event) -> bool:
        if isinstance(event, BagStored):
            self._replay_stored_bag(event)
            return False
        if isinstance(event, BagEvicted):
            assert event.prefix_hash in self._replayed, "a bag leaves after the positions before it"
            self._replayed_bags.remove(event.prefix_hash)
            return False
        assert not isinstance(event, Evicted) or self._replayed_bags.isdisjoint(event.hashes), (
            "positions leave before the bag behind them"
        )
        return super()._is_eviction(event)

    def _replay_stored_bag(self, event: BagStored) -> None:
        name = event.hashes[-1]
        assert self._replayed.issuperset(event.hashes), "a bag comes before the positions before it"
        assert name not in self._replayed_bags
        self._replayed_bags.add(name)
        assert len(event.hashes) == min(event.depth, BAG_REACH)
        if (position := self.model.tree.positions.get(name)) is not None:
            path = [each.prefix_hash for each in position.path]
            assert (event.depth, event.hashes) == (len(path), path[-BAG_REACH:])

    def _follow_thinning(self, was_short: bool) -> None:
        left = self._bags_of_allocator()
        thinned = [bag for each, bag in self._complete().items() if each not in left]
        num_thinned = self.allocator.num_thinned - self._num_thinned
        self._num_thinned = self.allocator.num_thinned
        assert len(thinned) <= num_thinned, "a bag is gone, and nobody evicted it"
        assert not thinned or was_short, "a bag was evicted without need"
        for bag in thinned:
            assert len(self.model.children(bag.position)) == 1, f"{bag} is of a leaf, or of a branch"
            assert bag.slots, "to evict it gives no room"
            assert not any(pin.bag is bag for pin in self.model.pins if isinstance(pin, BagPinModel))
            assert not any(path[-1] is bag.position for path in self.model.leases), f"{bag} is leased"
            del self.model.bags[bag.position]

    def _complete(self) -> dict[Position, BagModel]:
        return {each: bag for each, bag in self.model.bags.items() if bag.complete}

    def _bags_of_allocator(self) -> dict[Position, set[int]]:
        positions = self.model.tree.positions
        return {
            positions[node.hash_at(each.depth - 1 - node.start)]: set(each.slots.tolist())
            for node in self.allocator._tree.nodes()
            for each in node.bags or ()
            if each.state is BagState.COMPLETE
        }


def _slots_in_all(allocator: CpuOffloadingBlockAllocator) -> int:
    return (
        allocator.num_free
        + allocator.num_filling
        + allocator.num_resident
        + allocator.num_bagged
        + allocator.num_leaving
    )


def _hashes(positions: Collection[Position]) -> set[bytes]:
    return {position.prefix_hash for position in positions}
