"""The arithmetic of copies, beside a model that goes block by block and byte by byte."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.worker.layout import BlockLayout, CopyBatch, Region
from tests.strategies import thorough

POOL = 1 << 40
"""Address of slot 0; far from any GPU address."""


class Case(NamedTuple):
    """A layout and the blocks and slots to copy between."""

    regions: list[Region]
    slots_per_registration: int | None
    block_ids: list[int]
    slots: list[int]

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.regions, POOL, slots_per_registration=self.slots_per_registration)

    @property
    def slot_bytes(self) -> int:
        return sum(region.piece_bytes for region in self.regions)

    def blockwise(self) -> list[list[tuple[int, int]]]:
        """Per block, (GPU address, pool address) of each of its bytes, in the order of the slot."""
        blocks = []
        for block_id, slot in zip(self.block_ids, self.slots, strict=True):
            gpu = [
                region.address + block_id * region.block_stride + offset
                for region in self.regions
                for offset in range(region.piece_bytes)
            ]
            pool = POOL + slot * self.slot_bytes
            blocks.append(list(zip(gpu, range(pool, pool + self.slot_bytes), strict=True)))
        return blocks


@st.composite
def regions(draw: st.DrawFn) -> list[Region]:
    """One packed piece per block, one with a gap behind it, or one piece for each of several layers."""
    pieces = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    gaps = draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(pieces), max_size=len(pieces)))
    return [
        Region(1000 * (number + 1), piece + gap, piece)
        for number, (piece, gap) in enumerate(zip(pieces, gaps, strict=True))
    ]


def ids(size: int) -> st.SearchStrategy[list[int]]:
    """Different ids, in runs as allocators hand them out, or in any order."""
    runs = st.integers(0, 12).map(lambda first: list(range(first, first + size)))
    return st.one_of(runs, st.permutations(range(16)).map(lambda order: list(order[:size])))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(0, 10))
    fence = draw(st.sampled_from([None, 1, 2, 3, 100]))
    return Case(draw(regions()), fence, draw(ids(size)), draw(ids(size)))


@given(cases())
@thorough(300)
def test_copies_are_the_blocks_bytes_in_order(case: Case) -> None:
    expected = [pair for block in case.blockwise() for pair in block]
    stored = case.layout.store(_array(case.block_ids), _array(case.slots))
    loaded = case.layout.load(_array(case.slots), _array(case.block_ids))
    assert _bytes_of(stored) == expected
    assert [(target, source) for source, target in _bytes_of(loaded)] == expected


@given(cases())
@thorough(200)
def test_batches_are_columns_of_equal_length_that_a_copier_can_hand_on(case: Case) -> None:
    batch = case.layout.store(_array(case.block_ids), _array(case.slots))
    for column in batch:
        assert column.dtype == np.int64
        assert column.shape == batch.sizes.shape
        assert column.flags.c_contiguous and column.flags.writeable
    assert (batch.sizes > 0).all()


@given(cases())
@thorough(200)
def test_no_copy_spans_two_registrations(case: Case) -> None:
    if case.slots_per_registration is None:
        return
    registration = case.slots_per_registration * case.slot_bytes
    batch = case.layout.store(_array(case.block_ids), _array(case.slots))
    first = (batch.targets - POOL) // registration
    last = (batch.targets + batch.sizes - 1 - POOL) // registration
    assert np.array_equal(first, last)


@given(cases())
@thorough(200)
def test_whole_blocks_of_every_prefix(case: Case) -> None:
    layout = case.layout
    batch = layout.store(_array(case.block_ids), _array(case.slots))
    for num_copies in range(len(batch.sizes) + 1):
        moved = len(_bytes_of(CopyBatch(*(column[:num_copies] for column in batch))))
        complete = 0
        for block in case.blockwise():
            moved -= len(block)
            complete += moved >= 0
        assert layout.whole_blocks(batch, num_copies) == complete


@given(cases())
@thorough(200)
def test_neighbours_merge_where_blocks_are_one_piece(case: Case) -> None:
    num_blocks = len(case.block_ids)
    num_copies = len(case.layout.store(_array(case.block_ids), _array(case.slots)).sizes)
    (first, *others) = case.regions
    if others or first.block_stride != first.piece_bytes:
        assert num_copies == num_blocks * len(case.regions)
        return
    fence = case.slots_per_registration or 1 << 30
    runs = sum(
        block_id + 1 != next_id or slot + 1 != next_slot or slot // fence != next_slot // fence
        for (block_id, slot), (next_id, next_slot) in pairwise(zip(case.block_ids, case.slots, strict=True))
    )
    assert num_copies == (runs + 1 if num_blocks else 0)


@pytest.mark.parametrize("pieces", [[8], [3, 5]])
def test_a_slot_holds_all_pieces_of_a_block(pieces: list[int]) -> None:
    regions = [Region(100 * number, piece, piece) for number, piece in enumerate(pieces)]
    assert BlockLayout(regions, POOL).slot_bytes == 8


def test_addresses_beyond_32_bits() -> None:
    layout = BlockLayout([Region(1 << 45, 1 << 22, 1 << 22)], 1 << 46)
    batch = layout.store(_array([1_000_000]), _array([2_000_000]))
    assert batch.sources.tolist() == [(1 << 45) + (1_000_000 << 22)]
    assert batch.targets.tolist() == [(1 << 46) + (2_000_000 << 22)]


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def _bytes_of(batch: CopyBatch) -> list[tuple[int, int]]:
    """(source, target) address of every byte, in the order of the copies."""
    return [
        (source + offset, target + offset)
        for source, target, size in zip(*(column.tolist() for column in batch), strict=True)
        for offset in range(size)
    ]
