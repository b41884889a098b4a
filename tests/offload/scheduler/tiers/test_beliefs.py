"""What was seen in a store, against a slow list of all that was said."""

from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.scheduler.tiers.beliefs import FRESH_SECONDS, KEEP_SECONDS, Beliefs
from tests.strategies import thorough

NAMES = [bytes([index]) * 32 for index in range(12)]
CHAINS = [NAMES[:8], NAMES[:3] + NAMES[8:]]


class BeliefsMachine(RuleBasedStateMachine):
    """``seen`` and ``gone`` have the time of each name's last word."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.beliefs = Beliefs(lambda: self.now)
        self.seen: dict[bytes, float] = {}
        self.gone: dict[bytes, float] = {}

    @rule(seconds=st.sampled_from([0.0, 1.0, FRESH_SECONDS, KEEP_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(chain=st.sampled_from(CHAINS), stop=st.integers(0, 8))
    def believe(self, chain: list[bytes], stop: int) -> None:
        self.beliefs.believe(chain[:stop])
        for name in chain[:stop]:
            self.seen[name] = self.now
            self.gone.pop(name, None)

    @rule(chain=st.sampled_from(CHAINS), index=st.integers(0, 7), seconds=st.sampled_from([1.0, 60.0]))
    def deny(self, chain: list[bytes], index: int, seconds: float) -> None:
        self.beliefs.deny(chain, index, seconds)
        for name in chain[index:]:
            self.seen.pop(name, None)
        if index < len(chain):
            self.gone[chain[index]] = self.now + seconds

    @precondition(lambda self: self.seen)
    @rule()
    def clear(self) -> None:
        self.beliefs.clear()
        self.seen, self.gone = {}, {}

    @rule(chain=st.sampled_from(CHAINS), also=st.sets(st.sampled_from(NAMES)))
    def look(self, chain: list[bytes], also: set[bytes]) -> None:
        for seconds in (FRESH_SECONDS, KEEP_SECONDS):
            depth = 0
            while depth < len(chain) and self.seen.get(chain[depth], -inf) >= self.now - seconds:
                depth += 1
            assert self.beliefs.depth(chain, seconds) == depth
            is_open = depth < len(chain) and self.gone.get(chain[depth], -inf) <= self.now
            assert self.beliefs.is_open(chain, depth) == is_open
        depth = 0
        while depth < len(chain) and (
            chain[depth] in also or self.seen.get(chain[depth], -inf) >= self.now - KEEP_SECONDS
        ):
            depth += 1
        assert self.beliefs.depth(chain, also=dict.fromkeys(also, inf)) == depth
        are_gone = any(self.gone.get(name, -inf) > self.now for name in chain)
        assert self.beliefs.are_gone(chain) == are_gone

    @invariant()
    def agrees(self) -> None:
        self.beliefs.check_invariants()


BeliefsMachine.TestCase.settings = thorough(100)
TestBeliefs = BeliefsMachine.TestCase


@pytest.mark.parametrize("num_names", [1, 5, 100])
def test_there_are_never_too_many(num_names: int) -> None:
    now = 0.0
    beliefs = Beliefs(lambda: now, most_names=50)
    for turn in range(200):
        names = [bytes([turn, index]) for index in range(num_names)]
        beliefs.believe(names)
        beliefs.deny([bytes([turn, 200])], 0)
        beliefs.check_invariants()
        assert len(beliefs) <= 50
        if num_names <= 25:
            assert beliefs.depth(names) == num_names, "what was seen last is believed"
    assert beliefs.depth([bytes([0, 0])]) == 0, "what was seen first is forgotten"
