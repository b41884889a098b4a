"""The slot pool beside a dict of states."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import CapacityError
from allocator.slot_pool import SlotPool, SlotQueue, Slots, SlotState
from tests.models import SlotPoolModel
from tests.strategies import thorough

FREE, FILLING, RESIDENT, LEAVING, BAGGED, WITHDRAWN = SlotState


class SlotPoolMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 12))
    def make(self, capacity: int) -> None:
        self.pool = SlotPool(capacity)
        self.model = SlotPoolModel(capacity)
        self.loads: list[Slots] = []

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        num_slots = round(share * self.pool.num_free)
        slots = self.pool.take(num_slots)
        assert slots.dtype == np.int64
        assert slots.tolist() == self.model.take(num_slots)

    @rule(
        data=st.data(),
        before=st.sampled_from([FILLING, RESIDENT, BAGGED]),
        after=st.sampled_from([FREE, FILLING, RESIDENT, BAGGED]),
    )
    def move(self, data: st.DataObject, before: SlotState, after: SlotState) -> None:
        if before is after:
            return
        slots = data.draw(_some_of(self.model.slots_in(before)))
        self.pool.move(slots, before, after)
        self.model.move(slots.tolist(), after)

    @rule(data=st.data(), num_loads=st.integers(1, 3))
    def leave(self, data: st.DataObject, num_loads: int) -> None:
        """Loads read slots whose positions are gone, the first of them all."""
        slots = data.draw(_some_of(self.model.slots_in(RESIDENT)))
        self.pool.move(slots, RESIDENT, LEAVING)
        self.model.move(slots.tolist(), LEAVING)
        for index in range(num_loads):
            read = data.draw(_some_of(slots.tolist())) if index else slots
            self.pool.read(read)
            self.loads.append(read)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        slots = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.pool.end_read(slots)
        others = {slot for each in self.loads for slot in each.tolist()}
        self.model.move([slot for slot in slots.tolist() if slot not in others], FREE)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slots = data.draw(_some_of(sorted(set(range(self.pool.capacity)) - self.model.closed)))
        self.pool.close(slots)
        self.model.close(slots.tolist())

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        slots = data.draw(_some_of(sorted(self.model.closed)))
        self.pool.open(slots)
        self.model.open(slots.tolist())

    @rule(data=st.data())
    def leaving(self, data: st.DataObject) -> None:
        slots = data.draw(_some_of(range(self.pool.capacity)))
        leaving = [slot for slot in slots.tolist() if self.model.state[slot] is LEAVING]
        assert self.pool.leaving(slots).tolist() == leaving
        assert self.pool.leaving().tolist() == self.model.slots_in(LEAVING)

    @rule()
    def taking_too_many_changes_nothing(self) -> None:
        with pytest.raises(AssertionError, match="free slots"):
            self.pool.take(self.pool.num_free + 1)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == len(self.model.free)
        assert self.pool.num_open == self.pool.capacity - len(self.model.closed)
        every = np.arange(self.pool.capacity)
        assert np.flatnonzero(self.pool.is_closed(every)).tolist() == sorted(self.model.closed)
        assert sorted(self.pool.last_free(2).tolist()) == sorted(self.model.free[:2])
        unused = (FREE, WITHDRAWN)
        assert self.pool.num_used(every).tolist() == [self.model.state[each] not in unused for each in every]
        for state in SlotState:
            assert self.pool.num_in(state) == len(self.model.slots_in(state))
        assert sum(map(self.pool.num_in, SlotState)) == self.pool.capacity


def _some_of(slots: "range | list[int]") -> st.SearchStrategy[Slots]:
    """A part of ``slots`` in any order."""
    shuffled = st.permutations(list(slots))
    return shuffled.flatmap(lambda order: st.integers(0, len(order)).map(lambda n: _array(order[:n])))


def _array(slots: list[int]) -> Slots:
    return np.array(slots, dtype=np.int64)


TestSlotPoolMachine = SlotPoolMachine.TestCase
TestSlotPoolMachine.settings = thorough(80)


class QueueModel(SlotPoolModel):
    """Those given back wait behind those that are free."""

    def move(self, slots: Iterable[int], target: SlotState) -> None:
        before = self.free
        self.free = []
        super().move(list(slots)[::-1], target)
        self.free += before


class SlotQueueMachine(SlotPoolMachine):
    @initialize(order=st.integers(1, 12).flatmap(lambda capacity: st.permutations(range(capacity))))
    def make(self, order: list[int]) -> None:
        self.pool = SlotQueue(len(order), _array(order))
        self.model = QueueModel(len(order))
        self.model.free = order[::-1]
        self.loads = []


TestSlotQueueMachine = SlotQueueMachine.TestCase
TestSlotQueueMachine.settings = thorough(80)


def test_a_queue_hands_out_the_ends_of_what_was_given_back_longest_ago() -> None:
    pool = SlotQueue(6, _array([5, 0, 1, 2, 3, 4]))
    slots = pool.take(4)
    assert slots.tolist() == [5, 0, 1, 2]
    pool.move(slots[:3], FILLING, FREE)
    assert pool.take(5).tolist() == [3, 4, 1, 0, 5]


def test_a_fresh_pool_hands_out_ascending_slots() -> None:
    pool = SlotPool(5)
    assert pool.take(2).tolist() == [0, 1]
    assert pool.take(3).tolist() == [2, 3, 4]


def test_slots_given_back_are_handed_out_next_and_in_the_same_order() -> None:
    pool = SlotPool(6)
    slots = pool.take(4)
    pool.move(slots[1:3], FILLING, FREE)
    assert pool.take(3).tolist() == [1, 2, 4]


def test_taken_slots_are_a_copy() -> None:
    pool = SlotPool(3)
    taken = pool.take(3)
    pool.move(taken, FILLING, FREE)
    taken[:] = 7
    pool.check_invariants()
    assert pool.take(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_without_slots_is_refused(capacity: int) -> None:
    with pytest.raises(CapacityError, match=str(capacity)):
        SlotPool(capacity)
