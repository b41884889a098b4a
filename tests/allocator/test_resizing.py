"""Slots are taken out of a pool, and given back to it, while stores and loads are under way."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator, Pin, StorePlan, hash_chain, resizing, serve
from allocator.node import Node
from allocator.slot_pool import SlotState
from evictor import HintedPolicy, KeepHints, LruPolicy, Worth, make_policy


class History:
    """A random history of a pool. Whoever has been promised slots finds that nobody else is given them."""

    def __init__(self, seed: int, columns: int, bag_slots: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.num_slots = self.rng.randrange(12, 60)
        self.allocator = CpuOffloadingBlockAllocator(
            self.num_slots, columns=columns, bag_slots=bag_slots, policy=make_policy(policy, self.num_slots)
        )
        self.bag_slots = bag_slots
        self.plans: list[StorePlan] = []
        self.pins: list[Pin] = []
        self.closed: set[int] = set()
        self.filled: dict[bytes, tuple[int, ...]] = {}
        """What was put into slots, by prefix hash."""

    def chain(self) -> list[bytes]:
        """Of one of a few documents, that leave each other here and there."""
        document, length = self.rng.randrange(4), self.rng.randrange(1, 12)
        leaves_at = self.rng.choice([99, 99, 3, 6])
        return hash_chain(
            [document * 100 + (each if each < leaves_at else 50 + each) for each in range(length)], 1
        )

    def step(self) -> None:
        often = [self.store, self.store, self.store, self.end, self.end, self.load, self.load, self.unload]
        act = self.rng.choice([*often, self.close, self.open, self.empty, self.empty, self.drop, self.tidy])
        act()
        self.check()

    def store(self) -> None:
        chain = self.chain()
        self.allocator.touch(chain)
        num_bag = self.rng.randrange(self.bag_slots + 1) if self.bag_slots else None
        plan = self.allocator.plan_store(chain, len(chain), num_bag=num_bag)
        if plan is not None:
            given = set(plan.all_slots.tolist())
            assert not given & self.closed, "a closed slot was handed out"
            assert not given & self.promised(), "a slot was handed out that a job has"
            self.plans.append(plan)

    def end(self) -> None:
        if self.plans:
            plan = self.plans.pop(self.rng.randrange(len(self.plans)))
            if self.rng.random() < 0.2:
                self.allocator.abort(plan)
            elif self.allocator.commit(plan):
                self.filled |= {
                    each: tuple(row) for each, row in zip(plan.hashes, plan.slots.tolist(), strict=True)
                }

    def load(self) -> None:
        chain = self.chain()
        depth = self.allocator.usable_depth(chain, len(chain))
        if depth:
            self.pins.append(self.allocator.pin(chain, self.rng.randrange(depth), depth))

    def unload(self) -> None:
        if self.pins:
            self.allocator.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def close(self) -> None:
        left = sorted(set(range(self.num_slots)) - self.closed)
        slots = self.rng.sample(left, self.rng.randrange(len(left) + 1) // 3)
        self.allocator.resizing.close(np.array(slots, dtype=np.int64))
        self.closed.update(slots)

    def open(self) -> None:
        slots = self.rng.sample(sorted(self.closed), self.rng.randrange(len(self.closed) + 1))
        self.allocator.resizing.open(np.array(slots, dtype=np.int64))
        self.closed.difference_update(slots)

    def empty(self) -> None:
        self.allocator.resizing.empty(self.rng.randrange(1, 9))

    def drop(self) -> None:
        if self.rng.random() < 0.2:
            self.allocator.drop(chain := self.chain(), len(chain) - 1)

    def tidy(self) -> None:
        self.allocator.tidy()

    def promised(self) -> set[int]:
        """Slots that jobs read or write."""
        written = [plan.all_slots.tolist() for plan in self.plans]
        read = [pin.slots.reshape(-1).tolist() for pin in self.pins]
        bags = [pin.bag.tolist() for pin in self.pins if pin.bag is not None]
        return {slot for slots in (*written, *read, *bags) for slot in slots if slot >= 0}

    def check(self) -> None:
        allocator, pool = self.allocator, self.allocator._pool
        allocator.check_invariants()
        assert allocator.num_slots == self.num_slots
        assert allocator.capacity == self.num_slots - len(self.closed)
        withdrawn = allocator.resizing.num_withdrawn
        counted = allocator.num_free + allocator.num_filling + allocator.num_resident + allocator.num_bagged
        assert counted + allocator.num_leaving + withdrawn == self.num_slots
        assert allocator.resizing.num_used == self.num_slots - allocator.num_free - withdrawn
        unused = {*pool.free().tolist(), *np.flatnonzero(pool._is_withdrawn).tolist()}
        assert not unused & self.promised(), "a slot is free, or withdrawn, and a job has it"
        self.check_content([self.chain()])

    def check_content(self, chains: Sequence[list[bytes]]) -> None:
        """What is resident is where it was put, whatever was taken away around it."""
        for chain in chains:
            hit = self.allocator.lookup(chain)
            for prefix_hash, row in zip(chain[: hit.depth], hit.slots.tolist(), strict=True):
                assert self.filled[prefix_hash] == tuple(row)

    def finish(self) -> None:
        """All jobs end; then all closed slots can be had back, and nothing that is resident is among them."""
        while self.plans:
            self.end()
        while self.pins:
            self.unload()
        for _ in range(3 * self.num_slots):
            self.allocator.tidy()
            if self.allocator.resizing.empty(8):
                break
        self.check()
        assert self.allocator.resizing.num_withdrawn == len(self.closed)


@pytest.mark.parametrize(("columns", "bag_slots"), [(1, 0), (2, 0), (1, 3), (0, 2)])
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_nobody_loses_a_slot_that_a_job_has(columns: int, bag_slots: int, policy: str) -> None:
    num_closed = 0
    for seed in range(12):
        history = History(seed, columns, bag_slots, policy)
        for _ in range(120):
            history.step()
        num_closed += len(history.closed)
        history.finish()
    assert num_closed


def test_what_a_load_reads_is_withdrawn_when_it_has_ended() -> None:
    allocator = CpuOffloadingBlockAllocator(8)
    chain = hash_chain(list(range(6)), 1)
    serve(allocator, chain)
    pin = allocator.pin(chain, 2, 6)
    slots = pin.slots.reshape(-1)
    allocator.resizing.close(slots[1:2])
    assert not allocator.resizing.empty(100)
    assert allocator.resident_depth(chain) == 3, "what is before the closed slot stays"
    assert allocator._pool.num_in(SlotState.LEAVING) == 3
    allocator.unpin(pin)
    assert allocator.resizing.empty(100)
    assert allocator.resizing.num_withdrawn == 1
    assert allocator.num_free == 8 - 3 - 1
    allocator.resizing.open(slots[1:2])
    assert (allocator.capacity, allocator.num_free) == (8, 5)
    allocator.check_invariants()


def test_what_is_leased_or_pinned_by_a_hint_stays_in_closed_slots() -> None:
    now = [0.0]
    allocator = CpuOffloadingBlockAllocator(16, policy=HintedPolicy(LruPolicy(), 8, lambda: now[0]))
    pinned, leased = hash_chain([1, 2, 3], 1), hash_chain([4, 5, 6], 1)
    serve(allocator, pinned, KeepHints(pinned_until=5.0))
    serve(allocator, leased)
    lease = allocator.leases.begin(leased, 2)
    assert allocator.resizing.num_pinned == 3
    allocator.resizing.close(np.arange(16))
    assert not allocator.resizing.empty(100)
    assert (allocator.resident_depth(pinned), allocator.resident_depth(leased)) == (3, 2)
    allocator.leases.end(lease)
    assert not allocator.resizing.empty(100)
    assert (allocator.resident_depth(pinned), allocator.resident_depth(leased)) == (3, 0)
    now[0] = 6.0
    assert allocator.resizing.num_pinned == 0
    assert allocator.resizing.empty(100)
    assert allocator.resident_depth(pinned) == 0
    allocator.check_invariants()


@pytest.mark.parametrize("by_hint", [False, True])
def test_what_is_before_it_stays_too(by_hint: bool) -> None:
    assert _depth_after_closing_the_beginning(by_hint=by_hint, by_lease=not by_hint) == 6


def test_a_lease_holds_what_leads_to_its_end() -> None:
    assert _depth_after_closing_the_beginning(by_hint=False, by_lease=True) == 6
    assert _depth_after_closing_the_beginning(by_hint=False, by_lease=False) == 0


def test_a_pin_of_a_hint_holds_what_leads_to_its_end() -> None:
    assert _depth_after_closing_the_beginning(by_hint=True, by_lease=False) == 6


def _depth_after_closing_the_beginning(*, by_hint: bool, by_lease: bool) -> int:
    """What is resident of a chain whose end is held, once slots that it shares with another are closed."""
    policy = HintedPolicy[Node](LruPolicy(), 8, lambda: 0.0)
    allocator = CpuOffloadingBlockAllocator(16, policy=policy)
    held, other = hash_chain([1, 2, 3, 4, 5, 6], 1), hash_chain([1, 2, 3, 7], 1)
    serve(allocator, other)
    serve(allocator, held, KeepHints(pinned_until=5.0) if by_hint else None)
    if by_lease:
        allocator.leases.begin(held, 6)
    allocator.resizing.close(allocator.lookup(held).slots[:1].reshape(-1))
    allocator.resizing.empty(100)
    allocator.check_invariants()
    return allocator.resident_depth(held)


def test_a_bag_in_a_closed_slot_leaves() -> None:
    allocator = CpuOffloadingBlockAllocator(16, bag_slots=2)
    chain = hash_chain([1, 2, 3], 1)
    plan = allocator.plan_store(chain, 3, num_bag=2)
    assert plan is not None
    allocator.commit(plan)
    assert allocator.usable_depth(chain, 3) == 3
    allocator.resizing.close(plan.bag[:1])
    assert allocator.resizing.empty(100)
    assert allocator.usable_depth(chain, 3) == 0
    assert (allocator.resizing.num_withdrawn, allocator.num_bagged) == (1, 0)
    allocator.check_invariants()


def test_so_many_bites_and_no_more() -> None:
    allocator = CpuOffloadingBlockAllocator(64)
    for number in range(16):
        serve(allocator, hash_chain([number, 1, 2, 3], 1))
    assert allocator.resizing.evict(40, 3) == 12
    assert allocator.resizing.evict(6, 3) == 6
    assert allocator.resizing.evict(100) == 64 - 18


def test_a_look_at_long_segments_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_LOOK_POSITIONS", 4)
    allocator = CpuOffloadingBlockAllocator(64)
    for number in range(8):
        serve(allocator, hash_chain([number, *range(7)], 1))
    allocator.resizing.close(np.arange(64))
    num_calls = 0
    while not allocator.resizing.empty(100):
        num_calls += 1
        assert allocator.resizing.num_withdrawn <= 8 * num_calls
    assert num_calls >= 7


def test_hints_protect_less_of_a_smaller_pool() -> None:
    policy = HintedPolicy[Node](LruPolicy(), 8, lambda: 0.0)
    allocator = CpuOffloadingBlockAllocator(16, policy=policy)
    chains = [hash_chain([number, 1, 2], 1) for number in (10, 20)]
    for chain in chains:
        serve(allocator, chain, KeepHints(Worth.HIGH))
    allocator.resizing.protect(4)
    allocator.check_invariants()
    serve(allocator, hash_chain([30, *range(12)], 1))
    assert [allocator.resident_depth(chain) for chain in chains] == [0, 3], "the older one is normal"


def test_free_slots_are_withdrawn_at_once_and_nothing_leaves_for_them() -> None:
    allocator = CpuOffloadingBlockAllocator(8)
    chain = hash_chain(list(range(4)), 1)
    serve(allocator, chain)
    starts = np.arange(0, 8, 2)
    assert allocator.resizing.num_used_in(starts).tolist() == [2, 2, 0, 0]
    allocator.resizing.close(np.arange(4, 8))
    assert allocator.resizing.empty(0)
    assert (allocator.num_free, allocator.capacity, allocator.resident_depth(chain)) == (0, 4, 4)
