"""What makes it LFU."""

from evictor import LfuPolicy
from tests.evictor.driver import PolicyDriver


def test_the_frequent_stay_and_ties_go_by_recency() -> None:
    driver = PolicyDriver(LfuPolicy())
    often, twice, again, once = (driver.grow(driver.root, 1) for _ in range(4))  # 0, 1, 2 and 3
    for node in (often, often, often, again, twice):
        driver.touch(node)
    driver.grow(driver.root, 1)  # 4, the most recent of all
    assert once.keys == [3]
    assert [key for _ in range(5) for key in driver.evict(1)] == [3, 4, 2, 1, 0]


def test_a_use_counts_for_the_whole_path() -> None:
    driver = PolicyDriver(LfuPolicy())
    trunk = driver.grow(driver.root, 1)  # 0
    other = driver.grow(driver.root, 1)  # 1
    driver.touch(trunk)
    branch = driver.grow(trunk, 1)  # 2
    assert branch is not trunk
    driver.touch(other)
    driver.touch(other)
    driver.touch(branch)
    assert [key for _ in range(3) for key in driver.evict(1)] == [2, 1, 0], "1 and 0 have 3 uses, 2 has 2"


def test_counts_are_forgotten_with_what_they_counted() -> None:
    driver = PolicyDriver(LfuPolicy())
    often = driver.grow(driver.root, 1)  # 0
    for _ in range(5):
        driver.touch(often)
    driver.store(driver.root, driver.evict(1))
    other = driver.grow(driver.root, 1)
    driver.touch(other)
    assert driver.evict(1) == [0]


def test_what_was_used_since_it_was_stored_does_not_grow() -> None:
    policy: LfuPolicy[object] = LfuPolicy()
    driver = PolicyDriver(policy)
    assert not policy.joins(driver.root, 0), "the root is no segment"
    node = driver.grow(driver.root, 1)
    assert driver.grow(node, 1) is node, "a prompt that is stored in several pieces is one segment"
    driver.touch(node)
    assert driver.grow(node, 1) is not node
