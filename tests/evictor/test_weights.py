"""Policies weigh slots: nodes with more, or fewer, of them than positions."""

import pytest

from evictor import HintedPolicy, KeepHints, LruPolicy, Newcomer, Worth
from evictor.arc import ArcPolicy
from evictor.ghosts import Ghosts
from evictor.hazard import HazardPolicy
from evictor.levels import level_of
from evictor.s3fifo import S3FifoPolicy
from tests.evictor.driver import Node, PolicyDriver


@pytest.mark.parametrize(
    ("weight", "num_positions", "level"),
    [(5, 5, 0), (10, 5, 1), (386, 2, 8), (1, 64, -6), (0, 3, -20), (3, 4, 0), (2, 4, -1), (1 << 30, 1, 20)],
)
def test_a_level_is_a_power_of_two(weight: int, num_positions: int, level: int) -> None:
    assert level_of(weight, num_positions) == level


def _two_alike(policy: HazardPolicy[Node]) -> tuple[PolicyDriver, Node, Node]:
    driver = PolicyDriver(policy)
    keys = driver.new_keys(8), driver.new_keys(8)
    for each in keys:
        driver.touch(driver.root, each)
    first, second = (driver.store(driver.root, each) for each in keys)
    return driver, first, second


def test_of_two_alike_hazard_evicts_the_one_that_takes_more_slots() -> None:
    driver, first, second = _two_alike(HazardPolicy(64))
    assert driver.choose() is first, "the one used longer ago"
    driver.resize(second, 24)
    driver.check()
    assert driver.choose() is second
    driver.resize(first, 120)
    driver.check()
    assert driver.choose() is first
    driver.resize(first, 0)
    driver.check()
    assert driver.choose() is second


def test_hazard_keeps_what_takes_fewer_slots_however_long_unused() -> None:
    driver, first, second = _two_alike(HazardPolicy(64))
    third = driver.grow(driver.root, 8)
    for node, bag in ((second, 8), (third, 56)):
        driver.resize(node, bag)
    assert [driver.evict(8) for _ in range(2)] == [list(third.keys) or [*range(16, 24)], [*range(8, 16)]]
    assert driver.choose() is first


def test_hazard_values_a_newcomer_by_its_slots() -> None:
    policy: HazardPolicy[Node] = HazardPolicy(64)
    driver, *_ = _two_alike(policy)
    many, few = (policy._value_of(Newcomer(driver.root, 99, 4, weight)) for weight in (64, 4))
    assert few == 16 * many


def test_what_hazard_bites_is_weighed_anew() -> None:
    driver, _, second = _two_alike(HazardPolicy(64))
    driver.resize(second, 24)
    driver.evict(2)
    driver.check()
    assert (len(second), second.weight) == (6, 6)


def test_a_newcomer_is_worth_less_to_hazard_the_more_slots_it_takes() -> None:
    driver, *_ = _two_alike(HazardPolicy(64))
    keys = driver.new_keys(8)
    driver.touch(driver.root, keys)
    newcomers = [Newcomer(driver.root, keys[0], 8, weight) for weight in (None, 8, 64, 1)]
    victims = [driver.choose(newcomer) for newcomer in newcomers]
    one_each, as_many, heavy, light = (newcomer.rank for newcomer in newcomers)
    assert one_each == as_many == 8 * heavy == light / 8
    assert victims[0] is victims[1] is victims[2] is None
    assert victims[3] is not None, "one that takes an eighth of the slots gets in"


def test_s3fifo_counts_the_slots_of_its_small_queue() -> None:
    driver = PolicyDriver(S3FifoPolicy(40))
    small = driver.grow(driver.root, 2)
    main = driver.grow(driver.root, 1)
    driver.touch(main)
    driver.touch(main)
    assert driver.choose() is main, "the small queue has fewer than 4 slots"
    driver.resize(small, 2)
    driver.check()
    assert driver.choose() is small


def test_arc_has_room_for_fewer_ghosts_beside_a_bag() -> None:
    policy = ArcPolicy(10)
    driver = PolicyDriver(policy)
    driver.grow(driver.root, 6)
    driver.evict(6)
    node = driver.grow(driver.root, 2)
    once, _ = policy._lost
    assert once.weight == 6
    driver.resize(node, 5)
    driver.check()
    assert once.weight == 3


def test_a_ghost_moves_arc_by_the_slots_it_had() -> None:
    policy = ArcPolicy(40)
    driver = PolicyDriver(policy)
    node = driver.grow(driver.root, 2)
    driver.resize(node, 10)
    gone = driver.evict(2)
    driver.touch(driver.root, gone)
    assert policy._target == 12
    driver.check()


def test_ghosts_are_counted_in_slots() -> None:
    ghosts = Ghosts(20)
    ghosts.add(list(range(4)), 12)
    ghosts.add(list(range(10, 20)), 5)
    ghosts.check_invariants()
    assert (ghosts.weight, ghosts.weight_of(0), ghosts.weight_of(10)) == (17, 3, 0.5)
    ghosts.add([30, 31], 7)
    ghosts.check_invariants()
    assert ghosts.match(range(4), 0) == 2, "the oldest lost as many as it takes"
    ghosts.take(10, 4)
    ghosts.check_invariants()
    ghosts.add([40], 0)
    assert ghosts.weight_of(40) == 1
    ghosts.trim(0)
    ghosts.check_invariants()
    assert ghosts.weight == len(ghosts) == 0


def _protected(max_protected: int, worth: Worth) -> tuple[HintedPolicy[Node], PolicyDriver, list[Node]]:
    policy: HintedPolicy[Node] = HintedPolicy(LruPolicy(), max_protected, lambda: 0.0)
    driver = PolicyDriver(policy)
    nodes = []
    for _ in range(2):
        keys = driver.new_keys(4)
        admission = policy.heed(KeepHints(worth=worth), [], 4)
        nodes.append(driver.store(driver.root, keys, admission))
    return policy, driver, nodes


def test_a_bag_that_comes_to_a_protected_node_counts() -> None:
    policy, driver, (first, second) = _protected(12, Worth.HIGH)
    driver.resize(second, 4)
    driver.check()
    assert policy._num_high == 12
    driver.resize(second, 5)
    driver.check()
    assert policy._num_high == 9, "the one used longest ago is not protected any more"
    assert driver.choose() is first


def test_a_bag_takes_no_pin_back() -> None:
    policy: HintedPolicy[Node] = HintedPolicy(LruPolicy(), 6, lambda: 0.0)
    driver = PolicyDriver(policy)
    keys = driver.new_keys(4)
    node = driver.store(driver.root, keys, policy.heed(KeepHints(pinned_until=9.0), [], 4))
    driver.resize(node, 5)
    driver.check()
    assert policy._num_pinned == 9
    assert policy.choose() is None
