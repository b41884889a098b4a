"""Checksums against xxhash over the bytes themselves, and generations."""

import numpy as np
import pytest
import xxhash

from offload.layout import BlockLayout, Region
from offload.seals import SAMPLE_EVERY, Seals, Verify

SLOT_BYTES = 24
CACHE = np.random.default_rng(1).integers(0, 256, 1024, dtype=np.uint8)
POOL = np.random.default_rng(2).integers(0, 256, 32 * SLOT_BYTES, dtype=np.uint8)
AT = CACHE.ctypes.data
LAYOUT = BlockLayout([Region(AT, 16, 16), Region(AT + 600, 12, 8)], POOL.ctypes.data)
IDS = np.array([3, 0, 30, 7])
OTHERS = np.array([1, 9, 4, 5])


def test_checksums_of_slots() -> None:
    seals = Seals(LAYOUT, 32)
    assert seals.seal(5, OTHERS, IDS) == 4
    expected = [
        xxhash.xxh3_64_intdigest(POOL[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].tobytes()) for slot in IDS
    ]
    assert seals._sums[IDS].tolist() == expected


def test_checksums_of_blocks_are_those_of_their_slots() -> None:
    seals = Seals(LAYOUT, 32, of_blocks=True)
    seals.seal(5, IDS, OTHERS)
    pieces = [
        CACHE[16 * i : 16 * (i + 1)].tobytes() + CACHE[600 + 12 * i : 608 + 12 * i].tobytes() for i in IDS
    ]
    assert seals._sums[OTHERS].tolist() == [xxhash.xxh3_64_intdigest(piece) for piece in pieces]


def test_a_seal_is_of_one_store_until_another_begins() -> None:
    seals = Seals(LAYOUT, 32)
    fills = np.full(4, 5)
    assert seals.num_current(IDS, fills) == 0
    seals.seal(5, OTHERS, IDS)
    assert seals.num_current(IDS, fills) == 4
    assert seals.num_current(IDS, np.array([5, 5, 6, 5])) == 2
    seals.unseal(IDS[1:2])
    assert seals.num_current(IDS, fills) == 1
    assert seals.num_current(IDS[:0], fills[:0]) == 0


@pytest.mark.parametrize("verify", Verify)
def test_what_is_looked_at(verify: Verify) -> None:
    seals = Seals(LAYOUT, 32, verify)
    every = np.arange(32)
    seals.seal(5, every, every)
    if verify is Verify.NEVER:
        assert not seals._sums.any(), "checksums nobody will look at were made"
        return
    seals._sums[20] ^= np.uint64(1)
    found = [seals.num_intact(every, every) for _ in range(SAMPLE_EVERY)]
    assert set(found) == {20, 32} if verify is Verify.SAMPLED else {20}
    assert found.count(20) == (1 if verify is Verify.SAMPLED else SAMPLE_EVERY)


def test_one_wrong_sample_makes_it_look_at_all() -> None:
    seals = Seals(LAYOUT, 32, Verify.SAMPLED)
    every = np.arange(32)
    seals.seal(5, every, every)
    seals._sums[[3, *range(16, 32)]] ^= np.uint64(1)
    assert seals.num_intact(every, every) == 3
