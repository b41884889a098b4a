"""What a pool holds is found by name as a slow and obvious search finds it, while slots are filled anew."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import Kept
from offload.naming import BAG, ROOT, bag_name, rows
from offload.worker.peers.cells import Cells
from offload.worker.peers.holdings import Holdings
from offload.worker.seals import BROKEN, SealTables
from tests.strategies import thorough

SLOTS, DEPTH = 24, 5


class Row(NamedTuple):
    """Of a slot: which position of the one chain it is of, from 1 on, and which of the slots there."""

    depth: int
    number: int
    is_bag: bool


class Fill(NamedTuple):
    """A slot is filled; it is told, or it is not."""

    slot: int
    row: Row
    is_told: bool


def name(depth: int) -> bytes:
    return ROOT if not depth else bytes([depth]) * 32


ROWS = st.builds(Row, st.integers(1, DEPTH), st.integers(0, 2), st.booleans())
FILLS = st.lists(
    st.lists(st.builds(Fill, st.integers(0, SLOTS - 1), ROWS, st.booleans()), min_size=1, max_size=9),
    max_size=9,
)


class Model:
    """Rows by slot, and the same in the product."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.tables = SealTables.of_one(SLOTS)
        self.holdings = Holdings(self.tables, columns)
        self.rows: dict[int, Row] = {}

    def fill(self, fills: list[Fill], job_id: int) -> None:
        """One store: each slot at most once."""
        fills = list({fill.slot: fill for fill in fills}.values())
        fills = [fill for fill in fills if fill.row.is_bag or fill.row.number < self.columns]
        slots = np.array([fill.slot for fill in fills], dtype=np.int64)
        self.tables.fills[slots] = job_id
        self.tables.sums[slots] = slots + 1000 * job_id
        told = [fill for fill in fills if fill.is_told]
        self.holdings.keep(
            Kept(
                np.array([fill.slot for fill in told], dtype=np.int64),
                np.full(len(told), job_id, dtype=np.int64),
                rows([name(fill.row.depth) for fill in told]),
                rows([ROOT if fill.row.is_bag else name(fill.row.depth - 1) for fill in told]),
                np.array([fill.row.number | BAG * fill.row.is_bag for fill in told], dtype=np.int64),
            )
        )
        for fill in fills:
            self.rows.pop(fill.slot, None)
        self.rows.update({fill.slot: fill.row for fill in told})

    def has(self, depth: int, number: int, *, is_bag: bool) -> bool:
        return Row(depth, number, is_bag) in self.rows.values()

    def has_position(self, depth: int) -> bool:
        return bool(self.columns) and all(
            self.has(depth, column, is_bag=False) for column in range(self.columns)
        )

    def wanted(self, depth: int, count: int, *, is_bag: bool) -> list[Row]:
        """Slots of an extent of so many that ends there."""
        if is_bag:
            return [Row(depth, number, True) for number in range(count)]
        first = depth - count // self.columns + 1
        return [Row(at, column, False) for at in range(first, depth + 1) for column in range(self.columns)]

    def check(self) -> None:
        self.holdings.check_invariants()
        for depth in range(1, DEPTH + 1):
            is_there = self.has_position(depth)
            has_bag = self.has(depth, 0, is_bag=True) and (is_there or not self.columns)
            named = rows([name(depth), bag_name(name(depth), 0)])
            if self.columns:
                assert self.holdings.has(named).tolist() == [is_there, has_bag]
            else:
                assert self.holdings.has(named).tolist()[1] == has_bag
            for count in (1, 2, 3):
                self.check_found(named[1:], count, self.wanted(depth, count, is_bag=True))
            for length in range(1, depth + 1) if self.columns else ():
                wanted = self.wanted(depth, length * self.columns, is_bag=False)
                self.check_found(named[:1], len(wanted), wanted)

    def check_found(self, called: np.ndarray, count: int, wanted: list[Row]) -> None:
        for skip in range(count):
            held = self.holdings.find(called, [count - skip], [skip])
            may = all(row in self.rows.values() for row in wanted[skip:])
            last = wanted[-1] if not wanted[-1].is_bag else wanted[0]
            walked = all(  # an extent is known by the first slot of its last position, and so on back
                Row(row.depth, 0, row.is_bag) in self.rows.values()
                for row in wanted
                if row.depth > wanted[skip].depth or row.depth == last.depth
            )
            assert held.num_extents == int(may and walked), (wanted, skip, self.rows)
            if held.num_extents:
                slots = held.rows.slots.tolist()
                assert [self.rows[slot] for slot in slots] == wanted[skip:]
                assert held.rows.sums.tolist() == self.tables.sums[slots].tolist()
                assert self.holdings.are_current(held.rows).all()


