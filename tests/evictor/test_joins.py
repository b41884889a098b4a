"""What is no longer apart becomes one, and that changes nothing else."""

import random
from typing import Any

import pytest

from evictor import KeepHints, Worth, make_policy
from tests.evictor.driver import CONTRACTORS, Node, PolicyDriver, policy_named
from tests.evictor.hinted_driver import HIGH, LOW, UNWANTED, HintedDriver, pinned

EXACT = [name for name in CONTRACTORS if name != "s3fifo"]
"""But for s3fifo, where the parts of a split move on one by one, and what has joined together."""


class History:
    """Requests for chains of a pool of 64 keys, one key evicted at a time."""

    def __init__(self, policy: Any, *, joins: bool, hints: bool) -> None:
        self.driver = PolicyDriver(policy)
        self.joins = joins
        self.hints = hints
        self.evicted: list[list[int]] = []
        self.num_joined = 0

    def run(self, seed: int, num_requests: int = 150) -> None:
        rng = random.Random(seed)
        for _ in range(num_requests):
            self.request(rng, [10_000 + rng.randrange(6), *(rng.choice([0, 0, 0, 1]) for _ in range(8))])

    def request(self, rng: random.Random, tokens: list[int]) -> None:
        """What is here of it is used, and the rest is stored."""
        chain = [hash(tuple(tokens[: end + 1])) for end in range(rng.randrange(2, len(tokens)) + 1)]
        hints = rng.choice([None, None, LOW, UNWANTED, HIGH, KeepHints(Worth.HIGH, ttl=9)])
        node, depth = self.find(chain)
        self.driver.policy.used(node.path, chain, depth)
        admission = self.driver.policy.heed(hints if self.hints else None, node.path, len(chain) - depth)
        if self.joins:
            self.heal(node)
            node, depth = self.find(chain)
        held, node.pinned = node.pinned, True
        self.driver.policy.leave(node)
        while self.size() + len(chain) - depth > 64:
            self.evicted.append(self.driver.evict(1))
        node.pinned = held
        if depth < len(chain):
            self.driver.store(node, chain[depth:], admission)
        elif node is not self.driver.root:
            self.driver.refresh(node)
        self.driver.check()

    def find(self, chain: list[int]) -> tuple[Node, int]:
        """The node at whose end the known part of ``chain`` ends, and its length; splits for that."""
        node, depth = self.driver.root, 0
        while depth < len(chain):
            child = next((each for each in node.children if each.keys[0] == chain[depth]), None)
            if child is None:
                break
            same = [key == other for key, other in zip(child.keys, chain[depth:], strict=False)]
            size = same.index(False) if False in same else len(same)
            if size < len(child.keys):
                self.driver.split(child, size, new_head=True)
                assert child.parent is not None
                return child.parent, depth + size
            node, depth = child, depth + size
        return node, depth

    def heal(self, node: Node) -> None:
        """As the allocator does it: along the path of a request."""
        for tail in node.path[:-1]:
            head = tail.parent
            assert head is not None
            if tail in self.driver.nodes and self.driver.may_join(head):
                self.driver.join(head, keep_head=self.num_joined % 2 == 0)
                self.num_joined += 1

    def size(self) -> int:
        return sum(len(node) for node in self.driver.nodes)


@pytest.mark.parametrize(("name", "hints"), [*((name, False) for name in EXACT), ("hinted(lru)", True)])
def test_joins_change_nothing_that_is_evicted(name: str, hints: bool) -> None:
    num_joined = 0
    for seed in range(12):
        joining, other = (History(policy_named(name), joins=joins, hints=hints) for joins in (True, False))
        for history in (joining, other):
            history.run(seed)
        assert joining.evicted == other.evicted
        assert len(joining.driver.nodes) <= len(other.driver.nodes)
        num_joined += joining.num_joined
    assert num_joined > 20 or name == "lfu", "which counts every use, so that parts are never alike again"


