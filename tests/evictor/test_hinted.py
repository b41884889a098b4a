"""Hints of requests on top of LRU: the order they ask for, their ends, and what bounds them."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, KeepHints, LruPolicy, Newcomer, Worth, make_policy
from tests.evictor.driver import Node, PolicyDriver
from tests.evictor.machine import PolicyMachine
from tests.strategies import chain_of, thorough

UNLIMITED = 1 << 30
UNWANTED, LOW, HIGH = (KeepHints(worth) for worth in (Worth.UNWANTED, Worth.LOW, Worth.HIGH))


def pinned(until: float) -> KeepHints:
    return KeepHints(pinned_until=until)


@dataclass(slots=True)
class Wish:
    """What is wanted of a key, by the best of those who used it, and its last use."""

    hints: KeepHints
    stamp: int
    last_use: float


class HintedDriver(PolicyDriver):
    """Every use is by a request with ``hints``; ``now`` is the time."""

    policy: HintedPolicy[Any]

    def __init__(self, max_protected: int = UNLIMITED) -> None:
        super().__init__(HintedPolicy(LruPolicy(), max_protected, lambda: self.now))
        self.now = 0.0
        self.hints: KeepHints | None = None
        self.wishes: dict[int, Wish] = {}
        self._asked = 0

    def ask(self, node: Node, num_new: int = 0) -> None:
        self._asked += 1
        self.policy.ask(self.hints, node.path, num_new)
        mine = self.hints or KeepHints()
        for wish in [self.wishes[key] for each in node.path for key in each.keys]:
            wish.hints = KeepHints(
                max(wish.hints.worth, mine.worth),
                max(wish.hints.ttl, mine.ttl),
                max(wish.hints.pinned_until, mine.pinned_until),
            )
            wish.stamp, wish.last_use = self._asked, self.now

    def store(self, parent: Node, keys: Sequence[int]) -> Node:
        self.policy.leave(parent)
        self.ask(parent, len(keys))
        for key in keys:
            self.wishes[key] = Wish(self.hints or KeepHints(), self._asked, self.now)
        return super().store(parent, keys)

    def touch(self, node: Node, more: Sequence[int] = ()) -> None:
        super().touch(node, more)
        self.ask(node)

    def grown(self, num_keys: int, hints: KeepHints | None = None, parent: Node | None = None) -> Node:
        """What a request with ``hints`` stores; the driver's own stay as they are."""
        before, self.hints = self.hints, hints
        node = self.grow(parent or self.root, num_keys)
        self.hints = before
        return node

    def use(self, node: Node, hints: KeepHints | None = None) -> None:
        before, self.hints = self.hints, hints
        self.touch(node)
        self.hints = before

    def choose_for(self, hints: KeepHints | None) -> Node | None:
        """For a newcomer of one position."""
        self.policy.ask(hints, [], 1)
        return self.choose(Newcomer(self.root, -1, 1))

    def state(self, node: Node) -> Worth | None:
        """What a node is worth now, None while it is pinned. One node, one state."""
        (state,) = {self._state(self.wishes[key]) for key in node.keys}
        return state

    def _state(self, wish: Wish) -> Worth | None:
        if wish.hints.pinned_until > self.now:
            return None
        return Worth.UNWANTED if wish.last_use + wish.hints.ttl <= self.now else wish.hints.worth

    @property
    def victims(self) -> list[Node]:
        return [node for node in self.candidates if self.policy_state(node) is not None]

    def policy_state(self, node: Node) -> Worth | None:
        mark = self.policy._marks.get(node)
        return Worth.NORMAL if mark is None else mark.state

    def order(self) -> list[Node]:
        """Leaves in the order of their going."""
        order = []
        while (leaf := self.choose()) is not None:
            order.append(leaf)
            self.evict(len(leaf))
        return order


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
    driver.policy.check_invariants()
    assert [driver.policy_state(each) for each in driver.nodes] == [before, before]
    driver.now = 9
    if hints.ttl == 9:
        assert [driver.choose(), driver.policy_state(driver.nodes[1])] == [driver.nodes[0], Worth.UNWANTED]


def test_only_equals_share_a_segment() -> None:
    driver = HintedDriver(6)
    protected = driver.grown(2, HIGH)
    assert driver.grown(2, HIGH, parent=protected) is protected
    assert driver.grown(1, None, parent=protected) is not protected
    driver.policy.check_invariants()
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


