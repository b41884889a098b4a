"""The allocator beside its model: under every policy, and under LRU with every victim foretold."""

from collections import Counter

import pytest
from hypothesis.stateful import run_state_machine_as_test

from evictor import available_policies
from tests.allocator.machine import AllocatorMachine
from tests.strategies import thorough

SITUATIONS = {
    "abandoned before it ended",
    "abandoning frees others that have landed",
    "abort frees others that have landed",
    "abort of an orphan",
    "commit out of order",
    "commit settles others",
    "drop of a part of a pin",
    "drop orphans a store",
    "drop under a pin",
    "evicted beside a pin",
    "pin of a pinned position",
    "plan behind a filling position",
    "plan shorter than wanted",
    "reset with loads and stores in flight",
    "unpin frees slots",
}


THOROUGH = {"hazard", "lru"}
"""Policies under which all SITUATIONS must come up; the others differ in no more than who goes first."""


@pytest.mark.parametrize("policy", available_policies())
def test_the_allocator_does_what_its_model_does(policy: str) -> None:
    machine = type("Machine", (AllocatorMachine,), {"policy": policy, "seen": Counter()})
    run_state_machine_as_test(machine, settings=thorough(300 if policy in THOROUGH else 40, steps=60))
    situations = {situation for situation, times in machine.seen.items() if times}
    assert situations <= SITUATIONS
    assert situations == SITUATIONS or policy not in THOROUGH
