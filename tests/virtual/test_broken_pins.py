"""A pin that does not hold costs a failed load, whatever is verified: never a wrong byte."""

import pytest
from vllm.v1.request import Request

from allocator import CpuOffloadingBlockAllocator
from allocator.prefix_tree import Node, PrefixTree
from offload.messages import LOAD
from offload.testing.virtual import VirtualEngine
from offload.testing.virtual.audit import Audit
from offload.testing.virtual.history import WrongBytesError
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    depth_of,
    hold,
    step_until,
    tokens,
    warm,
)

BLOCKS = 10
PROMPT = tokens(4 * BLOCKS)


@pytest.fixture
def pins_that_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split leaves pins where they hung, so that the tail of what they pinned may be evicted."""
    split = PrefixTree._split_off_tail

    def split_without_pins(self: PrefixTree, node: Node, size: int) -> Node:
        tail = split(self, node, size)
        for pin in tail.pins:
            pin.node = node
        tail.pins, node.pins = frozenset(), tail.pins
        return tail

    monkeypatch.setattr(PrefixTree, "_split_off_tail", split_without_pins)


@pytest.mark.usefixtures("pins_that_slip")
@pytest.mark.parametrize("of_blocks", [False, True], ids=["of slots", "of blocks"])
@pytest.mark.parametrize("verify", ["always", "sampled", "never"])
def test_a_load_whose_slots_are_taken_away_fails(
    engines: Engines, verify: str, of_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower leaves the chain near its end while that is being restored; then the pool is full."""
    _look_away(monkeypatch)
    engine = engines(
        gpu_blocks=60, cpu_slots=14, verify_loads=verify, seals_of_blocks=of_blocks, first_part=2
    )
    victim = _restore_and_leave(engine)
    assert depth_of(engine, victim) < BLOCKS, "the test is blind: nothing was evicted under the pin"
    come_to_rest(engine)
    assert victim.is_finished()
    assert engine.counts["loads"] == 1


@pytest.mark.usefixtures("pins_that_slip")
def test_the_workers_audit_finds_a_job_that_fails_of_itself(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that random runs notice a pin that slips, though no byte is wrong."""
    _look_away(monkeypatch)
    engine = engines(gpu_blocks=60, cpu_slots=14, verify_loads="never", first_part=2)
    engine.audit.explain_failures = True
    _restore_and_leave(engine)
    with pytest.raises(WrongBytesError, match="failed though nothing was done to it"):
        come_to_rest(engine)


def test_pins_hold_when_a_follower_leaves_the_chain(engines: Engines) -> None:
    engine = engines(gpu_blocks=60, cpu_slots=14, verify_loads="never", first_part=2)
    engine.audit.explain_failures = True
    victim = _restore_and_leave(engine)
    assert depth_of(engine, victim) == BLOCKS
    come_to_rest(engine)


def _restore_and_leave(engine: VirtualEngine) -> Request:
    warm(engine, PROMPT)
    hold(engine, LOAD)
    victim = engine.add(PROMPT, 3)
    step_until(engine, lambda: victim.status == LOADING)
    follower = engine.add(PROMPT[:32] + tokens(8, 9), 1, hints={"cpu_offload_load": False})
    step_until(engine, follower.is_finished)
    for other in [engine.add(tokens(16, 20 + index), 1) for index in range(4)]:
        step_until(engine, other.is_finished)
    for _ in range(5):
        engine.step()
    return victim


def _look_away(patch: pytest.MonkeyPatch) -> None:
    """The invariants would notice first."""
    patch.setattr(CpuOffloadingBlockAllocator, "check_invariants", lambda self: None)
    patch.setattr(Audit, "_check_pinned_slots", lambda self: None)
