"""Checksums of many records are those that the library computes of each."""

import numpy as np
import pytest
import xxhash

from offload.files.checksums import xxh64_rows


@pytest.mark.parametrize("width", range(1, 18))
@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_they_are_those_of_the_library(width: int, seed: int) -> None:
    words = np.random.default_rng(width).integers(0, 1 << 64, (200, width), dtype=np.uint64)
    words[0], words[1] = 0, (1 << 64) - 1
    expected = [xxhash.xxh64_intdigest(row.tobytes(), seed) for row in words]
    assert xxh64_rows(words, seed).tolist() == expected


def test_any_number_of_rows() -> None:
    words = np.arange(3 * 40_000, dtype=np.uint64).reshape(-1, 3)
    sums = xxh64_rows(words, 7)
    for row in (0, 16383, 16384, 39_999):
        assert sums[row] == xxhash.xxh64_intdigest(words[row].tobytes(), 7)
    assert len(xxh64_rows(words[:0], 7)) == 0