@thorough(60)
@given(FILLS, st.integers(0, 2))
def test_it_agrees_with_a_search(stores: list[list[Fill]], columns: int) -> None:
    model = Model(columns)
    for job_id, fills in enumerate(stores, start=1):
        model.fill(fills, job_id)
        model.check()
    model.holdings.clear()
    model.rows = {}
    model.check()


def random_names(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


def test_it_holds_as_many_names_as_there_are_slots_however_often_they_change() -> None:
    """So the cells are made anew now and then, and nothing gets lost by that."""
    rng, num_slots = np.random.default_rng(3), 2048
    tables = SealTables.of_one(num_slots)
    holdings = Holdings(tables, 1)
    called = np.zeros((num_slots, 32), dtype=np.uint8)
    for job_id in range(60):
        slots = rng.choice(num_slots, int(rng.integers(1, num_slots)), replace=False)
        called[slots] = random_names(rng, len(slots))
        tables.fills[slots] = job_id
        marks = np.zeros(len(slots), dtype=np.int64)
        holdings.keep(
            Kept(slots, np.full(len(slots), job_id), called[slots], np.zeros_like(called[slots]), marks)
        )
        filled = np.flatnonzero(tables.fills != BROKEN)
        held = holdings.find(called[filled], [1] * len(filled), [0] * len(filled))
        assert held.rows.slots.tolist() == filled.tolist()
        assert not holdings.has(random_names(rng, 50)).any()
    holdings.check_invariants()


def test_a_slot_that_is_being_filled_is_not_told_and_what_was_found_is_known_to_be_old() -> None:
    tables = SealTables.of_one(4)
    holdings = Holdings(tables, 1)
    tables.fills[:] = 7
    called, marks = random_names(np.random.default_rng(0), 4), np.zeros(4, dtype=np.int64)
    holdings.keep(Kept(np.arange(4), np.full(4, 7), called, np.zeros_like(called), marks))
    held = holdings.find(called, [1] * 4, [0] * 4)
    tables.fills[2] = BROKEN
    assert holdings.are_current(held.rows).tolist() == [True, True, False, True]
    assert holdings.find(called, [1] * 4, [0] * 4).num_extents == 2
    tables.fills[2] = 8
    assert holdings.has(called).tolist() == [True, True, False, True]


def test_rows_of_a_store_that_others_have_overwritten_are_passed_over() -> None:
    tables = SealTables.of_one(2)
    holdings = Holdings(tables, 1)
    tables.fills[:] = (5, 6)
    called, marks = random_names(np.random.default_rng(0), 2), np.zeros(2, dtype=np.int64)
    holdings.keep(Kept(np.arange(2), np.full(2, 5), called, np.zeros_like(called), marks))
    assert holdings.has(called).tolist() == [True, False]


@pytest.mark.timeout(60)
def test_a_small_pool_that_is_filled_anew_again_and_again_never_has_all_cells_taken() -> None:
    """A search ends at an empty one."""
    rng, slots = np.random.default_rng(2), np.arange(8)
    tables = SealTables.of_one(len(slots))
    holdings = Holdings(tables, 1)
    for generation in range(1, 1000):
        tables.fills[:] = generation
        called, zeros = random_names(rng, len(slots)), np.zeros(len(slots), dtype=np.int64)
        holdings.keep(Kept(slots, zeros + generation, called, np.zeros_like(called), zeros))
        assert holdings.has(called).all()
    holdings.check_invariants()


def test_names_with_one_hash_are_told_apart() -> None:
    """Whoever knew the salt could choose such names."""

    class Same(Cells):
        def _hashed(self, words: np.ndarray) -> np.ndarray:
            return np.full(len(words), 5, dtype=np.uint64)

    called = random_names(np.random.default_rng(1), 300).view(np.uint64)
    cells = Same(called, 0)
    for slot in range(200):
        cells.add(np.array([slot]))
    cells.add(np.arange(200, 300))
    cells.check_invariants()
    found = cells.find(called.view(np.uint8), lambda slots: slots >= 0)
    assert found.tolist() == list(range(300))
