"""LRU over leaves: a golden order, and LRU over single keys beside it."""

from collections import Counter
from itertools import chain
from typing import ClassVar

from hypothesis.stateful import run_state_machine_as_test

from evictor import LruPolicy
from tests.evictor.driver import Node, PolicyDriver
from tests.evictor.machine import PolicyMachine
from tests.strategies import thorough


class LruMachine(PolicyMachine):
    policy = "lru"
    seen: ClassVar[Counter[str]] = Counter()

    def expect_victim(self, leaf: Node) -> None:
        """The key used longest ago goes first; of equals, the one that is last in its chain."""
        last_uses = [self.driver.last_use[each.keys[-1]] for each in self.driver.candidates]
        assert self.driver.last_use[leaf.keys[-1]] == min(last_uses)
        assert len(set(last_uses)) == len(last_uses), "an ambiguous model"
        assert len({self.driver.last_use[key] for key in leaf.keys}) == 1, "a segment is used as a whole"


def test_leaf_lru_is_lru_over_single_keys() -> None:
    run_state_machine_as_test(LruMachine, settings=thorough(200))


def test_golden_order() -> None:
    driver = PolicyDriver(LruPolicy())
    trunk = driver.grow(driver.root, 2)  # keys 0 and 1
    left = driver.grow(trunk, 2)  # 2, 3: in place, trunk is a leaf
    right = driver.grow(driver.root, 2)  # 4, 5
    assert left is trunk
    driver.split(trunk, 2, new_head=True)  # [0, 1] above [2, 3]
    branch = driver.grow(trunk.path[-1], 1)  # 6, beside [2, 3]
    driver.grow(driver.root, 2)  # 7, 8
    driver.touch(right)
    driver.pin(branch)
    order = list(chain.from_iterable(reversed(driver.evict(1)) for _ in range(7)))
    assert order == [3, 2, 8, 7, 5, 4], "all but the pinned branch and what is before it"
    driver.unpin(branch)
    assert [key for _ in range(3) for key in driver.evict(1)] == [6, 1, 0]


def test_a_prefix_outlives_others_as_its_continuation_would() -> None:
    """The rank of a leaf goes up to its parent when the leaf goes."""
    driver = PolicyDriver(LruPolicy())
    trunk = driver.grow(driver.root, 1)
    one, other = driver.grow(driver.root, 1), driver.grow(driver.root, 1)
    driver.touch(trunk)
    twig, _ = driver.grow(trunk, 1), driver.touch(one)
    assert twig is trunk
    driver.split(trunk, 1, new_head=False)
    driver.touch(trunk.children[0])
    driver.touch(other)
    assert [key for _ in range(4) for key in driver.evict(1)] == [1, 3, 0, 2]
