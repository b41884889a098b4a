"""An index of a region finds by name what a slow and obvious search finds."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import Kept
from offload.naming import BAG, ROOT, bag_name, rows
from offload.worker.pool.region_index import RegionIndex
from tests.strategies import thorough

DEPTH = 6


class Row(NamedTuple):
    """Of a slot: which of its chain's positions it is of, from 1 on, and which of the slots there."""

    depth: int
    number: int
    is_bag: bool
    generation: int


def name(depth: int) -> bytes:
    """Of a position of the one chain."""
    return ROOT if not depth else bytes([depth]) * 32


def index_of(found: list[Row], columns: int) -> RegionIndex:
    """Slots are numbered as they come."""
    slots = np.arange(len(found))
    names = rows([name(row.depth) for row in found]).reshape(-1, 32)
    parents = rows([ROOT if row.is_bag else name(row.depth - 1) for row in found]).reshape(-1, 32)
    marks = np.array([row.number | BAG * row.is_bag for row in found], dtype=np.int64)
    generations = np.array([row.generation for row in found], dtype=np.int64)
    return RegionIndex(Kept(slots, generations, names, parents, marks), slots.astype(np.uint64), columns)


def slots_of(found: list[Row], depth: int, number: int, *, is_bag: bool) -> set[int]:
    """The newest of that name: any of them where several are as new."""
    same = [slot for slot, row in enumerate(found) if row[:3] == (depth, number, is_bag)]
    newest = max((found[slot].generation for slot in same), default=0)
    return {slot for slot in same if found[slot].generation == newest}


def is_whole(found: list[Row], depth: int, columns: int) -> bool:
    """Whether all slots of the chain up to there are there."""
    return all(
        slots_of(found, each, column, is_bag=False)
        for each in range(1, depth + 1)
        for column in range(columns)
    )


ROWS = st.lists(st.builds(Row, st.integers(1, DEPTH), st.integers(0, 2), st.booleans(), st.integers(1, 4)))


@thorough(100)
@given(ROWS, st.integers(0, 3))
def test_it_agrees_with_a_search(found: list[Row], columns: int) -> None:
    found = [row for row in found if row.is_bag or row.number < columns]
    index = index_of(found, columns)
    for depth in range(1, DEPTH + 1):
        is_there = bool(columns) and is_whole(found, depth, columns)
        has_bag = bool(slots_of(found, depth, 0, is_bag=True)) and (is_there or not columns)
        named = rows([name(depth), bag_name(name(depth), 0)])
        assert index.has(named).tolist() == [is_there, has_bag]
        for size in range(1, 4):
            check(index.find(named[1], size, 0), [(depth, at, True) for at in range(size)], found, has_bag)
        for length in range(1, DEPTH + 1 if columns else 1):
            wanted = [
                (at, column, False)
                for at in range(depth - length + 1, depth + 1)
                for column in range(columns)
            ]
            for skip in range(len(wanted)):
                got = index.find(named[0], len(wanted) - skip, skip)
                check(got, wanted[skip:], found, is_there and length <= depth)


def check(got: object, wanted: list[tuple[int, int, bool]], found: list[Row], may_be: bool) -> None:
    """What was got is what was wanted, or nothing where some is missing."""
    there = [slots_of(found, depth, number, is_bag=is_bag) for depth, number, is_bag in wanted]
    if not (may_be and all(there)):
        assert got is None, f"{got} is not there"
        return
    assert got is not None, f"{wanted} are there"
    slots = got.slots.tolist()  # type: ignore[attr-defined]
    assert all(slot in each for slot, each in zip(slots, there, strict=True)), f"{slots} are not {there}"
    assert got.sums.tolist() == slots  # type: ignore[attr-defined]


def test_nothing_is_there() -> None:
    index = index_of([], 1)
    assert index.is_empty
    assert not index.has(rows([name(1)])).any()
    assert index.find(rows([name(1)])[0], 1, 0) is None
