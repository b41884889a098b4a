"""Hints of requests on top of LRU: the order they ask for, and their ends."""

import pytest

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, KeepHints, LruPolicy, Newcomer, Worth, make_policy
from tests.evictor.driver import Node
from tests.evictor.hinted_driver import HIGH, LOW, UNWANTED, HintedDriver, pinned
from tests.strategies import chain_of

# Each hint


def test_the_order_of_going() -> None:
    driver = HintedDriver()
    nodes = {
        name: driver.grown(2, hints)
        for name, hints in {
            "high": HIGH,
            "normal": None,
            "pinned": pinned(100),
            "low": LOW,
            "newer normal": None,
            "newer low": LOW,
            "unwanted": UNWANTED,
            "newer high": HIGH,
            "newer unwanted": UNWANTED,
            "lives 5": KeepHints(ttl=5),
            "lives 50": KeepHints(ttl=50),
        }.items()
    }
    driver.now = 5
    names = {node: name for name, node in nodes.items()}
    assert [names[node] for node in driver.order()] == [
        "unwanted",
        "newer unwanted",
        "lives 5",
        "low",
        "newer low",
        "normal",
        "newer normal",
        "lives 50",
        "high",
        "newer high",
    ]
    assert driver.choose() is None
    driver.now = 99.9
    assert driver.choose() is None
    driver.now = 100
    assert driver.choose() is nodes["pinned"]


def test_a_life_that_is_over_counts_for_copies_at_once() -> None:
    """Nobody has been evicted since."""
    drivers = HintedDriver(), HintedDriver()
    one, other = (driver.grown(2, KeepHints(ttl=5)) for driver in drivers)
    for driver in drivers:
        driver.grown(1)
    drivers[0].policy.leave(one)  # it is claimed, and asks for slots
    assert not drivers[0].policy.stays_out(one) and drivers[1].policy.earns_room(other, 1)
    for driver in drivers:
        driver.now = 5
    assert drivers[0].policy.stays_out(one), "others are worth more"
    assert not drivers[1].policy.earns_room(other, 1), f"{other} is in the place of whatever comes"


@pytest.mark.parametrize("hints", [UNWANTED, LOW, HIGH], ids=str)
def test_of_equals_the_one_used_longest_ago_goes_first(hints: KeepHints) -> None:
    driver = HintedDriver()
    one, other, third = (driver.grown(1, hints) for _ in range(3))
    driver.use(one, hints)
    assert driver.order() == [other, third, one]


def test_a_pin_that_has_ended_is_over() -> None:
    driver = HintedDriver()
    one, other = driver.grown(1, pinned(5)), driver.grown(1)
    assert driver.choose() is other
    driver.now = 5
    assert driver.choose() is one
    driver.use(one, pinned(4))
    assert driver.choose() is other, "it is used like any other"
    driver.use(other)
    assert driver.choose() is one


def test_the_time_to_live_begins_anew_with_each_use_by_those_who_set_it() -> None:
    driver = HintedDriver()
    short = KeepHints(ttl=10)
    node, _ = driver.grown(1, short), driver.grown(1)
    driver.now = 8
    driver.use(node, short)
    driver.now = 17
    assert driver.choose() is not node
    driver.now = 18
    assert driver.choose() is node
    driver.use(node, short)
    assert driver.choose() is not node
    driver.use(node)
    driver.now = 1000
    assert driver.choose() is not node, "somebody wants it without an end"


def test_high_worth_with_a_time_to_live_ends_with_it() -> None:
    driver = HintedDriver(4)
    brief = KeepHints(Worth.HIGH, ttl=5)
    node, other = driver.grown(2, brief), driver.grown(2)
    driver.now = 4
    driver.use(node)
    driver.now = 8
    assert driver.policy_state(node) is Worth.HIGH, "any use renews it"
    assert driver.choose() is other
    driver.now = 9
    assert driver.choose() is other, "the use without hints keeps it from being unwanted"
    assert driver.policy_state(node) is Worth.NORMAL
    driver.use(other)
    assert driver.choose() is node
    driver.use(node)
    assert driver.policy_state(node) is Worth.NORMAL, "what has ended does not come back with a use"
    driver.use(node, brief)
    assert driver.policy_state(node) is Worth.HIGH, "but when somebody asks for it"


def test_high_worth_ends_below_a_pin_as_well() -> None:
    driver = HintedDriver(4)
    node = driver.grown(2, KeepHints(Worth.HIGH, ttl=5, pinned_until=20))
    driver.now = 7
    driver.use(node)
    assert driver.policy_state(node) is None
    driver.now = 20
    driver.choose()
    assert driver.policy_state(node) is Worth.NORMAL


