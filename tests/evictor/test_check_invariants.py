"""Each check_invariants sees the damage it is there for."""

from collections.abc import Callable
from typing import Any

import pytest

from evictor import make_policy
from tests.evictor.driver import PolicyDriver

Damage = Callable[[Any, PolicyDriver], None]
DAMAGES: list[tuple[str, Damage, str]] = []


def seen_as(policy: str, message: str) -> Callable[[Damage], Damage]:
    """Add a way to damage a policy or its leaves, and what check_invariants says then."""

    def add(damage: Damage) -> Damage:
        DAMAGES.append((policy, damage, message))
        return damage

    return add


# Each takes a policy that has evicted keys 0 to 3 in a bite, then 4 and 5, and has two leaves of two keys.


@seen_as("fifo", "differ")
def candidate_lost(policy: Any, driver: PolicyDriver) -> None:
    policy._candidates.remove(driver.nodes[0].rank.key)


@seen_as("lfu", "is filed under")
def rank_changed(policy: Any, driver: PolicyDriver) -> None:
    driver.nodes[0].rank.rank = (100, 100)


@seen_as("lru", "is filed under")
def filed_elsewhere(policy: Any, driver: PolicyDriver) -> None:
    driver.nodes[0].rank.key = 100, 0


@seen_as("arc", "new slots, not 3")
def new_position_counted_twice(policy: Any, driver: PolicyDriver) -> None:
    policy._num_new += 1


@seen_as("s3fifo", "counts as 0 new slots, not 2")
def new_node_not_counted(policy: Any, driver: PolicyDriver) -> None:
    driver.nodes[0].rank.size = 0


@seen_as("arc", "target 17 of 16")
def target_beyond_the_pool(policy: Any, driver: PolicyDriver) -> None:
    policy._target = 17


@seen_as("arc", "2 slots and 15 of ghosts were asked for once")
def too_many_ghosts_of_one_list(policy: Any, driver: PolicyDriver) -> None:
    policy._lost[0].add([*range(100, 109)])


@seen_as("arc", "6 and 11 slots of ghosts")
def too_many_ghosts_together(policy: Any, driver: PolicyDriver) -> None:
    policy._lost[1].add([*range(100, 111)])


@seen_as("s3fifo", "9 uses in queue 0")
def too_many_uses(policy: Any, driver: PolicyDriver) -> None:
    node = next(node for node in driver.nodes if node.rank.rank[0] == 0)
    policy._rank(node, (0, node.rank.rank[1], 9))


@seen_as("s3fifo", "6 slots of ghosts, not 7")
def ghost_counted_twice(policy: Any, driver: PolicyDriver) -> None:
    policy._ghosts.weight += 1


@seen_as("s3fifo", "6 slots of ghosts are more than 5")
def ghosts_beyond_the_limit(policy: Any, driver: PolicyDriver) -> None:
    policy._ghosts.limit = 5


@seen_as("arc", "differ")
def ghosts_nobody_finds(policy: Any, driver: PolicyDriver) -> None:
    del policy._lost[0]._serials[0]


@seen_as("arc", "the run found by 99")
def ghosts_found_by_another_name(policy: Any, driver: PolicyDriver) -> None:
    serials = policy._lost[0]._serials
    serials[99] = serials.pop(0)


@seen_as("s3fifo", "out of order")
def ghosts_of_the_wrong_age(policy: Any, driver: PolicyDriver) -> None:
    oldest = next(iter(policy._ghosts._runs))
    policy._ghosts._runs[oldest] = policy._ghosts._runs.pop(oldest)


@seen_as("hazard", "moments out of order")
def moments_of_another_clock(policy: Any, driver: PolicyDriver) -> None:
    policy._reuse.moments._seconds[0] += 1e12


@pytest.mark.parametrize(
    ("name", "damage", "message"), DAMAGES, ids=[f"{name}-{damage.__name__}" for name, damage, _ in DAMAGES]
)
def test_damage_is_seen(name: str, damage: Damage, message: str) -> None:
    policy = make_policy(name, 16)
    driver = PolicyDriver(policy)
    for num_keys in (4, 2):
        driver.grow(driver.root, num_keys)
        driver.evict(num_keys)
    driver.touch(driver.grow(driver.root, 2))
    driver.grow(driver.root, 2)
    driver.check()
    damage(policy, driver)
    with pytest.raises(AssertionError, match=message):
        driver.check()
