"""Where a model with windows or states can go on: what is offered, pinned, evicted, dropped."""

import pytest

from allocator import CapacityError, ChainError, CpuOffloadingBlockAllocator
from allocator.bags import BagState
from allocator.node import Node
from evictor import available_policies, make_policy
from tests.allocator.bag_pair import BagPair
from tests.allocator.scenes import FORK, LONG, OTHER
from tests.strategies import chain_of

COLUMNS = pytest.mark.parametrize("columns", [0, 1, 2])


def pair_with(
    *stops: int, columns: int = 1, capacity: int = 40, num_bag: int = 2, chain: list[bytes] = LONG
) -> BagPair:
    """Of LONG, with a checkpoint at each of ``stops``."""
    pair = BagPair(capacity, columns)
    for stop in stops:
        pair.store(chain[:stop], num_bag)
    pair.check()
    return pair


def nodes_of(pair: BagPair) -> list[Node]:
    return list(pair.allocator._tree.nodes())


# What is offered


@COLUMNS
def test_the_deepest_checkpoint_up_to_a_limit_and_behind_a_depth(columns: int) -> None:
    allocator = pair_with(2, 5, 6, columns=columns).allocator
    assert [allocator.usable_depth(LONG, limit) for limit in range(7)] == [0, 0, 2, 2, 2, 5, 6]
    assert [allocator.usable_depth(LONG, 5, beyond) for beyond in range(7)] == [5, 5, 5, 5, 5, 0, 0]
    assert allocator.usable_depth(FORK, 5) == 2
    assert allocator.usable_depth(OTHER, 4) == 0


def test_it_is_found_in_an_earlier_segment() -> None:
    pair = pair_with(2, 6)
    pair.store(FORK, None)
    assert len(nodes_of(pair)) == 3
    assert pair.allocator.usable_depth(FORK, 5) == 2
    assert pair.allocator.usable_depth(FORK, 5, 2) == 0


def test_without_windows_any_resident_position_is_one() -> None:
    allocator = CpuOffloadingBlockAllocator(8)
    plan = allocator.plan_store(LONG, 6)
    assert plan is not None and plan.bag is None
    allocator.commit(plan)
    assert [allocator.usable_depth(LONG, limit) for limit in (3, 6)] == [3, 6]
    assert allocator.usable_depth(LONG, 6, 6) == allocator.usable_depth(OTHER, 4) == 0


def test_an_incomplete_bag_is_not_offered() -> None:
    pair = BagPair(40)
    first, second = pair.plan_store(LONG, 3, num_bag=1), pair.plan_store(LONG, 6, num_bag=3)
    assert first and second
    pair.commit(second)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 0, "what is before it has no bytes yet"
    pair.commit(first)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6


def test_a_bag_may_need_no_slot() -> None:
    """Chunked attention at the end of a chunk."""
    pair = pair_with(3, 6, num_bag=0, columns=0)
    assert pair.allocator.usable_depth(LONG, 5) == 3
    assert pair.allocator.num_free == 40
    pair.evict(41)
    pair.check()


# Stores


@COLUMNS
def test_a_plan_has_positions_and_a_bag(columns: int) -> None:
    pair = BagPair(40, columns)
    plan = pair.plan_store(LONG, num_bag=3)
    assert plan is not None and plan.bag is not None
    assert plan.slots.shape == (6, columns)
    assert (plan.stop, len(plan.bag)) == (6, 3)
    assert pair.allocator.num_filling == 6 * columns + 3
    pair.commit(plan)
    pair.check()
    assert (pair.allocator.num_resident, pair.allocator.num_bagged) == (6 * columns, 3)


def test_a_bag_alone_for_a_place_that_is_known() -> None:
    pair = pair_with(6)
    plan = pair.plan_store(LONG, 4, num_bag=2)
    assert plan is not None
    assert (plan.start, plan.hashes, plan.stop) == (4, [], 4)
    assert pair.plan_store(LONG, 4, num_bag=2) is None, "it is on its way"
    pair.commit(plan)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 5) == 4
    assert pair.plan_store(LONG, 4, num_bag=2) is None
    assert pair.plan_store(LONG, 4) is None


def test_a_bag_alone_behind_a_position_that_is_filling() -> None:
    pair = BagPair(40)
    plan = pair.plan_store(LONG, num_bag=1)
    bag = pair.plan_store(LONG, 3, num_bag=1)
    assert plan and bag
    pair.commit(bag)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 0
    pair.commit(plan)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 5) == 3


