"""What every registered policy promises. A new policy joins by being registered."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from evictor import EvictionPolicy, Newcomer
from tests.evictor.driver import CONTRACTORS, Node, PolicyDriver, policy_named
from tests.evictor.machine import PolicyMachine
from tests.seeds import OTHER_SEEDS
from tests.strategies import thorough

# "evicted for a newcomer" is not among them: a policy may keep all newcomers out
SITUATIONS = {
    "asked for what is missing, and not stored",
    "asked for what is missing, and stored",
    "cut of several nodes",
    "evicted",
    "resized a candidate",
    "touch of a candidate",
    "touch of an inner node",
}


@pytest.fixture(params=CONTRACTORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(name: str) -> PolicyDriver:
    return PolicyDriver(policy_named(name))


def test_any_order_of_calls(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"policy": name, "seen": Counter()})
    run_state_machine_as_test(machine, settings=thorough(60))
    situations = {situation for situation, times in machine.seen.items() if times}
    assert OTHER_SEEDS or situations >= SITUATIONS


def test_nothing_to_choose_from(driver: PolicyDriver) -> None:
    newcomer = Newcomer(driver.root, 1, 2)
    assert driver.choose() is None
    assert driver.choose(newcomer) is None
    leaf = driver.grow(driver.root, 3)
    assert driver.choose() is leaf
    driver.pin(leaf)
    assert driver.choose() is None
    assert driver.choose(newcomer) is None


def test_a_leaf_is_chosen_again_after_it_came_back(driver: PolicyDriver) -> None:
    leaf, other = driver.grow(driver.root, 2), driver.grow(driver.root, 2)
    for pinned, free in ((leaf, other), (other, leaf)):
        driver.pin(pinned)
        assert driver.choose() is free
        driver.unpin(pinned)
    driver.policy.leave(leaf)
    driver.policy.leave(leaf)  # leaving twice is leaving
    assert driver.policy.choose() is other
    driver.policy.enter(leaf)
    driver.pin(other)
    assert driver.choose() is leaf


def test_every_key_goes_once_and_tails_before_heads(driver: PolicyDriver) -> None:
    tree = [driver.grow(driver.root, 4) for _ in range(3)]
    tree += [driver.grow(parent, 3) for parent in tree[:2] for _ in range(2)]
    driver.split(tree[0], 2, new_head=True)
    driver.split(tree[1], 2, new_head=False)
    paths = [[key for node in reversed(leaf.path) for key in node.keys] for leaf in driver.candidates]
    gone: list[int] = []
    while bite := driver.evict(2):
        gone += reversed(bite)
    assert sorted(gone) == sorted({key for path in paths for key in path})
    for path in paths:
        assert all(gone.index(after) < gone.index(before) for before, after in pairwise(path))


def test_the_same_calls_choose_the_same_leaves(name: str) -> None:
    def history() -> list[str]:
        driver = PolicyDriver(policy_named(name))
        leaves = [driver.grow(driver.root, 2) for _ in range(20)]
        for step in range(60):
            driver.touch(leaves[step * step % 20])
        victims = []
        while (leaf := driver.choose()) is not None:
            victims.append(leaf.name)
            driver.evict(2)
        return victims

    assert history() == history()
    assert len(history()) == 20


def test_asking_changes_nothing_later(name: str) -> None:
    """Who goes does not depend on how often, or when, the policy was asked who would go."""

    def history(asks: bool) -> list[str]:
        driver = PolicyDriver(policy_named(name))
        leaves = [driver.grow(driver.root, 2) for _ in range(20)]
        victims = []
        for step in range(120):
            node = leaves[step * step * 7 % len(leaves)]
            if node.parent is not None and node in driver.nodes:
                driver.touch(node)
            if asks:
                driver.choose()
                driver.choose(Newcomer(driver.root, step, 2))
                driver.num_alike([step, -1], 0)
                driver.policy.joins(node, step)
                driver.check()
            if step % 3 == 0 and (leaf := driver.policy.choose()) is not None:
                victims.append(leaf.name)
                gone = driver.evict(2)
                driver.touch(driver.root, gone)
                leaves.append(driver.store(driver.root, gone) if step % 2 else driver.grow(driver.root, 2))
        return victims

    assert history(asks=True) == history(asks=False)


def test_a_request_for_nothing_that_is_here(driver: PolicyDriver) -> None:
    """Names are asked for that nobody knows, then stored, evicted, asked for and stored again."""
    keys = driver.new_keys(6)
    for _ in range(3):
        driver.touch(driver.root, keys)
        driver.store(driver.root, keys)
        driver.check()
        gone: list[int] = []
        while bite := driver.evict(4):
            gone = [*bite, *gone]
        assert gone == keys


def test_forgotten_means_forgotten(driver: PolicyDriver) -> None:
    """Candidate or not, touched, split or inherited from: no reference stays behind."""
    leaves = [driver.grow(driver.root, 4) for _ in range(4)]
    driver.touch(leaves[0])
    driver.split(leaves[1], 2, new_head=True)
    driver.pin(leaves[2])
    driver.choose(Newcomer(leaves[2], -1, 1))
    watched = [weakref.ref(node) for node in driver.nodes]
    del leaves
    while driver.evict(1):
        pass
    for node in driver.nodes:
        driver.cut(node)
    node = None
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []
    driver.check()


class CountedNode(Node):
    """Counts how often any node was hashed: each visit of a dict or set with it is one."""

    num_hashes = 0

    def __hash__(self) -> int:
        CountedNode.num_hashes += 1
        return object.__hash__(self)

    __eq__ = object.__eq__


@pytest.mark.parametrize("num_leaves", [64, 4096])
def test_no_call_visits_every_leaf(name: str, num_leaves: int) -> None:
    policy: EvictionPolicy[Any] = policy_named(name)
    leaves = [CountedNode(f"n{number}") for number in range(num_leaves)]
    for number, leaf in enumerate(leaves):
        policy.stored(leaf, [number], None)
        policy.enter(leaf)
    calls: list[Callable[[], Any]] = []
    for number, leaf in enumerate(leaves[:: num_leaves // 64]):
        calls += [
            lambda leaf=leaf, number=number: policy.used([leaf], [number], 1),
            lambda: policy.choose(),
            lambda number=number: policy.choose(Newcomer(leaves[0], number, 1)),
            lambda leaf=leaf: policy.leave(leaf),
            lambda leaf=leaf: policy.enter(leaf),
            lambda leaf=leaf, number=number: policy.evicted(leaf, [number], 1),
            lambda leaf=leaf: policy.forget(leaf),
        ]
    CountedNode.num_hashes = 0
    for call in calls:
        call()
    assert CountedNode.num_hashes / len(calls) < 16, "more than a few visits per call on average"


@pytest.mark.parametrize("keep_head", [True, False])
def test_the_halves_of_a_split_join_again(driver: PolicyDriver, keep_head: bool) -> None:
    node, other = driver.grow(driver.root, 6), driver.grow(driver.root, 2)
    driver.split(node, 4, new_head=True)
    [head] = [each for each in driver.root.children if each is not other]
    assert driver.may_join(head)
    joined = driver.join(head, keep_head=keep_head)
    assert len(joined) == 6
    driver.check()
    while driver.evict(1):
        driver.check()
    assert not driver.nodes
