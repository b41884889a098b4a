"""An allocator with checkpoints beside its model, under every policy."""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from evictor import available_policies
from tests.allocator.bag_machine import BagMachine
from tests.strategies import thorough


@pytest.mark.parametrize("policy", available_policies())
def test_the_allocator_with_checkpoints_does_what_its_model_does(policy: str) -> None:
    machine = type("Machine", (BagMachine,), {"policy": policy})
    num_histories = 150 if policy in {"hazard", "lru"} else 40
    run_state_machine_as_test(machine, settings=thorough(num_histories, steps=50))