def test_it_is_all_or_nothing() -> None:
    pair = pair_with(4, capacity=9, chain=OTHER)
    assert pair.plan_store(LONG, num_bag=3) is None or pair.allocator.num_evicted
    pair.check()
    assert BagPair(8).plan_store(LONG, num_bag=3) is None
    pinned = pair_with(4, capacity=9, chain=OTHER)
    pinned.pin(OTHER, 0, 4)
    assert pinned.plan_store(LONG, num_bag=3) is None
    pinned.check()


def test_what_does_not_fit_evicts_nothing() -> None:
    pair = pair_with(4, capacity=9, chain=OTHER)
    assert pair.plan_store(chain_of(*range(9)), num_bag=3) is None
    assert pair.allocator.num_evicted == 0
    pair.check()


def test_a_store_behind_one_that_is_filling_takes_what_is_free() -> None:
    pair = BagPair(7)
    assert pair.plan_store(LONG, 5)
    assert pair.plan_store(LONG, num_bag=1)
    pair.check()
    assert pair.allocator.num_free == 0


def test_a_bag_that_does_not_fit_beside_its_chain_evicts_nothing() -> None:
    pair = pair_with(6, capacity=14)
    pair.store(OTHER[:1], 2)
    assert BagPair(9, bag_slots=8).plan_store(LONG[:2], num_bag=8) is None
    assert pair.plan_store([*LONG, *chain_of(*range(9))], num_bag=3) is None
    assert pair.allocator.num_evicted == 0


@COLUMNS
def test_a_failed_store_takes_its_bag_along(columns: int) -> None:
    pair = pair_with(3, columns=columns)
    free = pair.allocator.num_free
    plan = pair.plan_store(LONG, num_bag=3)
    assert plan is not None
    pair.abandon(plan)
    pair.check()
    assert pair.allocator.num_filling == 3 * columns + 3
    pair.abort(plan)
    pair.check()
    assert pair.allocator.num_free == free
    assert pair.allocator.usable_depth(LONG, 6) == 3


def test_a_failed_bag_takes_nothing_else() -> None:
    pair = pair_with(6)
    plan = pair.plan_store(LONG, 4, num_bag=3)
    assert plan is not None
    pair.abandon(plan)
    pair.check()
    assert pair.allocator.num_filling == 3
    other = pair.plan_store(LONG, 4, num_bag=1)
    assert other is not None
    pair.abort(plan)
    pair.commit(other)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6
    assert pair.allocator.usable_depth(LONG, 5) == 4


def test_several_stores_for_one_checkpoint() -> None:
    pair = pair_with(2)
    one = pair.plan_store(LONG, limit=2, num_bag=3)
    assert one is not None and one.bag is None
    pair.commit(one)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4
    assert pair.allocator.usable_depth(LONG, 6) == 2
    two = pair.plan_store(LONG, num_bag=3)
    assert two is not None and two.bag is not None
    pair.commit(two)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6


def test_if_the_last_of_them_fails_the_others_were_for_nothing() -> None:
    pair = pair_with(2)
    one = pair.plan_store(LONG, limit=2, num_bag=3)
    assert one is not None
    pair.commit(one)
    two = pair.plan_store(LONG, num_bag=3)
    assert two is not None
    pair.abort(two)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2


@pytest.mark.parametrize("lands_first", [True, False])
def test_who_stores_no_more_leaves_nothing_behind_the_last_checkpoint(lands_first: bool) -> None:
    pair = pair_with(2)
    plan = pair.plan_store(LONG, 5)
    assert plan is not None
    if lands_first:
        pair.commit(plan)
    pair.close(LONG[:5])
    if not lands_first:
        pair.commit(plan)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2
    pair.close(OTHER)


def test_others_who_go_on_keep_it() -> None:
    pair = pair_with(2)
    first = pair.plan_store(LONG, 4)
    assert first is not None
    pair.commit(first)
    second = pair.plan_store(LONG, num_bag=1)
    assert second is not None
    pair.close(LONG[:4])
    pair.check()
    pair.commit(second)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6


# Pins


@COLUMNS
def test_a_pinned_bag_stays(columns: int) -> None:
    pair = pair_with(3, 6, columns=columns)
    pin = pair.pin(LONG, 1, 3)
    assert pin.bag is not None and len(pin.bag) == 2
    pair.evict(99)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 3
    pair.unpin(pin)
    pair.evict(99)
    pair.check()
    assert pair.allocator.num_free == 40


