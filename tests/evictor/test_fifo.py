"""What makes it FIFO."""

from evictor import FifoPolicy
from tests.evictor.driver import PolicyDriver


def test_use_changes_nothing() -> None:
    driver = PolicyDriver(FifoPolicy())
    first, second, third = (driver.grow(driver.root, 1) for _ in range(3))  # keys 0, 1 and 2
    for node in (second, first, first, third, first):
        driver.touch(node)
    assert [driver.evict(1) for _ in range(3)] == [[0], [1], [2]]


def test_a_prefix_goes_right_after_the_last_of_its_continuations() -> None:
    driver = PolicyDriver(FifoPolicy())
    trunk = driver.grow(driver.root, 2)  # 0, 1
    driver.grow(driver.root, 1)  # 2
    driver.grow(trunk, 1)  # 3, in place: the trunk is as young as what continues it
    driver.grow(driver.root, 1)  # 4
    assert [key for _ in range(5) for key in driver.evict(1)] == [2, 3, 1, 0, 4]


def test_a_branch_keeps_its_prefix_but_not_its_sibling() -> None:
    driver = PolicyDriver(FifoPolicy())
    trunk = driver.grow(driver.root, 1)  # 0
    driver.pin(trunk)  # so that what follows is stored beside each other
    driver.grow(trunk, 1)  # 1
    driver.grow(driver.root, 1)  # 2
    driver.grow(trunk, 1)  # 3
    driver.unpin(trunk)
    assert [key for _ in range(4) for key in driver.evict(1)] == [1, 2, 3, 0]
