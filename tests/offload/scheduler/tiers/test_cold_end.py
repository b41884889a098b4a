"""Chains wait below the pool's cold end until it is about to evict them."""

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain, serve
from evictor import available_policies, make_policy
from offload.scheduler.tiers.cold_end import MOST_POOLS, Chain, ColdEnd

CAPACITY = 64
SIZE = 8
"""Positions of a chain."""
NUM_NEXT = 2
"""Chains that the quarter of the pool has which goes next."""


def chain_of(number: int, size: int = SIZE) -> list[bytes]:
    return hash_chain([number, *range(1, size)], 1)


def pool(policy: str) -> CpuOffloadingBlockAllocator:
    return CpuOffloadingBlockAllocator(CAPACITY, policy=make_policy(policy, CAPACITY, lambda: 0.0))


@pytest.mark.parametrize("policy", available_policies())
def test_the_coldest_is_what_goes_next(policy: str) -> None:
    allocator = pool(policy)
    for number in range(CAPACITY // SIZE):
        serve(allocator, chain_of(number))
    for number in (0, 3):
        serve(allocator, chain_of(number))
    for _ in range(3):
        [coldest] = allocator.coldest(1, 9)
        assert [coldest] == allocator.coldest(CAPACITY, 9)[:1], "and asking does not change it"
        allocator.check_invariants()
        [owner] = [each for each in map(chain_of, range(CAPACITY // SIZE)) if coldest in each]
        depth = allocator.resident_depth(owner)
        assert owner[depth - 1] == coldest
        allocator.evict(SIZE)
        assert allocator.resident_depth(owner) < depth


def test_as_many_as_have_so_many_slots() -> None:
    allocator = pool("lru")
    chains = [chain_of(number) for number in range(CAPACITY // SIZE)]
    for chain in chains:
        serve(allocator, chain)
    assert allocator.coldest(SIZE + 1, 9) == [chains[0][-1], chains[1][-1]]
    assert allocator.coldest(CAPACITY, 3) == [each[-1] for each in chains[:3]]
    assert allocator.coldest(0, 9) == []


def test_a_chain_is_due_when_its_end_goes_next() -> None:
    allocator = pool("lru")
    cold_end, chains = ColdEnd(allocator), [chain_of(number) for number in range(20)]
    evicted = []
    for number, chain in enumerate(chains):
        serve(allocator, chain)
        cold_end.add(Chain(chain, (SIZE,)))
        due = [each.hashes for each in cold_end.due()]
        cold_end.check_invariants()
        evicted += due
        assert all(allocator.resident_depth(each) == SIZE for each in due), "while the pool still has it"
        gone = [each for each in chains[: number + 1] if allocator.resident_depth(each) < SIZE]
        assert all(each in evicted for each in gone)
    assert len(evicted) == 20 - CAPACITY // SIZE + NUM_NEXT
    assert evicted == chains[: len(evicted)]


def test_what_is_used_again_waits() -> None:
    allocator = pool("lru")
    cold_end, hot, others = ColdEnd(allocator), chain_of(0), [chain_of(number) for number in range(1, 30)]
    due = []
    for chain in others:
        for each in (hot, chain):
            serve(allocator, each)
            cold_end.add(Chain(each, (SIZE,)))
        due += [each.hashes for each in cold_end.due()]
    assert due
    assert hot not in due


def test_a_chain_that_is_stored_in_part_is_found_by_where_it_ends() -> None:
    allocator = pool("lru")
    cold_end, chain = ColdEnd(allocator), chain_of(0, 2 * SIZE)
    serve(allocator, chain[:SIZE])
    cold_end.add(Chain(chain, (SIZE, 2 * SIZE)))
    for number in range(1, CAPACITY // SIZE):
        serve(allocator, chain_of(number))
    assert [each.hashes for each in cold_end.due()] == [chain]


def test_what_was_used_last_is_taken_first() -> None:
    allocator = pool("lru")
    cold_end, chains = ColdEnd(allocator), [chain_of(number) for number in range(4)]
    for chain in chains:
        serve(allocator, chain)
        cold_end.add(Chain([*chain, chain[-1] + b"more"], (SIZE,)))
    cold_end.add(Chain(chains[1], (SIZE,)))
    assert [each.hashes[:SIZE] for each in cold_end.take()][:3] == [chains[1], chains[3], chains[2]]
    cold_end.check_invariants()
    assert cold_end.take() == []


def test_the_oldest_are_forgotten() -> None:
    allocator = pool("lru")
    cold_end = ColdEnd(allocator)
    for number in range(MOST_POOLS * CAPACITY):
        cold_end.add(Chain(chain_of(number), (SIZE,)))
        cold_end.check_invariants()
    cold_end.clear()
    cold_end.check_invariants()
    for number in range(CAPACITY // SIZE):
        serve(allocator, chain_of(number))
    assert cold_end.due() == []