# Bounds


def test_pins_and_high_priorities_are_bounded_together(caplog: pytest.LogCaptureFixture) -> None:
    driver = HintedDriver(10)
    driver.grown(4, pinned(100))
    driver.grown(6, HIGH)
    assert not caplog.records
    states = [driver.policy_state(node) for node in driver.nodes]
    assert states == [None, Worth.HIGH]
    newer = driver.grown(5, HIGH)  # the older one is normal from now on
    assert [driver.policy_state(node) for node in driver.nodes] == [None, Worth.NORMAL, Worth.HIGH]
    driver.use(newer)
    pin = driver.grown(6, pinned(50))
    assert [driver.policy_state(node) for node in driver.nodes] == [None, Worth.NORMAL, Worth.NORMAL, None]
    assert not caplog.records
    for _ in range(3):
        late = driver.grown(1, pinned(100))
        assert driver.policy_state(late) is Worth.NORMAL
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "more than the 10 positions" in record.getMessage()
    driver.now = 50
    assert driver.choose() is not None
    driver.use(late, HIGH)
    assert driver.policy_state(late) is Worth.HIGH, "there is room again"
    assert driver.policy_state(pin) is Worth.NORMAL


@pytest.mark.parametrize("new_head", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_no_tail_stays_protected_without_its_head(size: int, new_head: bool) -> None:
    driver = HintedDriver(5)
    node = driver.grown(4, HIGH)
    driver.split(node, size, new_head=new_head)
    driver.grown(2, HIGH)
    assert [driver.policy_state(each) for each in driver.nodes] == [Worth.NORMAL, Worth.NORMAL, Worth.HIGH]


def test_what_never_fits_takes_nothing_from_others() -> None:
    driver = HintedDriver(10)
    small = driver.grown(5, HIGH)
    large = driver.grown(11, HIGH)
    driver.use(large, pinned(50))
    assert driver.policy_state(large) is Worth.NORMAL
    assert driver.policy_state(small) is Worth.HIGH


def test_what_is_before_a_held_position_counts() -> None:
    """Or else a pin of one position would hold a chain of any length."""
    driver = HintedDriver(10)
    trunk = driver.grown(11)
    twig = driver.grown(1, pinned(50), parent=trunk)
    assert driver.policy_state(twig) is Worth.NORMAL
    head = driver.grown(8)
    tail = driver.grown(8, HIGH, parent=head)
    assert (driver.policy_state(head), driver.policy_state(tail)) == (Worth.HIGH, Worth.NORMAL)


def hits(policy: HintedPolicy[Any], capacity: int, greedy: KeepHints | None, rounds: int = 30) -> int:
    """Positions found by a client that asks for 10 documents of 8 in turn, the last one twice as often.

    Beside another one that never asks twice, and gives ``greedy`` hints; None: there is none.
    """
    allocator = CpuOffloadingBlockAllocator(capacity, policy=policy)
    found = 0

    def ask(chain: list[bytes], hints: KeepHints | None) -> int:
        depth = allocator.lookup(chain).depth
        allocator.touch(chain, hints)
        plan = allocator.plan_store(chain, len(chain), hints=hints)
        if plan is not None:
            allocator.commit(plan)
        allocator.check_invariants()
        return depth

    for step in range(rounds * 10):
        if greedy is not None and step % 3 == 0:
            ask(chain_of(1, *[step] * 5), greedy)
        found += ask(chain_of(2, *[step % 10 if step % 2 else 9] * 7), None)
    return found


@pytest.mark.parametrize("greedy", [HIGH, pinned(math.inf)], ids=["high", "pinned"])
def test_a_client_that_wants_everything_held_gets_its_share_only(greedy: KeepHints) -> None:
    capacity, share = 64, 16
    policy: HintedPolicy[Any] = HintedPolicy(LruPolicy(), share, lambda: 0.0)
    found = hits(policy, capacity, greedy)
    assert 0 < policy._num_high + policy._num_pinned <= share
    rest: HintedPolicy[Any] = HintedPolicy(LruPolicy(), 0, lambda: 0.0)
    assert found >= hits(rest, capacity - share, KeepHints()) > 0


def test_requests_that_want_nothing_kept_leave_the_others_all_the_pool() -> None:
    def found(greedy: KeepHints | None) -> int:
        return hits(HintedPolicy(LruPolicy(), 0, lambda: 0.0), 56, greedy)

    assert found(UNWANTED) == found(None) > found(KeepHints())
    assert found(LOW) == found(None)


def test_without_hints_it_is_the_inner_policy_and_keeps_nothing() -> None:
    reads: list[float] = []
    policy: HintedPolicy[Any] = HintedPolicy(LruPolicy(), 16, lambda: reads.append(0.0) or 0.0)
    hits(policy, 32, KeepHints())
    assert not policy._marks
    assert not reads, "nobody asked what time it is"


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


# Any order of calls


KEEPS = st.one_of(
    st.none(),
    st.builds(
        KeepHints,
        worth=st.sampled_from(Worth),
        ttl=st.sampled_from([1.0, 3.0, math.inf, math.inf]),
        pinned_until=st.sampled_from([-math.inf, -math.inf, -math.inf, 2.0, 5.0, 9.0]),
    ),
)


class HintedMachine(PolicyMachine):
    """Beside a model that keeps wishes per key, exact where nothing bounds what is protected."""

    policy = "lru"
    seen: ClassVar[Counter[str]] = Counter()
    driver: HintedDriver

    @initialize(max_protected=st.sampled_from([0, 3, 8, UNLIMITED, UNLIMITED]))
    def make(self, max_protected: int) -> None:  # type: ignore[override]
        self.driver = HintedDriver(max_protected)
        self.gone = []
        self.is_exact = max_protected == UNLIMITED

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @invariant()
    def what_is_before_held_positions_is_protected(self) -> None:
        for node in self.driver.nodes:
            states = [self.driver.policy_state(each) for each in node.path]
            is_protected = [state in (None, Worth.HIGH) for state in states]
            assert is_protected == sorted(is_protected), f"{node.path} are {states}"
            self.seen["protected"] += is_protected[0]
            self.seen["refused"] += (
                self.driver.wishes[node.keys[-1]].hints.wants_protection and not is_protected[0]
            )

    def expect_victim(self, leaf: Node) -> None:
        """The least of what there is, and of that the least recently used."""
        if not self.is_exact:
            return
        states = {each: self.driver.state(each) for each in self.driver.candidates}
        state = states[leaf]
        assert state is not None
        assert state == min(each for each in states.values() if each is not None)
        stamps = [self.driver.wishes[each.keys[0]].stamp for each in states if states[each] is state]
        assert self.driver.wishes[leaf.keys[0]].stamp == min(stamps)
        self.seen[f"{state.name.lower()} chosen"] += 1

    def _draw(self, data: st.DataObject, nodes: list[Node]) -> Node:
        """Whoever uses a node has hints."""
        self.driver.hints = data.draw(KEEPS)
        return super()._draw(data, nodes)

    def _evict(self, bite: int, newcomer: Newcomer[Node] | None) -> None:
        if newcomer is not None:
            self.driver.ask(newcomer.parent, newcomer.num_positions)
            chosen = self.driver.choose(newcomer)
            if self.is_exact:
                self._expect_for(self.driver.hints or KeepHints(), chosen)
        super()._evict(bite, newcomer)

    def _expect_for(self, hints: KeepHints, chosen: Node | None) -> None:
        most = hints.worth
        if hints.pinned_until > self.driver.now:
            most = Worth.HIGH
        states = [self.driver.state(each) for each in self.driver.candidates]
        assert (chosen is None) == (not any(state is not None and state <= most for state in states))
        self.seen[f"kept out, {hints.worth.name.lower()}"] += chosen is None and any(states)


def test_any_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evictor.hinted.logger.disabled", True)
    run_state_machine_as_test(HintedMachine, settings=thorough(120))
    chosen = {f"{worth.name.lower()} chosen" for worth in Worth}
    wanted = {*chosen, "protected", "refused"}
    assert wanted <= {situation for situation, times in HintedMachine.seen.items() if times}


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_a_policy_that_counts_positions_hears_of_drops_below_hints(policy: str) -> None:
    pool = CpuOffloadingBlockAllocator(20, policy=HintedPolicy(make_policy(policy, 20), 10, lambda: 0.0))
    chain = chain_of(*range(5))
    plan = pool.plan_store(chain, 5, hints=LOW)
    assert plan is not None
    pool.commit(plan)
    pool.drop(chain, 3)
    pool.check_invariants()
