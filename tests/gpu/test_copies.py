"""Known bytes between a GPU and pinned memory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import LOAD, STORE
from offload.worker.jobs import TransferEnd
from tests.gpu.cache import ONE_PIECE, PER_HEAD, PER_LAYER, Bytes, Cache, ids
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
def test_bytes_go_down_and_come_up(dtype: torch.dtype, block_size: int, layout: KVCacheLayout) -> None:
    order = np.random.default_rng(3).permutation(24).astype(np.int64)
    with Cache(dtype, block_size, layout) as cache:
        blocks, pool = cache.blocks(), cache.pool.copy()
        stored, into = ids(5, 6, 7, 8, 0, 23), ids(2, 3, 4, 10, 11, 23)
        cache.engine.submit(1, STORE, stored, into)
        assert settled(cache) == {1: (6, None)}
        pool[into] = blocks[stored]
        assert np.array_equal(cache.pool, pool), "a store moved other bytes, or not all of its own"
        assert np.array_equal(cache.blocks(), blocks), "a store changed its source"

        cache.load(2, order[:12], order[12:])
        assert settled(cache) == {2: (12, None)}
        blocks[order[12:]] = pool[order[:12]]
        assert np.array_equal(cache.blocks(), blocks), "a load moved other bytes, or not all of its own"
        assert np.array_equal(cache.pool, pool), "a load changed its source"


PATTERNS: dict[str, Callable[[int], Bytes]] = {
    "zeros": lambda size: np.zeros(size, dtype=np.uint8),
    "ones": lambda size: np.full(size, 0xFF, dtype=np.uint8),
    "not a number": lambda size: np.resize(np.array([0x01, 0x7F, 0xC1, 0xFF], dtype=np.uint8), size),
    "addresses": lambda size: np.arange(0, size, 4, dtype=np.uint32).view(np.uint8)[:size],
}
"""Bytes that a copy by elements, or one that is off by a little, would not keep as they are."""


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
def test_what_was_stored_comes_back_to_other_blocks(pattern: str, layout: KVCacheLayout) -> None:
    """Down, sealed, overwritten on the GPU, checked, and up again."""
    with Cache(torch.bfloat16, 16, layout) as cache:
        written = PATTERNS[pattern](cache.raw.numel())
        cache.raw.copy_(torch.from_numpy(written))
        before = cache.blocks()
        source, slots, target = ids(0, 1, 2, 9, 23), ids(4, 5, 6, 0, 23), ids(23, 7, 8, 0, 1)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, source, slots)
        assert settled(cache) == {1: (5, None)}
        cache.raw.fill_(0xA5)
        cache.engine.fence(LOAD)
        cache.engine.submit(2, LOAD, slots, target, np.ones_like(slots))
        assert settled(cache) == {2: (5, None)}
        expected = np.full_like(before, 0xA5)
        expected[target] = before[source]
        assert np.array_equal(cache.blocks(), expected)


def test_bytes_that_changed_in_the_pool_are_not_believed() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        cache.engine.submit(1, STORE, ids(3, 4, 5), ids(0, 1, 2))
        assert settled(cache) == {1: (3, None)}
        cache.pool[1, 77] ^= 1
        cache.engine.submit(2, LOAD, ids(0, 1, 2), ids(6, 7, 8), ids(1, 1, 1))
        ((num_blocks, error),) = settled(cache).values()
        assert num_blocks == 1
        assert error is not None
        assert "block 1" in error


@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER], ids=lambda layout: layout.name)
def test_a_run_of_slots_over_many_registrations(layout: KVCacheLayout) -> None:
    """No copy may span two registrations; with one slot in each, every border is met."""
    with Cache(torch.float16, 16, layout, max_registration_bytes=1) as cache:
        assert cache.memory.slots_per_registration < cache.num_blocks
        blocks = cache.blocks()
        everything = np.arange(cache.num_blocks, dtype=np.int64)
        cache.engine.submit(1, STORE, everything, everything)
        assert settled(cache) == {1: (cache.num_blocks, None)}
        assert np.array_equal(cache.pool, blocks)


def test_many_jobs_at_once_end_once_each() -> None:
    order = np.random.default_rng(4).permutation(24).astype(np.int64)
    with Cache(torch.bfloat16, 16, ONE_PIECE) as cache:
        blocks, pool = cache.blocks(), cache.pool.copy()
        pairs = order.reshape(12, 2)  # jobs with an even number store their pair, the others load it
        for job_id, pair in enumerate(pairs):
            if job_id % 2:
                cache.load(job_id, pair, pair)
            else:
                cache.engine.submit(job_id, STORE, pair, pair)
        assert settled(cache) == dict.fromkeys(range(12), (2, None))
        assert len(cache.engine) == 0
        assert cache.engine.poll() == []
        down, up = pairs[::2].ravel(), pairs[1::2].ravel()
        expected_pool, expected_blocks = pool.copy(), blocks.copy()
        expected_pool[down], expected_blocks[up] = blocks[down], pool[up]
        assert np.array_equal(cache.pool, expected_pool)
        assert np.array_equal(cache.blocks(), expected_blocks)


def test_a_job_without_blocks_ends() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        cache.engine.submit(1, STORE, ids(), ids())
        assert settled(cache) == {1: (0, None)}


def settled(cache: Cache) -> dict[int, tuple[int, str | None]]:
    """Wait for all jobs, those that are held back too; how each ended."""
    ends: list[TransferEnd] = []
    while len(cache.engine):
        cache.copier.drain()
        ends += cache.engine.poll()
    return {end.job_id: (end.num_good, end.error) for end in ends}
