"""What was split becomes one segment again when nothing keeps its parts apart."""

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain
from evictor import make_policy
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with

NUM_USES = 6
"""So often the document is asked for until its parts have the same past."""
JOINING = ["arc", "hazard", "lru"]
"""With the others a part keeps its turn, or its number of uses, until it leaves: they are never the same."""

DOCUMENT = hash_chain(range(256), 1)
FORKS = {depth: hash_chain([*range(depth), 1000 + depth], 1) for depth in range(3, 256, 5)}


def _fragmented(policy: str) -> CpuOffloadingBlockAllocator:
    """A document, and many chains that leave it at different places."""
    allocator = CpuOffloadingBlockAllocator(1024, policy=make_policy(policy, 1024))
    for chain in (DOCUMENT, *FORKS.values()):
        allocator.touch(chain)
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
    assert _num_segments(allocator) > len(FORKS)
    return allocator


def _num_segments(allocator: CpuOffloadingBlockAllocator) -> int:
    """Of the document."""
    place = allocator._tree.find(DOCUMENT, len(DOCUMENT))
    return len(allocator._tree.path(place.node))


@pytest.mark.parametrize("policy", JOINING)
def test_a_document_is_one_segment_again_when_what_left_it_is_gone(policy: str) -> None:
    allocator = _fragmented(policy)
    slots = allocator.lookup(DOCUMENT).slots.tolist()
    for depth, chain in FORKS.items():
        allocator.drop(chain, depth)
    for _ in range(NUM_USES):
        allocator.touch(DOCUMENT)
        allocator.check_invariants()
    assert _num_segments(allocator) == 1
    assert allocator.lookup(DOCUMENT).slots.tolist() == slots
    assert allocator.evict(999) == 256
    allocator.check_invariants()


@pytest.mark.parametrize("policy", JOINING)
def test_what_is_too_much_for_one_request_is_joined_in_the_next_steps(policy: str) -> None:
    allocator = _fragmented(policy)
    for _ in range(NUM_USES):
        allocator.touch(DOCUMENT)
    for depth, chain in FORKS.items():
        allocator.drop(chain, depth)
    allocator._ranking._max_joined = 10
    allocator.touch(DOCUMENT)
    left = _num_segments(allocator)
    assert left == len(FORKS) + 1 - 10
    while left > 1:
        allocator.tidy()
        allocator.check_invariants()
        left, before = _num_segments(allocator), left
        assert before - left == min(10, before - 1)
    allocator.reset()
    allocator.tidy()
    allocator.check_invariants()


@pytest.mark.parametrize("goes", ["evicted", "cut off", "cut off, and carried over"])
@pytest.mark.parametrize("policy", JOINING)
def test_what_is_yet_to_be_joined_may_be_gone(policy: str, goes: str) -> None:
    allocator = _fragmented(policy)
    for _ in range(NUM_USES):
        allocator.touch(DOCUMENT)
    for depth, chain in FORKS.items():
        allocator.drop(chain, depth)
    allocator._ranking._max_joined = 1
    allocator.touch(DOCUMENT)
    if goes == "evicted":
        allocator.evict(1024)
    else:
        allocator._work_left = 0 if "carried" in goes else 1 << 20
        allocator.reset()
    allocator.tidy()
    allocator.check_invariants()
    assert allocator.num_free == allocator.capacity


@pytest.mark.parametrize("max_joined", [1, 512])
@pytest.mark.parametrize("policy", JOINING)
def test_what_was_cut_off_is_not_joined_any_more(policy: str, max_joined: int) -> None:
    """It is still there, and the document was stored anew since."""
    allocator = _fragmented(policy)
    for _ in range(NUM_USES):
        allocator.touch(DOCUMENT)
    for depth, chain in FORKS.items():
        allocator.drop(chain, depth)
    allocator._ranking._max_joined = 1
    allocator.touch(DOCUMENT)
    allocator._step_work = allocator._work_left = 0
    allocator.reset()
    plan = allocator.plan_store(DOCUMENT, 256)
    assert plan is not None
    allocator.commit(plan)
    num_dead = len(list(allocator._tree.dead_nodes()))
    assert num_dead > 2
    allocator._ranking._max_joined = max_joined
    allocator.tidy()
    allocator.check_invariants()
    assert len(list(allocator._tree.dead_nodes())) == num_dead
    assert allocator.resident_depth(DOCUMENT) == 256
    assert _num_segments(allocator) == 1


@pytest.mark.parametrize("policy", JOINING)
def test_parts_with_something_between_them_stay_apart(policy: str) -> None:
    allocator = _fragmented(policy)
    kept = list(FORKS)[1::2]
    for depth in list(FORKS)[::2]:
        allocator.drop(FORKS[depth], depth)
    for _ in range(NUM_USES):
        allocator.touch(DOCUMENT)
    assert _num_segments(allocator) == len(kept) + 1
    for depth in kept:
        assert allocator.resident_depth(FORKS[depth]) == depth + 1
    allocator.check_invariants()


@pytest.mark.parametrize("policy", JOINING)
def test_requests_for_a_part_and_for_all_of_it_in_turn(policy: str) -> None:
    """The first few differ in their number of uses; then each splits, or joins, no more than two segments."""
    allocator = CpuOffloadingBlockAllocator(1024, policy=make_policy(policy, 1024))
    plan = allocator.plan_store(DOCUMENT, 256)
    assert plan is not None
    allocator.commit(plan)
    for turn in range(40):
        allocator.touch(DOCUMENT[: 16 + 5 * turn])
        allocator.touch(DOCUMENT)
        assert len(list(allocator._tree.nodes())) <= NUM_USES
    allocator.check_invariants()


def test_pins_keep_parts_apart_and_stay_at_their_ends() -> None:
    pair = pair_with(LONG, capacity=12)
    inner, last = pair.pin(LONG, 0, 3), pair.pin(LONG, 1, 6)
    pair.use(LONG)
    pair.check()
    assert len(list(pair.allocator._tree.nodes())) == 2
    pair.unpin(inner)
    pair.use(LONG)
    pair.check()
    [node] = pair.allocator._tree.nodes()
    assert last.node is node
    pair.drop(LONG[:5])
    pair.check()
    assert pair.allocator.num_leaving == 2
    pair.unpin(last)
    pair.check()


def test_a_store_in_flight_lands_in_what_was_joined() -> None:
    pair = pair_with(LONG[:2], FORK, capacity=16)
    pair.use(LONG[:1])
    plan = pair.plan_store(LONG)
    assert plan is not None
    pair.drop(FORK[:4])
    pair.use(LONG)
    pair.check()
    assert len(list(pair.allocator._tree.nodes())) == 1
    pair.commit(plan)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6


def test_what_is_joined_goes_in_its_turn() -> None:
    pair = pair_with(LONG, OTHER, FORK, capacity=16)
    pair.drop(FORK[:4])
    for chain in (LONG, OTHER, LONG):
        pair.use(chain)
    pair.check()
    assert len(list(pair.allocator._tree.nodes())) == 2
    pair.evict(pair.allocator.num_free + 99)
    pair.check()
