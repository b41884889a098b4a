"""Does a tail leave the pool that somebody else has too, and nothing that others need?"""

import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import HintedPolicy, KeepHints, LruPolicy, make_policy

CHAIN = [bytes([number]) * 16 for number in range(6)]
BRANCH = [*CHAIN[:3], *(bytes([number]) * 16 for number in range(100, 103))]


def allocator_with(*chains: list[bytes], policy: str = "hazard") -> CpuOffloadingBlockAllocator:
    allocator = CpuOffloadingBlockAllocator(20, policy=make_policy(policy, 20))
    for chain in chains:
        serve(allocator, chain)
    return allocator


@pytest.mark.parametrize("policy", ["hazard", "lru", "s3fifo", "arc"])
@pytest.mark.parametrize(
    ("start", "most", "num_shed"), [(2, 9, 4), (2, 3, 3), (0, 9, 6), (5, 9, 1), (6, 9, 0)]
)
def test_the_end_goes_as_far_as_is_asked(policy: str, start: int, most: int, num_shed: int) -> None:
    allocator = allocator_with(CHAIN, policy=policy)
    assert allocator.shedding.shed(CHAIN, start, len(CHAIN), most) == num_shed
    assert allocator.resident_depth(CHAIN) == len(CHAIN) - num_shed
    assert allocator.num_free == 20 - len(CHAIN) + num_shed
    allocator.check_invariants()


def test_what_others_go_on_behind_stays() -> None:
    allocator = allocator_with(CHAIN, BRANCH)
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == 3
    assert allocator.resident_depth(BRANCH) == len(BRANCH)
    assert allocator.shedding.shed(BRANCH, 0, len(BRANCH), 9) == len(BRANCH)
    assert allocator.num_free == 20
    allocator.check_invariants()


def test_what_lies_behind_the_stop_stays() -> None:
    allocator = allocator_with(CHAIN)
    assert allocator.shedding.shed(CHAIN, 0, 4, 9) == 0
    assert allocator.resident_depth(CHAIN) == len(CHAIN)


def test_what_is_read_or_filled_stays() -> None:
    allocator = allocator_with(CHAIN)
    pin = allocator.pin(CHAIN, 0, 5)
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == 1
    allocator.unpin(pin)
    plan = allocator.plan_store(CHAIN, len(CHAIN))
    assert plan is not None
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == 0
    allocator.commit(plan)
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == len(CHAIN)
    allocator.check_invariants()


def test_what_a_hint_pins_stays_as_long_as_it_says() -> None:
    now = [0.0]
    allocator = CpuOffloadingBlockAllocator(20, policy=HintedPolicy(LruPolicy(), 10, lambda: now[0]))
    serve(allocator, CHAIN[:4], KeepHints(pinned_until=5.0))
    serve(allocator, CHAIN)
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == 2
    assert allocator.shedding.shed(CHAIN[:4], 0, 4, 9) == 0
    assert allocator.resident_depth(CHAIN) == 4
    now[0] = 6.0
    assert allocator.shedding.shed(CHAIN[:4], 0, 4, 9) == 4
    allocator.check_invariants()


@pytest.mark.parametrize("num_pinned", [1, 3])
def test_branches_that_a_hint_pins_stay(num_pinned: int) -> None:
    allocator = CpuOffloadingBlockAllocator(20, policy=HintedPolicy(LruPolicy(), 10, lambda: 0.0))
    serve(allocator, CHAIN)
    serve(allocator, BRANCH[: 3 + num_pinned], KeepHints(pinned_until=5.0))
    assert allocator.shedding.shed(BRANCH, 0, 3 + num_pinned, 9) == 0
    assert allocator.shedding.shed(CHAIN, 0, len(CHAIN), 9) == 3
    assert allocator.resident_depth(BRANCH) == 3 + num_pinned
    allocator.check_invariants()


def test_with_checkpoints_nothing_goes() -> None:
    allocator = CpuOffloadingBlockAllocator(20, bag_slots=2)
    plan = allocator.plan_store(CHAIN, 4, num_bag=1)
    assert plan is not None
    allocator.commit(plan)
    assert allocator.shedding.shed(CHAIN, 0, 4, 9) == 0
