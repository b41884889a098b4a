"""Who leaves, and who must not."""

from typing import Any

import pytest

from allocator import CpuOffloadingBlockAllocator
from evictor import LruPolicy, Newcomer, available_policies, make_policy
from tests.allocator.pair import Pair
from tests.allocator.scenes import FORK, LONG, OTHER, pair_with
from tests.strategies import chain_of


def test_the_least_recently_used_chain_loses_its_tail_first() -> None:
    pair = pair_with(LONG, OTHER, capacity=10)
    pair.evict(2)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4
    assert pair.allocator.resident_depth(OTHER) == 4


def test_a_use_of_a_chain_is_a_use_of_its_beginning_only() -> None:
    pair = pair_with(LONG, OTHER, capacity=10)
    pair.use(LONG[:3])
    pair.evict(8)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2, "first its tail, then OTHER, then what was used last"
    assert pair.allocator.resident_depth(OTHER) == 0


def test_a_prefix_is_as_recent_as_what_follows_it() -> None:
    pair = pair_with(LONG, capacity=15)
    pair.store(FORK)  # splits LONG
    pair.use(LONG)
    pair.store(OTHER)
    pair.evict(4)  # two of FORK, two of LONG
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4
    assert pair.allocator.resident_depth(OTHER) == 4


@pytest.mark.parametrize("sibling", [True, False])
def test_a_prefix_stays_recent_when_what_followed_it_failed(sibling: bool) -> None:
    """Whether the failed store grew its segment in place or hung below it."""
    pair = pair_with(LONG[:3], capacity=12)
    beside = pair.plan_store(FORK) if sibling else None
    pair.store(OTHER)
    failing = pair.plan_store(LONG)
    assert failing is not None
    pair.abort(failing)
    if beside is not None:
        pair.abort(beside)
    pair.evict(1)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 3
    assert pair.allocator.resident_depth(OTHER) == 3


def test_the_path_of_a_newcomer_is_not_evicted_for_it() -> None:
    pair = pair_with(LONG, capacity=6)
    plan = pair.plan_store(FORK)  # only the rest of LONG may go
    pair.check()
    assert plan is not None
    assert len(plan.hashes) == 2
    assert pair.allocator.resident_depth(LONG) == 4


def test_a_policy_may_keep_the_newcomer_out() -> None:
    class KeepFirst(LruPolicy[Any]):
        def choose(self, newcomer: Newcomer[Any] | None = None) -> Any | None:
            return super().choose() if newcomer is None else None

    pair = Pair(6, policy=KeepFirst())
    pair.store(OTHER)
    plan = pair.plan_store(LONG)
    assert plan is not None
    assert len(plan.hashes) == 2, "as many as were free"
    assert pair.plan_store(chain_of(2)) is None
    pair.check()
    pair.evict(1)
    pair.check()
    assert pair.allocator.resident_depth(OTHER) == 3


def test_a_newcomer_is_named_to_the_policy_and_history_by_hash() -> None:
    calls: list[tuple[str, list[Any]]] = []

    class Recording(LruPolicy[Any]):
        def choose(self, newcomer: Newcomer[Any] | None = None) -> Any | None:
            calls.append(("newcomer", [newcomer.key, newcomer.num_positions] if newcomer else []))
            return super().choose(newcomer)

        def evicted(self, leaf: Any, keys: Any, weight: int) -> None:
            calls.append(("evicted", [*keys, weight]))

        def stored(self, node: Any, keys: Any, next_key: Any) -> None:
            calls.append(("stored", list(keys)))
            super().stored(node, keys, next_key)

    pair = Pair(6, policy=Recording())
    pair.store(OTHER)
    pair.store(LONG[:3])
    assert calls == [
        ("stored", OTHER),
        ("newcomer", [LONG[0], 3]),
        ("evicted", [*OTHER[-1:], 1]),
        ("stored", LONG[:3]),
    ]


@pytest.mark.parametrize("policy", available_policies())
def test_what_grows_is_not_evicted_when_what_was_cut_off_behind_it_goes(policy: str) -> None:
    """The cut is taken away while room is made for a store in its place, and more room is needed."""
    pool = CpuOffloadingBlockAllocator(2, policy=make_policy(policy, 2))
    pool._step_work = pool._work_left = 0  # nothing is taken away but for room
    chain = chain_of(0, 0, 0)
    plan = pool.plan_store(chain, 2)
    assert plan is not None
    pool.commit(plan)
    pool.drop(chain, 1)
    plan = pool.plan_store(chain, 3)
    assert plan is not None
    assert len(plan.slots) == 1
    pool.check_invariants()
    pool.commit(plan)
    assert pool.resident_depth(chain) == 2


@pytest.mark.parametrize("num_cut", [1, 2])
@pytest.mark.parametrize("policy", available_policies())
def test_a_store_behind_a_cut_takes_the_room_of_the_cut_only(policy: str, num_cut: int) -> None:
    """There is nothing else but what it continues, which is as long as before."""
    pool = CpuOffloadingBlockAllocator(3 + num_cut, policy=make_policy(policy, 3 + num_cut))
    pool._step_work = pool._work_left = 0
    chain = chain_of(0, 0, 0, 1, 1)
    plan = pool.plan_store(chain, 3 + num_cut)
    assert plan is not None
    pool.commit(plan)
    pool.drop(chain, 3)
    other = chain_of(0, 0, 0, 2, 2, 2, 2)
    plan = pool.plan_store(other, 7)
    assert plan is not None
    assert len(plan.slots) == num_cut
    pool.check_invariants()
    pool.commit(plan)
    assert pool.resident_depth(other) == 3 + num_cut
    assert pool.num_evicted == 0


@pytest.mark.parametrize("num_stored", [1, 2, 3])
def test_what_hangs_on_what_was_cut_off_is_not_found_behind_what_is_stored_anew(num_stored: int) -> None:
    """Two segments were cut off and are still there. The first is stored again, the second is not."""
    pool = CpuOffloadingBlockAllocator(64)
    pool._step_work = pool._work_left = 0
    for chain in (LONG, FORK):
        plan = pool.plan_store(chain, len(chain))
        assert plan is not None
        pool.commit(plan)
    pool.drop(LONG, 0)
    plan = pool.plan_store(LONG, num_stored)
    assert plan is not None
    pool.commit(plan)
    pool.check_invariants()
    for chain in (LONG, FORK):
        assert pool.resident_depth(chain) == num_stored
        assert pool.lookup(chain).slots.tolist() == plan.slots.tolist()
    pool.tidy()
    pool.check_invariants()


@pytest.mark.parametrize("between", ["nothing", "a step"])
def test_what_was_cut_off_is_stored_again_part_by_part(between: str) -> None:
    """What is left of it of old is neither known nor in the way."""
    pool = CpuOffloadingBlockAllocator(64)
    pool._step_work = pool._work_left = 0
    for chain in (LONG, FORK):
        plan = pool.plan_store(chain, len(chain))
        assert plan is not None
        pool.commit(plan)
    pool.drop(LONG, 0)
    pool._step_work = 1 if between == "a step" else 0
    for start, stop in ((0, 1), (1, 3), (3, 4), (4, 6)):
        pool.tidy()
        plan = pool.plan_store(LONG, stop)
        assert plan is not None
        assert (plan.start, len(plan.hashes)) == (start, stop - start)
        pool.commit(plan)
        pool.check_invariants()
    assert pool.resident_depth(FORK) == 3
