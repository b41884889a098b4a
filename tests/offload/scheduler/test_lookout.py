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
        self.step = 0

    @rule(key=KEYS, steps=st.integers(-1, 4))
    def expect(self, key: str, steps: int) -> None:
        self.lookout.expect(key, steps)
        self.due_in[key] = self.step + max(steps, 1)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.lookout.forget(key)
        self.due_in.pop(key, None)

    @rule(steps=st.integers(1, 3))
    def skip_where_nobody_is_due(self, steps: int) -> None:
        """Whoever was expected then, and is not any longer, is nobody."""
        for _ in range(steps):
            is_skipped = self.step + 1 not in self.due_in.values()
            assert self.lookout.skip() is is_skipped
            self.step += is_skipped

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
