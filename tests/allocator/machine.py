"""Every order of every call of the allocator, beside its model."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from allocator import ChainError, Pin, StalePlanError, StorePlan
from evictor import make_policy
from tests.allocator.pair import LruPair, Pair
from tests.models import Position
from tests.strategies import MAX_LENGTH, chains, depths


class AllocatorMachine(RuleBasedStateMachine):
    """Under the policy named ``policy``. ``seen`` adds up over all runs."""

    policy: ClassVar[str]
    seen: ClassVar[Counter[str]]

    plans = Bundle("plans")
    pins = Bundle("pins")
    leases = Bundle("leases")
    ended_plans = Bundle("ended_plans")
    ended_pins = Bundle("ended_pins")

    @initialize(
        positions=st.integers(1, 12),
        columns=st.sampled_from([1, 1, 2]),
        odd=st.booleans(),
        stride=st.sampled_from([1, 2, 3, 16]),
        slack=st.sampled_from([0, 0, 0, 1, 3]),
        work=st.sampled_from([0, 1, 257, 1 << 16]),
    )
    def make(self, positions: int, columns: int, odd: bool, stride: int, slack: int, work: int) -> None:
        capacity = positions * columns + (odd and columns > 1)
        kind = LruPair if self.policy == "lru" else Pair
        self.pair = kind(capacity, columns, make_policy(self.policy, capacity // columns), stride)
        self.pair.seen = self.seen
        self.pair.allocator._room.slack = slack  # that of a larger pool
        self.pair.allocator._step_work = self.pair.allocator._work_left = work  # as of a large pool

    @invariant()
    def agrees(self) -> None:
        self.pair.check()

    # Stores

    @rule(several=st.lists(chains(min_length=3), min_size=1, max_size=3))
    def store(self, several: list[list[bytes]]) -> None:
        for chain in several:
            self.pair.store(chain)

    @rule(
        target=plans,
        chain=chains(min_length=3),
        stop=depths(),
        limit=st.none() | st.integers(-1, 4),
        must=st.booleans(),
    )
    def plan_store(self, chain: list[bytes], stop: int, limit: int | None, must: bool) -> StorePlan | None:
        return self.pair.plan_store(chain, stop, limit, must=must) or multiple()

    @rule(target=plans, chain=chains(min_length=4), limit=st.integers(1, 3))
    def plan_in_pieces(self, chain: list[bytes], limit: int) -> tuple[StorePlan, ...]:
        """A long prompt computed in chunks: each store begins behind one that is still in flight."""
        return multiple(*iter(lambda: self.pair.plan_store(chain, limit=limit), None))

    @rule(target=ended_plans, plan=consumes(plans))
    def commit(self, plan: StorePlan) -> StorePlan:
        self.pair.commit(plan)
        return plan

    @rule(target=ended_plans, plan=consumes(plans))
    def abort(self, plan: StorePlan) -> StorePlan:
        self.pair.abort(plan)
        return plan

    @rule(plan=plans)
    def abandon(self, plan: StorePlan) -> None:
        """Once or again; it is still to be ended."""
        self.pair.abandon(plan)

    @rule(plan=ended_plans)
    def end_plan_again(self, plan: StorePlan) -> None:
        allocator = self.pair.allocator
        for end in (allocator.commit, allocator.abort, allocator.abandon):
            with pytest.raises(StalePlanError):
                end(plan)

    # Loads

    @precondition(lambda self: self._resident() and len(self.pair.model.pins) < 4)
    @rule(target=pins, data=st.data(), num_pins=st.integers(1, 3))
    def pin(self, data: st.DataObject, num_pins: int) -> tuple[Pin, ...]:
        pins = []
        for _ in range(num_pins):
            path = data.draw(st.sampled_from(self._resident())).path
            start = data.draw(st.integers(0, len(path) - 1))
            pins.append(self.pair.pin([position.prefix_hash for position in path], start, len(path)))
        return multiple(*pins)

    @rule(target=ended_pins, pin=consumes(pins))
    def unpin(self, pin: Pin) -> Pin:
        self.pair.unpin(pin)
        return pin

    @rule(pin=ended_pins)
    def unpin_again(self, pin: Pin) -> None:
        with pytest.raises(StalePlanError):
            self.pair.allocator.unpin(pin)

    # Leases

    @precondition(lambda self: self.pair.model.tree.positions and len(self.pair.model.leases) < 4)
    @rule(target=leases, data=st.data())
    def lease(self, data: st.DataObject) -> Pin:
        """What is resident, or filling."""
        known = sorted(self.pair.model.tree.positions.values(), key=_deepest_first)
        path = data.draw(st.sampled_from(known)).path
        return self.pair.lease([position.prefix_hash for position in path])

    @rule(lease=consumes(leases))
    def end_lease(self, lease: Pin) -> None:
        self.pair.end_lease(lease)
        with pytest.raises(StalePlanError):
            self.pair.allocator.leases.end(lease)

    @rule(chain=chains())
    def lease_what_is_not_known(self, chain: list[bytes]) -> None:
        if len(self.pair.model.tree.known(chain)) < len(chain):
            with pytest.raises(ChainError):
                self.pair.allocator.leases.begin(chain, len(chain))
        with pytest.raises(ChainError):
            self.pair.allocator.leases.begin(chain, 0)

    # Recency and leaving

    @rule(chain=chains(min_length=0))
    def use(self, chain: list[bytes]) -> None:
        self.pair.use(chain)

    @rule(num_slots=st.integers(0, 3))
    def evict(self, num_slots: int) -> None:
        self.pair.evict(num_slots)

    @precondition(lambda self: self._resident())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pair.drop([each.prefix_hash for each in data.draw(st.sampled_from(self._resident())).path])

    @rule(chain=chains(), start=st.integers(-2, MAX_LENGTH), stop=st.integers(-2, MAX_LENGTH + 2))
    def ask_for_what_is_not_resident(self, chain: list[bytes], start: int, stop: int) -> None:
        depth = len(self.pair.model.tree.resident(chain))
        if not 0 <= start < stop <= depth:
            with pytest.raises(ChainError):
                self.pair.allocator.pin(chain, start, stop)
        if depth < len(chain):
            self.pair.drop(chain)

    @precondition(lambda self: self.pair.has_carried)
    @rule()
    def tidy(self) -> None:
        self.pair.tidy()

    @precondition(lambda self: self.pair.model.pins and self.pair.model.stores)
    @rule()
    def reset(self) -> None:
        self.pair.reset()

    def _resident(self) -> list[Position]:
        """Deepest first, for what is first is drawn most; in the same order in every run."""
        resident = [position for position in self.pair.model.tree.positions.values() if position.resident]
        return sorted(resident, key=_deepest_first)


def _deepest_first(position: Position) -> tuple[int, bytes]:
    return -len(position.path), position.prefix_hash
