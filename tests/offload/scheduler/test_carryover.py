"""What ends of restores leave to do is bounded per step."""

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain
from offload.scheduler.carryover import STEP_WORK, Carryover

LENGTH = 8


@pytest.fixture
def allocator() -> CpuOffloadingBlockAllocator:
    return CpuOffloadingBlockAllocator(4096 * LENGTH)


def store(allocator: CpuOffloadingBlockAllocator, number: int) -> list[bytes]:
    chain = hash_chain(range(LENGTH), 1, salt=number.to_bytes(4))
    plan = allocator.plan_store(chain, LENGTH)
    assert plan is not None
    allocator.commit(plan)
    return chain


def test_few_ends_are_dealt_with_at_once(allocator: CpuOffloadingBlockAllocator) -> None:
    carryover = Carryover(allocator)
    chain = store(allocator, 0)
    carryover.drop(chain, 4)
    assert allocator.resident_depth(chain) == 4 and not carryover.has_drops
    carryover.unpin(allocator.pin(chain, 0, 4))
    assert not len(carryover) and not allocator._pins


def test_a_storm_takes_steps_and_drops_come_first(allocator: CpuOffloadingBlockAllocator) -> None:
    carryover = Carryover(allocator, step_work=1)
    chains = [store(allocator, number) for number in range(6)]
    pins = [allocator.pin(chain, 0, LENGTH) for chain in chains[:3]]
    for pin in pins:
        carryover.unpin(pin)
    for chain in chains[3:]:
        carryover.drop(chain, 0)
    seen = []
    while len(carryover):
        depths = [allocator.resident_depth(chain) for chain in chains[3:]]
        seen.append((depths.count(0), len(allocator._pins), carryover.has_drops))
        carryover.tidy()
        carryover.check_invariants()
        allocator.check_invariants()
    assert seen == [(0, 2, True), (1, 2, True), (2, 2, True), (3, 2, False), (3, 1, False)]
    assert not allocator._pins


def test_a_storm_of_thousands_is_bounded_per_step(allocator: CpuOffloadingBlockAllocator) -> None:
    """Of 4,096 pins and as many drops a step ends no more than its work allows, and all end."""
    carryover = Carryover(allocator)
    chains = [store(allocator, number) for number in range(4096)]
    pins = [allocator.pin(chain, 0, LENGTH) for chain in chains]
    for pin, chain in zip(pins, chains, strict=True):
        carryover.unpin(pin)
        carryover.drop(chain, 0)
    most, num_steps = STEP_WORK // 256, 0
    while before := len(carryover):
        assert len(pins) + len(chains) - before <= most * (num_steps + 1)
        carryover.tidy()
        allocator.tidy()
        num_steps += 1
        assert before - len(carryover) <= most
    assert num_steps >= 2 * 4096 // most
    for _ in range(100):
        allocator.tidy()
    assert allocator.num_free == allocator.capacity
    allocator.check_invariants()


def test_slots_that_a_pin_gives_back_count(allocator: CpuOffloadingBlockAllocator) -> None:
    """After a reset each end of a pin gives slots back, so fewer of them fit one step."""
    chains = [store(allocator, number) for number in range(4)]
    pins = [allocator.pin(chain, 0, LENGTH) for chain in chains]
    allocator.reset()
    carryover = Carryover(allocator, step_work=2 * (256 + LENGTH))
    for pin in pins:
        carryover.unpin(pin)
    assert len(carryover) == 2 and allocator.num_leaving == 2 * LENGTH
