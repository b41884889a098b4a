"""Rows of a table say what slots hold, or say nothing."""

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import EPOCH_SHIFT, Kept
from offload.worker.pool.table import SlotTable
from tests.strategies import thorough

SLOTS = 40
EPOCH = 3


def memory(num_slots: int = SLOTS) -> mmap.mmap:
    return mmap.mmap(-1, SlotTable.num_bytes(num_slots))


def names(*numbers: int) -> Any:
    return np.array([[number] * 32 for number in numbers], dtype=np.uint8)


def rows(*slots: int, job: int = 1) -> Kept:
    chosen = np.array(slots, dtype=np.int64)
    parents = names(*(slot // 2 for slot in slots)) if slots else names(1)[:0]
    own = names(*slots) if slots else names(1)[:0]
    return Kept(chosen, np.full(len(slots), EPOCH << EPOCH_SHIFT | job), own, parents, chosen * 3)


def filled(table: SlotTable, kept: Kept) -> None:
    """As a worker does it: the seal first."""
    table.seals.sums[kept.slots] = kept.slots.astype(np.uint64) * np.uint64(1 << 55)
    table.seals.fills[kept.slots] = kept.generations
    table.keep(kept)


def same(found: Kept, kept: Kept) -> bool:
    order = np.argsort(kept.slots)
    return all(np.array_equal(ours, theirs[order]) for ours, theirs in zip(found, kept, strict=True))


def test_what_was_kept_is_found_by_who_maps_it_next() -> None:
    shared, kept = memory(), rows(7, 3, 39)
    filled(SlotTable(shared, SLOTS, "me"), kept)
    table = SlotTable(shared, SLOTS, "me")
    assert same(table.kept(), kept)
    assert table.newest_epoch == EPOCH
    assert same(table.recover(), kept)
    assert np.flatnonzero(table.seals.fills >= 0).tolist() == [3, 7, 39]


def test_nothing_was_kept() -> None:
    table = SlotTable(memory(), SLOTS, "me")
    assert len(table.recover().slots) == 0
    assert (table.seals.fills == -1).all()
    assert table.newest_epoch == 0
    table.keep(rows())


def test_many_rows_at_once() -> None:
    kept = rows(*range(200))
    shared = memory(300)
    filled(SlotTable(shared, 300, "me"), kept)
    assert same(SlotTable(shared, 300, "me").recover(), kept)


def test_rows_of_others_say_nothing() -> None:
    shared = memory()
    filled(SlotTable(shared, SLOTS, "me"), rows(1, 2))
    assert len(SlotTable(shared, SLOTS, "you").kept().slots) == 0


def test_a_sealed_slot_that_was_not_kept_says_nothing() -> None:
    shared, kept = memory(), rows(1, 2)
    table = SlotTable(shared, SLOTS, "me")
    table.seals.fills[kept.slots] = kept.generations
    assert len(table.recover().slots) == 0
    assert (table.seals.fills == -1).all()


def test_what_other_bytes_have_taken_the_place_of_is_not_kept() -> None:
    """The scheduler's word is a step late: meanwhile another store has begun, or ended."""
    table = SlotTable(memory(), SLOTS, "me")
    first, second = rows(1, 2), rows(2, job=2)
    filled(table, first)
    table.seals.fills[2] = -1
    assert table.kept().slots.tolist() == [1]
    table.keep(first)
    assert table.kept().slots.tolist() == [1]
    table.seals.fills[2] = second.generations[0]
    table.keep(first)
    assert table.kept().slots.tolist() == [1]
    table.keep(second)
    assert table.kept().generations.tolist() == [first.generations[0], second.generations[0]]


@given(data=st.data())
@thorough(200)
def test_a_bit_that_flips_takes_its_row_away(data: st.DataObject) -> None:
    shared, kept = memory(), rows(*range(0, SLOTS, 2))
    table = SlotTable(shared, SLOTS, "me")
    filled(table, kept)
    at = data.draw(st.integers(0, len(shared) - 1))
    shared[at] ^= 1 << data.draw(st.integers(0, 7))
    left = SlotTable(shared, SLOTS, "me").kept()
    lost = set(kept.slots.tolist()) - set(left.slots.tolist())
    assert set(left.slots.tolist()) <= set(kept.slots.tolist()) and len(lost) <= 1
    assert same(left, kept.rows(~np.isin(kept.slots, list(lost))))


@pytest.mark.parametrize("columns", ["sums", "fills", "checks", "all"])
def test_rows_that_change_places_say_nothing(columns: str) -> None:
    table = SlotTable(memory(), SLOTS, "me")
    filled(table, rows(4, 5))
    arrays = {
        "sums": [table.seals.sums],
        "fills": [table.seals.fills],
        "checks": [table._checks],
        "all": [
            *(table.seals.sums, table.seals.fills, table._checks),
            *(table._marks, table._names, table._parents),
        ],
    }[columns]
    for array in arrays:
        array[[4, 6]] = array[[6, 4]]
    assert table.kept().slots.tolist() == [5]


@given(stop=st.integers(0, 6))
@thorough(20)
def test_a_kill_between_two_writes(stop: int) -> None:
    """Whatever has been written of a row, it says what was there, what is there, or nothing."""
    table = SlotTable(memory(), SLOTS, "me")
    first, second = rows(4), rows(4, job=2)._replace(names=names(99))
    filled(table, first)
    writes = [
        lambda: table.seals.fills.__setitem__(4, -1),
        lambda: table.seals.sums.__setitem__(4, 77),
        lambda: table.seals.fills.__setitem__(4, second.generations[0]),
        lambda: table._names.__setitem__(4, second.names.view(np.uint64)[0]),
        lambda: table._parents.__setitem__(4, second.parents.view(np.uint64)[0]),
        lambda: table._marks.__setitem__(4, second.marks[0]),
    ]
    for write in writes[:stop]:
        write()
    found = table.recover()
    assert same(found, first if stop == 0 else rows())