@pytest.mark.parametrize(
    ("later", "state"),
    [
        (None, Worth.NORMAL),
        (LOW, Worth.LOW),
        (UNWANTED, Worth.UNWANTED),
        (KeepHints(ttl=9), Worth.NORMAL),
        (KeepHints(Worth.HIGH, ttl=5), Worth.HIGH),
    ],
    ids=str,
)
def test_the_first_use_after_the_end_says_what_it_is_worth(later: KeepHints | None, state: Worth) -> None:
    driver = HintedDriver(4)
    node = driver.grown(3, KeepHints(Worth.HIGH, ttl=5))
    driver.now = 5
    driver.use(node, later)
    assert driver.policy_state(node) is driver.state(node) is state


def test_high_worth_for_what_is_plain_ends_with_its_time_to_live() -> None:
    driver = HintedDriver(4)
    node = driver.grown(3)
    driver.use(node, KeepHints(Worth.HIGH, ttl=5))
    assert driver.policy_state(node) is Worth.HIGH
    driver.now = 5
    assert driver.choose() is node
    assert not driver.policy._num_marks


@pytest.mark.parametrize("hints", [LOW, KeepHints(ttl=10), KeepHints(Worth.LOW, ttl=10)], ids=str)
def test_a_shorter_time_to_live_than_others_set_changes_nothing(hints: KeepHints) -> None:
    driver = HintedDriver()
    node = driver.grown(1, hints)
    before = driver.policy_state(node)
    driver.use(node, KeepHints(Worth.LOW, ttl=1))
    driver.now = 5
    assert driver.choose() is node
    assert driver.policy_state(node) is before


@pytest.mark.parametrize("less", [UNWANTED, LOW, KeepHints(ttl=1)])
def test_nobody_gives_away_what_others_use(less: KeepHints) -> None:
    driver = HintedDriver()
    theirs = driver.grown(2)
    mine, bystander = driver.grown(2, less), driver.grown(2)
    driver.use(theirs, less)
    below = driver.grown(2, less, parent=theirs)
    assert below is not theirs, "two of different hints are no single segment"
    driver.now = 1
    assert driver.order()[:2] == [mine, below]
    assert driver.order() == []
    mine = driver.grown(2, less)
    bystander = driver.grown(2)
    driver.use(mine)
    driver.now = 2
    assert driver.order() == [bystander, mine], "and what somebody else asks for is normal from then on"


def test_hints_apply_to_all_that_a_request_uses() -> None:
    driver = HintedDriver()
    trunk = driver.grown(3)
    driver.split(trunk, 1, new_head=True)
    driver.use(trunk, pinned(10))
    (head,) = (each for each in driver.nodes if each is not trunk)
    assert driver.policy_state(trunk) is driver.policy_state(head) is driver.choose() is None
    driver.now = 10
    assert driver.order() == [trunk, head]


def test_a_parent_inherits_no_hints_from_a_child() -> None:
    driver = HintedDriver()
    trunk = driver.grown(2)
    for hints in (UNWANTED, LOW):
        driver.grown(1, hints, parent=trunk)
        assert len(driver.evict(1)) == 1
        assert driver.policy_state(trunk) is Worth.NORMAL


@pytest.mark.parametrize("new_head", [True, False])
@pytest.mark.parametrize("hints", [UNWANTED, LOW, HIGH, pinned(9), KeepHints(ttl=9)], ids=str)
def test_both_parts_of_a_split_keep_the_hints(hints: KeepHints, new_head: bool) -> None:
    driver = HintedDriver(4)
    node = driver.grown(4, hints)
    before = driver.policy_state(node)
    driver.split(node, 3, new_head=new_head)
    driver.check()
    assert [driver.policy_state(each) for each in driver.nodes] == [before, before]
    driver.now = 9
    if hints.ttl == 9:
        assert [driver.choose(), driver.policy_state(driver.nodes[1])] == [driver.nodes[0], Worth.UNWANTED]


@pytest.mark.parametrize("new_head", [True, False])
@pytest.mark.parametrize("hints", [UNWANTED, LOW, HIGH], ids=str)
def test_both_parts_of_a_split_keep_their_turn(hints: KeepHints, new_head: bool) -> None:
    driver = HintedDriver()
    old, young, plain = driver.grown(4, hints), driver.grown(4, hints), driver.grown(1)
    driver.use(plain)  # the last request before the split is another one
    driver.split(old, 2, new_head=new_head)
    (head,) = (node for node in driver.nodes if node.keys == [0, 1])
    (tail,) = (node for node in driver.nodes if node.keys == [2, 3])
    assert [node for node in driver.order() if node is not plain] == [tail, head, young]


