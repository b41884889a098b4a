"""Every order of every call of an allocator with checkpoints, beside its model."""

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
from tests.allocator.bag_pair import BagPair
from tests.models import Position
from tests.strategies import chains, depths

BAG_SLOTS = 3


class BagMachine(RuleBasedStateMachine):
    """Under the policy named ``policy``."""

    policy: ClassVar[str]

    plans = Bundle("plans")
    pins = Bundle("pins")
    leases = Bundle("leases")

    @initialize(
        capacity=st.sampled_from([6, 9, 14, 24]),
        columns=st.sampled_from([1, 1, 0, 2]),
        stride=st.sampled_from([1, 2, 16]),
        work=st.sampled_from([0, 1, 257, 1 << 16]),
    )
    def make(self, capacity: int, columns: int, stride: int, work: int) -> None:
        self.pair = BagPair(capacity, columns, BAG_SLOTS, make_policy(self.policy, capacity), stride)
        self.pair.allocator._step_work = self.pair.allocator._work_left = work  # as of a large pool

    @invariant()
    def agrees(self) -> None:
        self.pair.check()

    # Stores

    @rule(several=st.lists(chains(min_length=3), min_size=1, max_size=3), num_bag=st.integers(0, BAG_SLOTS))
    def store(self, several: list[list[bytes]], num_bag: int) -> None:
        for chain in several:
            self.pair.store(chain, num_bag)

    @rule(chain=chains(min_length=5), every=st.integers(1, 3), num_bag=st.integers(1, 2))
    def store_with_inner_checkpoints(self, chain: list[bytes], every: int, num_bag: int) -> None:
        for stop in [*range(every, len(chain), every), len(chain)]:
            self.pair.store(chain[:stop], num_bag)

    @rule(
        target=plans,
        chain=chains(min_length=3),
        stop=depths(),
        limit=st.none() | st.integers(-1, 4),
        num_bag=st.none() | st.integers(0, BAG_SLOTS),
    )
    def plan_store(
        self, chain: list[bytes], stop: int, limit: int | None, num_bag: int | None
    ) -> StorePlan | None:
        return self.pair.plan_store(chain, stop, limit, num_bag) or multiple()

    @rule(target=plans, chain=chains(min_length=4), limit=st.integers(1, 3), num_bag=st.none() | st.just(2))
    def plan_in_pieces(self, chain: list[bytes], limit: int, num_bag: int | None) -> tuple[StorePlan, ...]:
        """A checkpoint that is as far away as several stores."""
        return multiple(*iter(lambda: self.pair.plan_store(chain, None, limit, num_bag), None))

    @precondition(lambda self: self._resident())
    @rule(target=plans, data=st.data(), num_bag=st.integers(0, BAG_SLOTS))
    def plan_bag(self, data: st.DataObject, num_bag: int) -> StorePlan | None:
        """Behind a position that is known already."""
        return self.pair.plan_store(self._draw_chain(data), num_bag=num_bag) or multiple()

    @rule(plan=consumes(plans))
    def commit(self, plan: StorePlan) -> None:
        self.pair.commit(plan)
        self._end_again(plan)

    @rule(plan=consumes(plans))
    def abort(self, plan: StorePlan) -> None:
        self.pair.abort(plan)
        self._end_again(plan)

    @rule(plan=plans)
    def abandon(self, plan: StorePlan) -> None:
        """Once or again; it is still to be ended."""
        self.pair.abandon(plan)

    @rule(chain=chains(min_length=3))
    def close(self, chain: list[bytes]) -> None:
        self.pair.close(chain)

    # Loads

    @precondition(lambda self: self._checkpoints() and len(self.pair.model.pins) < 4)
    @rule(target=pins, data=st.data())
    def pin(self, data: st.DataObject) -> Pin:
        path = data.draw(st.sampled_from(self._checkpoints())).path
        start = data.draw(st.integers(0, len(path) - 1))
        return self.pair.pin([position.prefix_hash for position in path], start, len(path))

    @rule(pin=consumes(pins))
    def unpin(self, pin: Pin) -> None:
        self.pair.unpin(pin)

    @rule(chain=chains())
    def pin_without_a_checkpoint(self, chain: list[bytes]) -> None:
        if self.pair.model.usable(chain, len(chain), len(chain) - 1) == 0:
            with pytest.raises(ChainError):
                self.pair.allocator.pin(chain, 0, len(chain))

    # Leases

    @precondition(lambda self: self.pair.model.bags and len(self.pair.model.leases) < 4)
    @rule(target=leases, data=st.data())
    def lease(self, data: st.DataObject) -> Pin:
        """Up to a checkpoint, complete or filling."""
        path = data.draw(st.sampled_from(_in_order(list(self.pair.model.bags)))).path
        return self.pair.lease([position.prefix_hash for position in path])

    @rule(lease=consumes(leases))
    def end_lease(self, lease: Pin) -> None:
        self.pair.end_lease(lease)

    @rule(chain=chains())
    def lease_without_a_checkpoint(self, chain: list[bytes]) -> None:
        known = self.pair.model.tree.known(chain)
        depths = [depth for depth, each in enumerate(known, 1) if each in self.pair.model.bags]
        assert self.pair.allocator.leases.depth(chain, len(chain)) == max(depths, default=0)
        if len(chain) not in depths:
            with pytest.raises(ChainError):
                self.pair.allocator.leases.begin(chain, len(chain))

    # Recency and leaving

    @rule(chain=chains(min_length=0))
    def use(self, chain: list[bytes]) -> None:
        self.pair.use(chain)

    @rule(num_slots=st.integers(0, 5))
    def evict(self, num_slots: int) -> None:
        self.pair.evict(num_slots)

    @precondition(lambda self: self._resident())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pair.drop(self._draw_chain(data))

    @precondition(lambda self: self._resident())
    @rule(data=st.data(), prefers=st.booleans())
    def drop_bag(self, data: st.DataObject, prefers: bool) -> None:
        """Where there is one or, as well, where there is none."""
        some = (self._checkpoints() if prefers else []) or self._resident()
        path = data.draw(st.sampled_from(some)).path
        self.pair.drop_bag([position.prefix_hash for position in path])

    @precondition(lambda self: self.pair.has_carried)
    @rule()
    def tidy(self) -> None:
        self.pair.tidy()

    @precondition(lambda self: self.pair.model.pins and self.pair.model.stores)
    @rule()
    def reset(self) -> None:
        self.pair.reset()

    def teardown(self) -> None:
        """What waits for a cut is listed in the end."""
        if hasattr(self, "pair"):
            self.pair.allocator._step_work = 1 << 16
            while self.pair.has_carried:
                self.pair.tidy()
            self.pair.check()

    # Helpers

    def _end_again(self, plan: StorePlan) -> None:
        allocator = self.pair.allocator
        for end in (allocator.commit, allocator.abort, allocator.abandon):
            with pytest.raises(StalePlanError):
                end(plan)

    def _draw_chain(self, data: st.DataObject) -> list[bytes]:
        return [each.prefix_hash for each in data.draw(st.sampled_from(self._resident())).path]

    def _resident(self) -> list[Position]:
        """Deepest first, for what is first is drawn most; in the same order in every run."""
        return _in_order([each for each in self.pair.model.tree.positions.values() if each.resident])

    def _checkpoints(self) -> list[Position]:
        return _in_order(list(self.pair._complete()))


def _in_order(positions: list[Position]) -> list[Position]:
    return sorted(positions, key=lambda position: (-len(position.path), position.prefix_hash))
