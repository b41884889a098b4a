"""Chains cut into extents, and what those are called."""

import numpy as np
import pytest

from offload.messages import NAME_BYTES
from offload.naming import ROOT, rows
from offload.scheduler.tiers.names import Grid

CHAIN = [bytes([position + 1]) * NAME_BYTES for position in range(10)]


@pytest.mark.parametrize(("positions", "last"), [(1, list(range(10))), (4, [3, 7]), (10, [9]), (11, [])])
def test_an_extent_is_named_by_its_last_position(positions: int, last: list[int]) -> None:
    assert Grid.of(positions, 1).names(CHAIN) == [CHAIN[position] for position in last]


@pytest.mark.parametrize(("stop", "num_names"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 2)])
def test_what_is_behind_the_last_whole_one_has_none(stop: int, num_names: int) -> None:
    assert Grid.of(4, 1).names(CHAIN, stop) == [CHAIN[3], CHAIN[7]][:num_names]


def test_equal_beginnings_have_equal_names() -> None:
    other = [*CHAIN[:8], *(bytes([position]) * NAME_BYTES for position in range(70, 74))]
    mine, theirs = Grid.of(4, 1).names(CHAIN), Grid.of(4, 1).names(other)
    assert mine == theirs[:2] and len(theirs) == 3


def test_shorter_hashes_have_zeros_behind() -> None:
    short = [each[:16] for each in CHAIN]
    names = Grid.of(4, 1).names(short)
    assert names == [short[3] + bytes(16), short[7] + bytes(16)]
    assert rows(names).shape == (2, NAME_BYTES)


def test_a_row_is_a_name() -> None:
    names = Grid.of(2, 1).names(CHAIN)
    assert [row.tobytes() for row in rows(names)] == names
    assert rows([]).shape == (0, NAME_BYTES) and rows([]).dtype == np.uint8
    assert ROOT not in names