def test_s3fifo_joins_as_well() -> None:
    history = History(policy_named("s3fifo"), joins=True, hints=False)
    history.run(0)
    assert history.num_joined > 0


def halves(driver: PolicyDriver, size: int = 4) -> tuple[Node, Node]:
    """Two parts of a split."""
    tail = driver.grow(driver.root, size)
    driver.split(tail, size // 2, new_head=True)
    assert tail.parent is not None
    return tail.parent, tail


@pytest.mark.parametrize("name", CONTRACTORS)
def test_parts_that_were_used_otherwise_stay_apart(name: str) -> None:
    """But where a use changes nothing."""
    driver = PolicyDriver(policy_named(name))
    head, _ = halves(driver)
    driver.touch(head)
    assert driver.may_join(head) == (name == "fifo")


@pytest.mark.parametrize("name", [name for name in CONTRACTORS if name not in ("lfu", "s3fifo")])
def test_a_use_of_all_makes_parts_alike_again(name: str) -> None:
    """But under policies that count every use."""
    driver = PolicyDriver(policy_named(name))
    head, tail = halves(driver)
    driver.touch(head)
    driver.touch(tail)
    assert driver.may_join(head) == (name != "hazard"), "which counts uses, too, up to three"
    for _ in range(2):
        driver.touch(tail)
    assert driver.may_join(head)


@pytest.mark.parametrize("hints", [UNWANTED, LOW, HIGH, pinned(9), KeepHints(ttl=9)], ids=str)
@pytest.mark.parametrize("keep_head", [True, False])
def test_parts_with_the_same_hints_join(hints: KeepHints, keep_head: bool) -> None:
    driver = HintedDriver(8)
    node = driver.grown(6, hints)
    before = driver.policy_state(node)
    driver.split(node, 2, new_head=True)
    [head] = driver.root.children
    driver.split(node, 2, new_head=False)
    joined = driver.join(driver.join(head, keep_head=keep_head), keep_head=keep_head)
    driver.check()
    assert [len(each) for each in driver.nodes] == [6]
    assert driver.policy_state(joined) is before
    driver.now = 9
    assert driver.order() == [joined]
    driver.check()
    assert not driver.policy._num_marks


def test_parts_with_other_hints_stay_apart() -> None:
    driver = HintedDriver()
    node = driver.grown(6, LOW)
    driver.split(node, 3, new_head=True)
    [head] = driver.root.children
    assert driver.may_join(head)
    driver.use(head, LOW)
    assert not driver.may_join(head), "used later"
    driver.use(node, LOW)
    assert driver.may_join(head)
    driver.use(head)
    assert not driver.may_join(head), "with a hint and without"
    driver.use(node)
    assert driver.may_join(head)
    driver.use(head, HIGH)
    assert not driver.may_join(head), "without a hint and with"
    driver.use(node, pinned(5))
    assert not driver.may_join(head), "with other hints"


def test_what_is_joined_counts_once() -> None:
    driver = HintedDriver(8)
    node = driver.grown(6, HIGH)
    driver.split(node, 3, new_head=True)
    [head] = driver.root.children
    driver.join(head, keep_head=True)
    driver.grown(2, HIGH)
    states = [driver.policy_state(each) for each in driver.nodes]
    assert states == [Worth.HIGH, Worth.HIGH], "there is room for both"
    driver.check()


def test_hazard_joins_what_has_one_past() -> None:
    """The same number of uses, the same last use, and both used since they were stored or both not."""
    policy = make_policy("hazard", 64)
    driver = PolicyDriver(policy)
    head, tail = halves(driver)
    for field, value in (("last_use", 7), ("uses", 7), ("kind", 7), ("is_fresh", False)):
        assert driver.may_join(head)
        before = getattr(tail.rank, field)
        setattr(tail.rank, field, value)
        assert not driver.may_join(head), f"they differ in {field}"
        setattr(tail.rank, field, before)
