"""What makes it S3-FIFO: a small queue that one-hit wonders pass, second chances, ghosts."""

import random

from evictor import S3FifoPolicy
from tests.evictor.by_blocks import S3FifoBlocks
from tests.evictor.driver import PolicyDriver
from tests.evictor.flat import flat_trace, hits_of


def test_one_hit_wonders_go_first() -> None:
    driver = PolicyDriver(S3FifoPolicy(20))
    good = driver.grow(driver.root, 2)  # 0, 1
    driver.touch(good)
    driver.touch(good)
    used_once = driver.grow(driver.root, 2)  # 2, 3
    driver.touch(used_once)
    driver.grow(driver.root, 2)  # 4, 5
    assert [driver.evict(2) for _ in range(3)] == [[2, 3], [4, 5], [0, 1]]


def test_a_small_queue_that_is_not_full_is_left_alone() -> None:
    driver = PolicyDriver(S3FifoPolicy(20))  # two positions in the small queue
    good = driver.grow(driver.root, 2)
    driver.touch(good)
    driver.touch(good)
    new = driver.grow(driver.root, 1)
    assert driver.choose() is good
    assert driver.grow(new, 1) is new
    assert driver.choose() is new


def test_ghosts_of_the_small_queue_come_back_to_the_main_one() -> None:
    driver = PolicyDriver(S3FifoPolicy(20))
    driver.grow(driver.root, 2)  # 0, 1
    back = driver.store(driver.root, driver.evict(2))
    new = driver.grow(driver.root, 2)  # 2, 3
    assert driver.choose() is new, "though it is younger"
    assert driver.evict(2) == [2, 3]
    assert driver.choose() is back
    assert driver.evict(2) == [0, 1]
    stranger = driver.store(driver.root, [0, 1])
    driver.store(driver.root, [2, 3])
    assert driver.choose() is stranger, "what the main queue lost is no ghost"


def test_uses_are_chances_in_the_main_queue() -> None:
    driver = PolicyDriver(S3FifoPolicy(100))
    nodes = [driver.grow(driver.root, 1) for _ in range(4)]
    for node, uses in zip(nodes, (4, 2, 3, 9), strict=True):  # two of them promote
        for _ in range(uses):
            driver.touch(node)
    order = [driver.evict(1)[0] for _ in range(4)]
    assert order == [1, 2, 0, 3]


def test_it_goes_around_as_if_there_were_queues() -> None:
    """Over chains of one block, beside lists that are popped and pushed."""
    for seed in range(10):
        for capacity in (5, 24):
            trace = flat_trace(random.Random(seed), 400)
            model = S3FifoBlocks(capacity)
            expected = sum(model.request([name.encode()]) for name in trace)
            assert hits_of("s3fifo", trace, capacity) == expected


def test_a_prefix_keeps_its_uses_when_what_continued_it_goes() -> None:
    driver = PolicyDriver(S3FifoPolicy(100))
    trunk = driver.grow(driver.root, 1)  # 0
    driver.touch(trunk)
    assert driver.grow(trunk, 1) is not trunk, "what was used does not grow"
    assert driver.evict(1) == [1]
    driver.touch(trunk)  # its second use
    new = driver.grow(driver.root, 10)
    assert driver.choose() is new
