"""The allocator beside its model: under every policy, and under LRU with every victim foretold."""

from collections import Counter

import pytest
from hypothesis.stateful import run_state_machine_as_test

from evictor import available_policies
from tests.allocator.machine import AllocatorMachine
from tests.allocator.test_situations import SCENES
from tests.strategies import thorough

THOROUGH = {"hazard", "lru"}
"""Policies that are tried more often; the others differ in no more than who goes first."""


@pytest.mark.parametrize("policy", available_policies())
def test_the_allocator_does_what_its_model_does(policy: str) -> None:
    """Whether it meets every rare situation is up to chance; ``test_situations`` meets each for certain."""
    machine = type("Machine", (AllocatorMachine,), {"policy": policy, "seen": Counter()})
    run_state_machine_as_test(machine, settings=thorough(150 if policy in THOROUGH else 40, steps=60))
    situations = {situation for situation, times in machine.seen.items() if times}
    assert situations <= SCENES.keys(), "a situation has no scene that surely meets it"
