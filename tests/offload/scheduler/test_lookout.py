"""The lookout beside a dict of due steps."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload.scheduler.lookout import Lookout
from tests.strategies import thorough

KEYS = st.sampled_from("abc")


class LookoutMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lookout: Lookout[str] = Lookout()
        self.due_in: dict[str, int] = {}
        self.ever: set[int] = set()  # steps in which somebody was due, at some time
        self.step = 0

    @rule(key=KEYS, steps=st.integers(-1, 4))
    def expect(self, key: str, steps: int) -> None:
        self.lookout.expect(key, steps)
        self.due_in[key] = self.step + max(steps, 1)
        self.ever.add(self.due_in[key])

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.lookout.forget(key)
        self.due_in.pop(key, None)

    @rule()
    def begin_step_if_nobody_is_due(self) -> None:
        if self.lookout.skip():
            self.step += 1
            assert self.step not in self.due_in.values()

    @rule(steps=st.integers(1, 3))
    def skip_where_nobody_is_expected(self, steps: int) -> None:
        """But for those who were expected then, and are not any longer."""
        for _ in range(steps):
            if self.step + 1 not in self.ever:
                assert self.lookout.skip()
                self.step += 1

    @rule()
    def begin_step(self) -> None:
        self.step += 1
        due = self.lookout.due()
        assert sorted(due) == sorted(key for key, step in self.due_in.items() if step == self.step)
        for key in due:
            del self.due_in[key]

    @invariant()
    def agrees(self) -> None:
        self.lookout.check_invariants()


TestLookoutMachine = LookoutMachine.TestCase
TestLookoutMachine.settings = thorough(100)


def test_a_key_that_is_expected_again_is_due_once() -> None:
    lookout: Lookout[str] = Lookout()
    lookout.expect("a", 2)
    lookout.expect("a", 1)
    lookout.expect("a", 2)
    assert [lookout.due(), lookout.due(), lookout.due()] == [[], ["a"], []]


def test_nothing_is_left_behind() -> None:
    lookout: Lookout[int] = Lookout()
    for step in range(1000):
        lookout.expect(step % 7, 1 + step % 3)
        lookout.due()
    for _ in range(3):
        lookout.due()
    assert not lookout._due_in and not lookout._by_step
