"""Checksums against xxhash over the bytes themselves, and generations."""

import numpy as np
import pytest
import xxhash

from offload.config import Verify
from offload.messages import Ids
from offload.worker.layout import BlockLayout, Region
from offload.worker.seals import SAMPLE_EVERY, Checksums, Seals

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


@pytest.mark.parametrize("of_blocks", [False, True])
def test_every_byte_counts_and_no_other(of_blocks: bool) -> None:
    """Of a slot, or of the pieces of a block."""
    cache, pool = CACHE.copy(), POOL.copy()
    at = cache.ctypes.data
    layout = BlockLayout([Region(at, 16, 16), Region(at + 600, 12, 8)], pool.ctypes.data)
    seals = Seals(layout, 32, of_blocks=of_blocks)
    seals.seal(5, OTHERS, IDS)
    first_bad = {}
    for position, (block, slot) in enumerate(zip(OTHERS, IDS, strict=True)):
        mine = [*range(16 * block, 16 * block + 16), *range(600 + 12 * block, 608 + 12 * block)]
        if not of_blocks:
            mine = [*range(SLOT_BYTES * slot, SLOT_BYTES * (slot + 1))]
        first_bad |= dict.fromkeys(mine, position)
    memory = cache if of_blocks else pool
    for byte in range(len(memory)):
        memory[byte] ^= 1
        assert seals.num_intact(OTHERS, IDS) == first_bad.get(byte, 4)
        memory[byte] ^= 1


@pytest.mark.parametrize("size", [1, 3, 16, 17, 40])
def test_a_sample_is_of_one_in_sixteen_and_all_take_their_turn(size: int) -> None:
    layout = BlockLayout([Region(0, 4, 4)], np.zeros(4 * size, dtype=np.uint8).ctypes.data)
    looked_at = np.zeros(size, dtype=int)

    class Looking(Seals):
        def _checksums(self, block_ids: Ids, slots: Ids) -> Checksums:
            assert len(slots) <= max(1, -(-size // SAMPLE_EVERY))
            looked_at[slots] += 1
            return self._sums[slots]

    seals = Looking(layout, size, Verify.SAMPLED)
    every = np.arange(size)
    for _ in range(SAMPLE_EVERY):
        assert seals.num_intact(every, every) == size
    assert looked_at.min() >= 1
    if size >= SAMPLE_EVERY:
        assert (looked_at == 1).all()
