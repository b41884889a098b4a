"""Prefix hashes: golden digests, chaining, salt, and what is refused."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from allocator import ChainError, hash_chain
from tests.strategies import thorough

GOLDEN = [
    "f3edf4a85182e178bd160734e9d3c692",
    "253b5e2d31cb25b08e49ec89af37e1aa",
    "d3d0438268e60ac7c32220e22e65fdcd",
]
GOLDEN_SALTED = ["fe51a3bbaf76a13d8555ce4f1b7d0215", "6663405b65ef17a4f9335b5ddf62f50a"]

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
BLOCK_SIZES = st.integers(1, 6)


def test_digests_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert [each.hex() for each in hash_chain(range(12), 4)] == GOLDEN
    assert [each.hex() for each in hash_chain(range(8), 4, salt=b"tenant")] == GOLDEN_SALTED


@given(TOKENS, BLOCK_SIZES, st.binary(max_size=4))
@thorough(100)
def test_each_block_is_hashed_behind_the_hash_before_it(tokens: list[int], size: int, salt: bytes) -> None:
    chain = []
    parent = xxhash.xxh3_128_digest(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = xxhash.xxh3_128_digest(parent + struct.pack(f"<{size}I", *tokens[start : start + size]))
        chain.append(parent)
    assert hash_chain(tokens, size, salt=salt) == chain


@given(TOKENS, TOKENS, BLOCK_SIZES)
@thorough(100)
def test_equal_hashes_mean_equal_tokens_from_the_first_on(
    one: list[int], other: list[int], size: int
) -> None:
    for start in range(len(one)):  # the same tokens at the end, whatever came before
        chains = hash_chain(one, size), hash_chain(other + one[start:], size)
        for position, hashes in enumerate(zip(*chains, strict=False)):
            stop = (position + 1) * size
            assert (hashes[0] == hashes[1]) == (one[:stop] == (other + one[start:])[:stop])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_the_kind_of_array_does_not_matter(dtype: type[np.integer]) -> None:
    assert hash_chain(np.arange(12, dtype=dtype), 4) == hash_chain(tuple(range(12)), 4)
    assert hash_chain(np.arange(24, dtype=dtype)[::2], 4) == hash_chain(range(0, 24, 2), 4)


def test_a_partial_block_has_no_hash() -> None:
    assert hash_chain(range(11), 4) == hash_chain(range(8), 4)
    assert hash_chain(range(3), 4) == hash_chain([], 4) == []


def test_salts_keep_chains_apart() -> None:
    chains = [hash_chain(range(8), 4, salt=salt) for salt in (b"", b"a", b"b")]
    assert len({each for chain in chains for each in chain}) == 6


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ChainError, match=f"block_size is {block_size}"):
        hash_chain([1, 2], block_size)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, -1], "-1"),
        ([0, 2**32], str(2**32)),
        ([0, 2**70], "one row of integers"),
        ([0.0, 1.0], "float64"),
        ([True, False], "bool"),
        (["a"], "one row of integers"),
        ([[1, 2], [3, 4]], r"\(2, 2\)"),
    ],
)
def test_tokens_are_one_row_of_integers_in_range(tokens: list[int], message: str) -> None:
    with pytest.raises(ChainError, match=message):
        hash_chain(tokens, 1)
