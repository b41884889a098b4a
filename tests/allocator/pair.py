"""The allocator and its model, doing the same thing and compared in everything that can be seen.

Who is evicted is for the policy to say: the model says who may be, and a subclass who must be.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from allocator import CpuOffloadingBlockAllocator, Event, Evicted, Pin, Stored, StorePlan
from evictor import EvictionPolicy, LruPolicy
from tests.models import AllocatorModel, PinModel, Position


class Pair:
    """Every method does one thing to both and raises AssertionError where they differ."""

    may_refuse: ClassVar[bool] = True
    """Whether the policy may find newcomers worth less than all that is here."""

    def __init__(
        self, capacity: int, columns: int = 1, policy: EvictionPolicy[Any] | None = None, stride: int = 2
    ) -> None:
        self.allocator = CpuOffloadingBlockAllocator(
            capacity, columns=columns, policy=policy, record_events=True
        )
        self.allocator._tree._index.stride = stride  # chains here are short
        self.model = AllocatorModel(capacity, columns)
        self.seen: Counter[str] = Counter()
        """How often each of the rarer situations came up."""
        self._replayed: set[bytes] = set()
        self._unsaid = Counter[bytes]()  # became resident, and its event waits for a cut
        self._owed = Counter[bytes]()  # cut off, and yet to be listed
        self._num_evicted = 0
        self._pins: dict[Pin, PinModel] = {}
        self._leases: dict[Pin, list[Position]] = {}

    # Stores

    def store(self, chain: list[bytes]) -> None:
        """Plan and commit as much of ``chain`` as there is room for."""
        plan = self.plan_store(chain)
        if plan is not None:
            self.commit(plan)

    def plan_store(
        self, chain: list[bytes], stop: int | None = None, limit: int | None = None, *, must: bool = False
    ) -> StorePlan | None:
        stop = len(chain) if stop is None else min(stop, len(chain))
        known = self.model.tree.known(chain[:stop])
        wanted = stop - len(known) if limit is None else min(stop - len(known), limit)
        plan = self.allocator.plan_store(chain, stop, limit, must=must)
        self._replay_evictions(wanted * self.model.columns, known, must=must)
        stored = max(0, min(wanted, len(self.model.free) // self.model.columns))
        self.seen["plan shorter than wanted"] += stored < wanted
        if plan is None:
            assert not stored
            return None
        assert plan.start == len(known)
        assert plan.hashes == chain[len(known) : len(known) + stored]
        assert plan.parent_hash == (known[-1].prefix_hash if known else None)
        assert plan.slots.shape == (stored, self.model.columns)
        slots = plan.slots.reshape(-1).tolist()
        assert len(set(slots)) == len(slots)
        assert self.model.free.issuperset(slots), "slots of a load or store in flight were handed out"
        self.seen["plan behind a filling position"] += bool(known) and not known[-1].resident
        self.model.store(plan.plan_id, chain, plan.start, plan.slots.tolist())
        return plan

    def commit(self, plan: StorePlan) -> None:
        others = len(self.model.stores) - 1
        is_wanted = not self.model.stores[plan.plan_id].orphaned
        assert self.allocator.commit(plan) is is_wanted
        settled = self.model.commit(plan.plan_id)
        self._unsaid.update(_hashes(settled))
        self._replay()
        self.seen["commit out of order"] += len(self.model.stores) > others
        self.seen["commit settles others"] += len(settled) > len(plan.hashes)

    def abort(self, plan: StorePlan) -> None:
        in_flight = len(self.model.stores)
        self.seen["abort of an orphan"] += self.model.stores[plan.plan_id].orphaned
        self.allocator.abort(plan)
        gone = self.model.abort(plan.plan_id)
        assert not gone, "something was resident behind a filling position"
        self._replay()
        self.seen["abort frees others that have landed"] += in_flight - len(self.model.stores) > 1

    def abandon(self, plan: StorePlan) -> None:
        self.seen["abandoned before it ended"] += not self.model.stores[plan.plan_id].orphaned
        filling = self.allocator.num_filling
        self.allocator.abandon(plan)
        assert not self.model.abandon(plan.plan_id), "something was resident behind a filling position"
        self._replay()
        assert set(plan.slots.reshape(-1).tolist()) <= self.model.filling
        self.seen["abandoning frees others that have landed"] += self.allocator.num_filling < filling

    # Loads

    def pin(self, chain: list[bytes], start: int, stop: int) -> Pin:
        path = self.model.tree.resident(chain)[:stop]
        pin = self.allocator.pin(chain, start, stop)
        assert pin.slots.tolist() == self.model.tree.rows(chain, start, stop)
        self.seen["pin of a pinned position"] += any(set(path) & set(each.path) for each in self.model.pins)
        self._pins[pin] = PinModel(path, self.model.slots_of(path[start:]))
        self.model.pins.append(self._pins[pin])
        return pin

    def unpin(self, pin: Pin) -> None:
        model = self._pins.pop(pin)
        assert set(pin.slots.reshape(-1).tolist()) == model.slots
        leaving = len(self.model.leaving)
        self.allocator.unpin(pin)
        self.model.pins.remove(model)
        self.seen["unpin frees slots"] += len(self.model.leaving) < leaving

    def lease(self, chain: list[bytes]) -> Pin:
        """All of ``chain``, which is known."""
        lease = self.allocator.leases.begin(chain, len(chain))
        path = self._leases[lease] = self.model.tree.known(chain)
        self.seen["lease of a leased position"] += bool(set(path) & self.model.leased)
        self.seen["lease of a filling position"] += not path[-1].resident
        self.model.leases.append(path)
        self._replay()
        return lease

    def end_lease(self, lease: Pin) -> None:
        path = self._leases.pop(lease)
        self.seen["lease of what is gone"] += path[-1] not in self.model.leased
        self.allocator.leases.end(lease)
        self.model.leases = [each for each in self.model.leases if each is not path]
        self._replay()

    # Recency and leaving

    def use(self, chain: list[bytes]) -> None:
        self.lookup(chain)
        self.allocator.touch(chain)
        self.model.touch(self.model.tree.known(chain))

    def evict(self, num_slots: int) -> None:
        before = self.allocator.num_free  # as the model says, but for what is carried over
        had_carried = self.has_carried
        freed = self.allocator.evict(num_slots)
        self._replay_evictions(before + num_slots)
        assert had_carried or freed == len(self.model.free) - before

    def tidy(self) -> None:
        """A step ends: some of what is carried over is given back."""
        before, had_carried = self.allocator.num_free, self.has_carried
        self.allocator.tidy()
        self._replay()
        self.seen["slots of a cut given back later"] += self.allocator.num_free > before
        assert had_carried or self.allocator.num_free == before

    @property
    def has_carried(self) -> bool:
        """Whether slots of what was cut off are yet to be given back."""
        return self.allocator._tree.has_dead

    def drop(self, chain: list[bytes]) -> None:
        """The last position of ``chain``."""
        prefix_hash = chain[-1]
        in_flight = [store for store in self.model.stores.values() if not store.orphaned]
        position = self.model.tree.positions.get(prefix_hash)
        is_resident = position is not None and position.resident
        gone = self.model.cut(self.model.tree.from_on(prefix_hash)) if is_resident else []
        self.allocator.drop(chain, len(chain) - 1)
        self._owed.update(_hashes(gone))
        self._replay()
        self.seen["drop of a filling position"] += position is not None and not is_resident
        self.seen["drop orphans a store"] += any(store.orphaned for store in in_flight)
        for pin in self.model.pins:
            self.seen["drop under a pin"] += bool(set(gone) & set(pin.path))
            self.seen["drop of a part of a pin"] += 0 < len(set(gone) & set(pin.path)) < len(pin.path)

    def reset(self) -> None:
        self.seen["reset with loads and stores in flight"] += bool(self.model.pins and self.model.stores)
        gone = self.model.cut(list(self.model.tree.positions.values()))
        self.allocator.reset()
        self._owed.update(_hashes(gone))
        self._replay()

    # What must agree after every step

    def check(self) -> None:
        """Counts, and depth and slots of every chain: slots never change while a position is known."""
        allocator, model = self.allocator, self.model
        allocator.check_invariants()
        assert allocator.take_events() == []
        self.seen["slots of a cut carried over"] += self.has_carried
        if not self.has_carried:
            assert allocator.num_free == len(model.free)
            assert allocator.num_leaving == len(model.leaving)
            assert allocator.num_resident == len(model.resident)
        assert allocator.num_free <= len(model.free)
        assert allocator.num_leaving <= len(model.leaving)
        assert allocator.num_filling == len(model.filling)
        assert allocator.num_evicted == self._num_evicted
        counts = (allocator.num_free, allocator.num_resident, allocator.num_filling, allocator.num_leaving)
        assert sum(counts) == allocator.capacity
        self._check_events()
        self._check_leases()
        for leaf in model.tree.leaves():
            self.lookup([position.prefix_hash for position in leaf.path])

    def lookup(self, chain: list[bytes]) -> None:
        hit = self.allocator.lookup(chain)
        assert hit.depth == len(self.model.tree.resident(chain)) == self.allocator.resident_depth(chain)
        assert hit.slots.tolist() == self.model.tree.rows(chain, 0, hit.depth)
        assert not hit.slots.flags.writeable

    def expect_victim(self, victim: Position, candidates: Sequence[Position]) -> None:
        """Raise AssertionError if ``victim`` is none of the ``candidates`` that the policy may choose."""
        assert victim in candidates, f"{victim} is not among {candidates}"

    def _check_leases(self) -> None:
        """How many there are, and how many slots they keep; what is cut off counts until it is taken away."""
        leases, model = self.allocator.leases, self.model
        assert len(leases) == len(model.leases)
        assert leases.num_slots >= model.num_leased
        assert self.has_carried or leases.num_slots == model.num_leased

    # Events

    def _replay_evictions(
        self, num_slots: int, newcomer_path: Collection[Position] | None = None, *, must: bool = False
    ) -> None:
        """Let the model evict what the allocator did to have ``num_slots`` free, one by one, tails first."""
        path = newcomer_path or ()
        for event in self.allocator.take_events():
            if not self._is_eviction(event):
                continue
            assert isinstance(event, Evicted)
            for prefix_hash in reversed(event.hashes):
                enough = num_slots + self.allocator._room.slack * self.allocator.columns
                assert len(self.model.free) < enough, "evicted without need"
                victim = self.model.tree.positions[prefix_hash]
                self.expect_victim(victim, self.model.candidates(path))
                self.model.tree.remove([victim])
                self._replayed.remove(prefix_hash)
                self._num_evicted += 1
                self.seen["evicted beside a pin"] += bool(self.model.pins)
        if newcomer_path is None or must or not self.may_refuse:
            assert len(self.model.free) >= num_slots or not self.model.candidates(path), "more could go"

    def _replay(self) -> None:
        """Replay all events. None is of an eviction."""
        for event in self.allocator.take_events():
            assert not self._is_eviction(event), f"{event} without need"

    def _is_eviction(self, event: Event) -> bool:
        """Replay what became resident, or was cut off. Returns whether it is neither, and so an eviction."""
        assert isinstance(event, Stored | Evicted), f"{event} of a model without bags"
        hashes = list(event.hashes)
        assert hashes and len(set(hashes)) == len(hashes)
        if isinstance(event, Stored):
            assert event.parent_hash is None or event.parent_hash in self._replayed
            assert self._replayed.isdisjoint(hashes)
            self._unsaid.subtract(hashes)
            self._replayed.update(hashes)
            return False
        assert self._replayed.issuperset(hashes)
        if not self._owed[hashes[0]]:
            return True
        self._owed.subtract(hashes)
        self._replayed.difference_update(hashes)
        return False

    def _check_events(self) -> None:
        """Whoever has all events, and those to come, knows what is resident. None is late without a cut."""
        assert min([*self._unsaid.values(), *self._owed.values()], default=0) >= 0
        says = Counter(self._replayed)
        says.update(self._unsaid)
        says.subtract(self._owed)
        resident = _hashes(each for each in self.model.tree.positions.values() if each.resident)
        assert +says == Counter(resident) and not -says
        assert self.allocator.is_listing == self.has_carried
        is_late = bool(+self._unsaid + self._owed)
        assert self.has_carried or not is_late, f"{self._unsaid}, {self._owed} without a cut"
        self.seen["event that waits for a cut"] += bool(+self._unsaid)


class LruPair(Pair):
    """Under LRU the model foretells every victim."""

    may_refuse = False

    def __init__(
        self, capacity: int, columns: int = 1, policy: EvictionPolicy[Any] | None = None, stride: int = 2
    ) -> None:
        super().__init__(capacity, columns, policy or LruPolicy())

    def expect_victim(self, victim: Position, candidates: Sequence[Position]) -> None:
        """Leaf-LRU is LRU over single blocks with ties broken from the tail."""
        super().expect_victim(victim, candidates)
        oldest = min(candidate.last_use for candidate in candidates)
        assert victim.last_use == oldest, f"used at {victim.last_use}, others at {oldest}"
        assert [candidate.last_use for candidate in candidates].count(oldest) == 1, "an ambiguous model"


def _hashes(positions: Collection[Position]) -> set[bytes]:
    return {position.prefix_hash for position in positions}