def test_a_pin_needs_a_checkpoint() -> None:
    pair = pair_with(3, 6)
    with pytest.raises(ChainError, match="no checkpoint at 4"):
        pair.allocator.pin(LONG, 0, 4)
    with pytest.raises(ChainError, match="6 are resident"):
        pair.allocator.pin(chain_of(0, 0, 0, 0, 0, 0, 0), 0, 7)
    pair.check()


@pytest.mark.parametrize("depth", [1, 4, 5])
def test_a_pinned_checkpoint_survives_a_split(depth: int) -> None:
    pair = pair_with(6)
    pin = pair.pin(LONG, 0, 6)
    pair.store([*LONG[:depth], *chain_of(*[0] * depth, 2, 2)[depth:]])
    pair.evict(99)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6
    pair.unpin(pin)


@pytest.mark.parametrize("goes_first", ["bag", "position", "all"])
def test_the_slots_of_a_bag_that_left_are_kept_until_the_last_load_ends(goes_first: str) -> None:
    pair = pair_with(3, 6)
    one, other = pair.pin(LONG, 0, 6), pair.pin(LONG, 4, 6)
    if goes_first == "bag":
        pair.drop_bag(LONG)
    elif goes_first == "position":
        pair.drop(LONG[:5])
    else:
        pair.reset()
    pair.check()
    leaving = pair.allocator.num_leaving
    assert leaving == {"bag": 2, "position": 2 + 2, "all": 2 + 6}[goes_first]
    pair.unpin(one)
    pair.check()
    pair.unpin(other)
    pair.check()
    assert pair.allocator.num_leaving == 0


def test_a_new_bag_beside_one_that_a_load_still_reads() -> None:
    pair = pair_with(6)
    pin = pair.pin(LONG, 0, 6)
    pair.drop_bag(LONG)
    pair.store(LONG, 3)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 6
    again = pair.pin(LONG, 0, 6)
    assert again.bag is not None and pin.bag is not None
    assert not {*again.bag.tolist()} & {*pin.bag.tolist()}
    pair.unpin(pin)
    pair.check()
    pair.unpin(again)


# Eviction


def _fill(pair: BagPair, *first: int) -> None:
    for token in first:
        pair.store(chain_of(token, token), 1)


def test_bags_of_inner_checkpoints_go_first_the_oldest_unused_first() -> None:
    pair = pair_with(1, 2, 3, 6, capacity=14)
    pair.use(LONG[:1])
    pair.allocator.touch(LONG[:2])
    assert pair.allocator.num_free == 0 and pair.allocator.num_bagged == 8
    pair.evict(2)
    pair.check()
    assert pair.allocator.num_thinned == 1
    usable = [pair.allocator.usable_depth(LONG, limit) for limit in range(7)]
    assert usable == [0, 1, 2, 2, 2, 2, 6], "the one at 3 was used by nobody"


def test_an_inner_checkpoint_that_was_asked_for_stays_longer() -> None:
    pair = pair_with(1, 2, 6, columns=0, capacity=6)
    pair.use(LONG)
    pair.allocator.touch([*LONG[:1], *OTHER[1:]])
    pair.use(LONG)
    pair.evict(2)
    pair.check()
    assert [pair.allocator.usable_depth(LONG, limit) for limit in (1, 5, 6)] == [1, 1, 6]


def test_they_thin_out_until_bags_have_half_of_the_pool() -> None:
    pair = pair_with(1, 2, 3, 4, 5, 6, capacity=18)
    assert (pair.allocator.num_bagged, pair.allocator.num_free) == (12, 0)
    pair.evict(4)
    pair.check()
    assert (pair.allocator.num_thinned, pair.allocator.num_bagged) == (2, 8)
    assert pair.allocator.resident_depth(LONG) == 6, "bags had more than half of the pool"
    pair.evict(1)
    pair.check()
    assert pair.allocator.num_thinned == 2
    assert pair.allocator.resident_depth(LONG) < 6, "a leaf goes, by the policy"


def test_in_a_pool_of_bags_alone_all_inner_ones_go_before_a_leaf() -> None:
    pair = pair_with(1, 2, 3, 4, 5, 6, columns=0, capacity=12)
    pair.store(OTHER, 3)
    pair.check()
    assert pair.allocator.num_thinned == 2
    pair.evict(6)
    pair.check()
    assert pair.allocator.num_thinned == 5
    assert pair.allocator.usable_depth(LONG, 6) == 6


