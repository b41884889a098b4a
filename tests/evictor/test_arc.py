"""What makes it ARC: two lists, a target that its own mistakes move, resistance to scans."""

import random

from evictor import ArcPolicy
from tests.evictor.by_blocks import ArcBlocks
from tests.evictor.driver import PolicyDriver
from tests.evictor.flat import flat_trace, hits_of


def test_what_is_used_again_outlives_what_is_used_once() -> None:
    driver = PolicyDriver(ArcPolicy(4))
    again = driver.grow(driver.root, 1)  # 0
    driver.touch(again)
    for _ in range(3):
        driver.grow(driver.root, 1)  # 1, 2, 3
    assert [key for _ in range(4) for key in driver.evict(1)] == [1, 2, 3, 0]


def test_ghosts_move_the_target_both_ways() -> None:
    """Runs of 4 and of 2: as many positions as are asked for, times the ratio of the ghost lists."""
    policy: ArcPolicy[object] = ArcPolicy(16)
    driver = PolicyDriver(policy)
    once = driver.grow(driver.root, 4)
    lost_once = driver.evict(4)
    again = driver.grow(driver.root, 2)
    driver.touch(again)
    lost_again = driver.evict(2)
    assert (once.keys, again.keys, policy._target) == ([], [], 0)
    driver.touch(driver.root, lost_once)
    assert policy._target == 4, "each of four counts once"
    driver.touch(driver.root, lost_again[:1])
    assert policy._target == 2, "B1 is twice as long as B2: one counts twice"
    driver.touch(driver.root, [*lost_once[:3], 99])
    assert policy._target == 5, "a run is matched as far as it goes"
    for _ in range(5):
        driver.touch(driver.root, lost_once)
    assert policy._target == 16, "no more than the pool"
    for _ in range(5):
        driver.touch(driver.root, lost_again)
    assert policy._target == 0, "no less than nothing"


def test_a_ghost_comes_back_as_used_again() -> None:
    policy: ArcPolicy[object] = ArcPolicy(8)
    driver = PolicyDriver(policy)
    driver.grow(driver.root, 3)  # 0, 1, 2
    gone = driver.evict(3)
    assert driver.num_alike([*gone, 7, 8], 0) == 3, "ghosts, then what is new"
    driver.store(driver.root, [*gone, *driver.new_keys(2)])  # and 3, 4 below them
    driver.grow(driver.root, 1)  # 5
    assert [node.keys for node in driver.nodes] == [[3, 4], [0, 1, 2], [5]], "children come first"
    assert [key for _ in range(6) for key in driver.evict(1)] == [4, 3, 5, 2, 1, 0]


def test_the_target_says_which_list_loses() -> None:
    policy: ArcPolicy[object] = ArcPolicy(4)
    driver = PolicyDriver(policy)
    again = driver.grow(driver.root, 1)  # 0
    driver.touch(again)
    once = driver.grow(driver.root, 1)  # 1
    for target, victim in ((0, once), (0.5, once), (1, again), (2, again)):
        policy._target = target
        assert driver.choose() is victim


def test_a_scan_leaves_the_hot_ones_alone() -> None:
    """Four hot blocks, each between three that are never asked for again, in a pool of eight."""
    trace = [f"hot {number}" for number in range(4)] * 2
    for turn in range(200):
        trace += [*(f"cold {turn} {number}" for number in range(3)), f"hot {turn % 4}"]
    assert hits_of("arc", trace, 8) == 204
    assert hits_of("lru", trace, 8) == 4 + 1, "hot 0 once more, before it is scanned away"


def test_over_chains_of_one_block_it_is_arc_over_blocks() -> None:
    for seed in range(20):
        trace = flat_trace(random.Random(seed), 400)
        model = ArcBlocks(10)
        expected = sum(model.request([name.encode()]) for name in trace)
        assert hits_of("arc", trace, 10) == expected
