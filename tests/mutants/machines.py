"""State machines for a look at mutants: cut short, so they do not count what they have met."""

from collections import Counter

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.allocator.bag_machine import BagMachine
from tests.allocator.machine import AllocatorMachine
from tests.allocator.test_prefix_tree_machine import PrefixTreeMachine
from tests.evictor.machine import PolicyMachine
from tests.evictor.test_hinted_machine import HintedMachine
from tests.strategies import thorough


@pytest.mark.parametrize(
    ("machine", "policy"),
    [
        (AllocatorMachine, "lru"),
        (AllocatorMachine, "hazard"),
        (BagMachine, "lru"),
        (PolicyMachine, "lru"),
        (PolicyMachine, "hazard"),
        (PolicyMachine, "arc"),
    ],
)
def test_under_a_policy(machine: type[RuleBasedStateMachine], policy: str) -> None:
    _run(type("Machine", (machine,), {"policy": policy, "seen": Counter()}))


@pytest.mark.parametrize("machine", [PrefixTreeMachine, HintedMachine])
def test_alone(machine: type[RuleBasedStateMachine]) -> None:
    _run(machine)


def _run(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=thorough(100))