def test_the_checkpoint_of_a_branch_is_no_inner_one() -> None:
    pair = pair_with(1, 3, 6, capacity=20, num_bag=3)
    pair.store(FORK, 2)
    pair.check()
    assert (pair.allocator.num_bagged, pair.allocator.num_free) == (11, 1)
    pair.evict(1)
    pair.check()
    assert pair.allocator.num_thinned == 1
    usable = [pair.allocator.usable_depth(LONG, limit) for limit in range(7)]
    assert usable == [0, 0, 0, 3, 3, 3, 6], "that at 3 is a branch's, that at 6 a leaf's"


def test_a_bite_goes_on_to_the_checkpoint_before() -> None:
    pair = pair_with(2, 6, capacity=20)
    pair.evict(1)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == pair.allocator.usable_depth(LONG, 6) == 2
    assert pair.allocator.num_free == 20 - 2 - 2


def test_a_bite_goes_on_into_the_segment_before() -> None:
    """Where two leave it there is no checkpoint. When the last of them goes, it serves no hit."""
    pair = pair_with(2, 6, capacity=24)
    pair.store(FORK, 1)
    pair.evict(1)
    assert pair.allocator.usable_depth(FORK, 5) == 5
    pair.evict(1)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 2


def test_a_leaf_that_a_load_has_read_stays_while_its_bag_is_filling() -> None:
    pair = pair_with(6)
    pin = pair.pin(LONG, 0, 6)
    plan = pair.plan_store(LONG, 4, num_bag=2)
    assert plan is not None
    pair.unpin(pin)
    pair.evict(99)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.abort(plan)
    pair.evict(99)
    pair.check()
    assert pair.allocator.num_free == 40


@pytest.mark.parametrize("how", ["use", "store", "pin"])
def test_what_is_split_off_behind_a_bag_that_is_filling_serves_no_hit(how: str) -> None:
    """The segment was kept for the bag, though its end had lost its checkpoint."""
    pair = pair_with(2, 6)
    plan = pair.plan_store(LONG, 4, num_bag=2)
    assert plan is not None
    pair.drop_bag(LONG)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    if how == "use":
        pair.use(LONG[:4])
    elif how == "store":
        pair.store([*LONG[:4], *chain_of(0, 0, 0, 0, 7)[4:]])
    else:
        pair.commit(plan)
        pair.pin(LONG, 0, 4)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4


def test_a_leaf_that_was_split_stays_while_its_bag_is_filling() -> None:
    pair = pair_with(6)
    plan = pair.plan_store(LONG, 5, num_bag=2)
    assert plan is not None
    pair.use(LONG[:2])
    pair.evict(99)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.commit(plan)


def test_a_leaf_under_a_store_is_not_evicted() -> None:
    pair = pair_with(6)
    plan = pair.plan_store(LONG, 4, num_bag=2)
    assert plan is not None
    pair.evict(99)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.commit(plan)
    pair.evict(99)
    pair.check()
    assert pair.allocator.num_free == 40


@pytest.mark.parametrize("policy", available_policies())
def test_what_grows_is_not_evicted_when_what_is_loose_behind_it_goes(policy: str) -> None:
    """Two leaves are evicted for a store, then what is before them is loose; and more room is needed."""
    pair = BagPair(11, policy=make_policy(policy, 11))
    for chain in (LONG[:1], chain_of(0, 0, 0, 1, 1), chain_of(0, 0, 0, 2, 2)):
        pair.store(chain, 1)
    assert pair.plan_store(chain_of(0, *[3] * 9), num_bag=1) is None
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 1


@pytest.mark.parametrize("policy", available_policies())
def test_what_gets_a_bag_is_not_evicted_for_it(policy: str) -> None:
    pair = BagPair(10, bag_slots=8, policy=make_policy(policy, 10))
    for chain in (LONG[:1], chain_of(0, 0, 0, 1, 1), chain_of(0, 0, 0, 2, 2)):
        pair.store(chain, 1)
    pair.use(LONG[:2])
    plan = pair.plan_store(LONG[:2], num_bag=8)
    assert plan is not None
    pair.commit(plan)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 2


# Dropping


@pytest.mark.parametrize("depth", [3, 6])
def test_a_bad_bag_leaves_alone(depth: int) -> None:
    pair = pair_with(1, 3, 6)
    pair.drop_bag(LONG[:depth])
    pair.check()
    assert pair.allocator.usable_depth(LONG, depth) == {3: 1, 6: 3}[depth]
    assert pair.allocator.resident_depth(LONG) == {3: 6, 6: 3}[depth], "what is behind serves no hit"