@pytest.mark.parametrize("new_head", [True, False])
def test_both_parts_of_a_split_live_as_long(new_head: bool) -> None:
    driver = HintedDriver()
    node = driver.grown(4, KeepHints(ttl=10))
    driver.now = 6
    driver.grown(1, KeepHints(ttl=100))
    driver.split(node, 2, new_head=new_head)
    driver.now = 10
    parts = [each for each in driver.nodes if len(each) == 2]
    assert driver.choose() in parts
    assert [driver.policy_state(each) for each in parts] == [Worth.UNWANTED] * 2


def test_only_equals_share_a_segment() -> None:
    driver = HintedDriver(6)
    protected = driver.grown(2, HIGH)
    assert driver.grown(2, HIGH, parent=protected) is protected
    assert driver.grown(1, None, parent=protected) is not protected
    driver.check()
    node = driver.grown(1)
    assert driver.grown(1, None, parent=node) is node
    assert driver.grown(1, LOW, parent=node) is not node


# Newcomers


def test_whom_a_newcomer_may_replace() -> None:
    asked: list[Newcomer[Node] | None] = []

    class Reluctant(LruPolicy[Node]):
        """Keeps newcomers out."""

        def choose(self, newcomer: Newcomer[Node] | None = None) -> Node | None:
            asked.append(newcomer)
            return super().choose() if newcomer is None else None

    driver = HintedDriver()
    driver.policy._inner = Reluctant()
    high, normal = driver.grown(1, HIGH), driver.grown(1)
    everyone = [UNWANTED, LOW, None, KeepHints(ttl=1), HIGH, pinned(9)]
    assert [driver.choose_for(hints) for hints in everyone] == [None, None, None, None, normal, normal]
    driver.cut(normal)
    assert [driver.choose_for(hints) for hints in everyone] == [None, None, None, None, high, high]
    low = driver.grown(1, LOW)
    assert [driver.choose_for(hints) for hints in everyone] == [None, low, low, low, low, low]
    unwanted = driver.grown(1, UNWANTED)
    assert {driver.choose_for(hints) for hints in everyone} == {unwanted}


def test_the_allocator_heeds_hints_of_what_is_used_and_stored() -> None:
    allocator = CpuOffloadingBlockAllocator(4, policy=HintedPolicy(LruPolicy(), 4, lambda: 0.0))

    def store(chain: list[bytes], hints: KeepHints | None = None) -> int:
        plan = allocator.plan_store(chain, len(chain), hints=hints)
        if plan is not None:
            allocator.commit(plan)
        allocator.check_invariants()
        return allocator.resident_depth(chain)

    first, second, third = chain_of(1, 1), chain_of(2, 2), chain_of(3, 3)
    assert store(first) == store(second, pinned(9)) == 2
    allocator.touch(first, pinned(9))
    assert store(third) == 0
    allocator.reset()
    assert store(first) == store(second) == 2
    assert store(third, UNWANTED) == 0
    assert store(third) == 2
    assert allocator.resident_depth(first) == 0


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_a_policy_that_counts_positions_hears_of_drops_below_hints(policy: str) -> None:
    pool = CpuOffloadingBlockAllocator(20, policy=HintedPolicy(make_policy(policy, 20), 10, lambda: 0.0))
    chain = chain_of(*range(5))
    plan = pool.plan_store(chain, 5, hints=LOW)
    assert plan is not None
    pool.commit(plan)
    pool.drop(chain, 3)
    pool.check_invariants()


@pytest.mark.parametrize("hints", [HIGH, pinned(9)], ids=["high", "pinned"])
def test_what_is_taken_away_bit_by_bit_is_protected_to_its_end_only(hints: KeepHints) -> None:
    policy = HintedPolicy(LruPolicy(), 10, lambda: 0.0)
    pool = CpuOffloadingBlockAllocator(20, policy=policy)
    chain = chain_of(*range(8))
    plan = pool.plan_store(chain, 8, hints=hints)
    assert plan is not None
    pool.commit(plan)
    pool._work_left = pool._step_work = 3
    pool.drop(chain, 1)
    for left in (5, 2, 1):
        pool.check_invariants()
        assert policy._num_high + policy._num_pinned == left
        pool.tidy()
