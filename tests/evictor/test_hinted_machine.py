"""Hints under any order of calls, beside the model."""

import math
from collections import Counter
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from evictor import Admission, KeepHints, Newcomer, Worth
from evictor.marks import CANDIDATE
from tests.evictor.driver import Node
from tests.evictor.hinted_driver import UNLIMITED, HintedDriver
from tests.evictor.machine import PolicyMachine
from tests.seeds import OTHER_SEEDS
from tests.strategies import thorough

KEEPS = st.one_of(
    st.none(),
    st.just(KeepHints(Worth.HIGH, ttl=1.0)),
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
        self.max_protected = max_protected
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
            wants_protection = self.driver.wishes[node.keys[-1]].state(self.driver.now) in (None, Worth.HIGH)
            self.seen["refused"] += wants_protection and not is_protected[0]

    @invariant()
    def no_more_is_protected_than_may_be(self) -> None:
        states = [(self.driver.policy_state(node), len(node)) for node in self.driver.nodes]
        assert sum(size for state, size in states if state in (None, Worth.HIGH)) <= self.max_protected
        self.seen["used after high worth had ended"] += self.driver.num_used_late > 0

    @invariant()
    def marks_tell_the_last_use(self) -> None:
        """The time of it, and of any two nodes which was used later."""
        stamps = {}
        for node in self.driver.nodes:
            mark = node.mark
            if mark not in (None, CANDIDATE):
                wish = self.driver.wishes[node.keys[0]]
                assert mark.last_use == wish.last_use, f"{node} was used at {wish.last_use}"
                assert stamps.setdefault(wish.stamp, mark.stamp) == mark.stamp, f"{node} was used with others"
        in_order = [stamps[asked] for asked in sorted(stamps)]
        assert all(before < after for before, after in pairwise(in_order)), f"{stamps} are out of order"

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

    def _evict(
        self,
        bite: int,
        newcomer: Newcomer[Node] | None = None,
        admission: Admission[Node] | None = None,
    ) -> None:
        if newcomer is not None and self.is_exact:
            chosen = self.driver.choose(newcomer, admission)
            self._expect_for(self.driver.hints or KeepHints(), chosen)
        super()._evict(bite, newcomer, admission)

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
    wanted = {*chosen, "protected", "refused", "used after high worth had ended"}
    assert OTHER_SEEDS or wanted <= {situation for situation, times in HintedMachine.seen.items() if times}