def test_behind_a_bad_bag_others_may_go_on() -> None:
    pair = pair_with(3, 6)
    plan = pair.plan_store(chain_of(0, 0, 0, 0, 0, 0, 1), num_bag=1)
    assert plan is not None
    pair.drop_bag(LONG)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.commit(plan)
    pair.check()
    assert pair.allocator.usable_depth(plan.hashes and chain_of(0, 0, 0, 0, 0, 0, 1), 7) == 7


def test_a_bad_bag_that_is_read_leaves_its_positions_until_the_load_ends() -> None:
    pair = pair_with(3, 6)
    pin = pair.pin(LONG, 0, 6)
    pair.drop_bag(LONG)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 6
    pair.unpin(pin)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 3


def test_a_bad_position_takes_checkpoints_behind_it_along() -> None:
    pair = pair_with(2, 4, 6)
    pair.drop(LONG[:4])
    pair.check()
    assert pair.allocator.resident_depth(LONG) == pair.allocator.usable_depth(LONG, 6) == 2
    pair.drop_bag(LONG)
    pair.drop_bag(OTHER)
    pair.check()


def test_a_reset_forgets_checkpoints_too() -> None:
    pair = pair_with(2, 6)
    plan = pair.plan_store(LONG, 4, num_bag=3)
    assert plan is not None
    pair.reset()
    pair.check()
    assert pair.allocator.usable_depth(LONG, 6) == 0
    pair.store(LONG, 1)
    pair.commit(plan)
    pair.check()
    assert pair.allocator.usable_depth(LONG, 5) == 0
    assert pair.allocator.num_free == 40 - 7


# Splits and joins


@pytest.mark.parametrize("depth", range(1, 6))
def test_a_split_keeps_all_checkpoints(depth: int) -> None:
    pair = pair_with(1, 2, 3, 4, 5, 6)
    pair.use(LONG[:depth])
    pair.check()
    assert len(nodes_of(pair)) == 2
    assert [pair.allocator.usable_depth(LONG, limit) for limit in range(7)] == list(range(7))


def test_what_was_split_joins_again_with_its_checkpoints() -> None:
    pair = pair_with(2, 3, 6)
    pair.store(FORK, 1)
    pair.drop(FORK[:4])
    pair.check()
    assert len(nodes_of(pair)) == 2
    pair.use(LONG)
    pair.check()
    [node] = nodes_of(pair)
    assert [each.depth for each in node.bags or ()] == [2, 3, 6]
    assert len(pair.allocator._tree.checkpoints) == 2, "that at 3 is an inner one again"


# Sizes


@pytest.mark.parametrize(
    ("capacity", "columns", "bag_slots"), [(4, 2, 3), (2, 0, 3), (1, 1, 1), (5, 0, 0), (5, -1, 0)]
)
def test_a_pool_holds_a_position_and_a_bag(capacity: int, columns: int, bag_slots: int) -> None:
    with pytest.raises(CapacityError):
        CpuOffloadingBlockAllocator(capacity, columns=columns, bag_slots=bag_slots)


@pytest.mark.parametrize("num_bag", [-1, 4])
def test_a_bag_has_at_most_so_many_slots(num_bag: int) -> None:
    pair = BagPair(40)
    with pytest.raises(ChainError, match=f"a bag of {num_bag} slots: one has at most 3"):
        pair.allocator.plan_store(LONG, 6, num_bag=num_bag)
    with pytest.raises(ChainError, match="at most 0"):
        CpuOffloadingBlockAllocator(8).plan_store(LONG, 6, num_bag=1)


def test_a_smaller_pool_gets_by() -> None:
    """It is as small as one may be, and everything in it is evicted for everything else."""
    pair = BagPair(4, columns=1, bag_slots=3)
    for chain in (LONG[:1], OTHER[:1], LONG[:2], OTHER[:1]):
        pair.store(chain, 3 if len(chain) == 1 else 2)
        pair.check()
        assert pair.allocator.usable_depth(chain, len(chain)) == len(chain)


def test_events_are_of_positions() -> None:
    pair = pair_with(2, 6)
    [node] = nodes_of(pair)
    assert node.bags is not None
    assert [each.state for each in node.bags] == [BagState.COMPLETE] * 2
    pair.drop_bag(LONG)
    pair.check()
    assert pair._replayed == set(LONG[:2]), "those behind the last checkpoint were evicted"
