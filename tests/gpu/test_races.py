"""Kernels that are still writing while copies run: what fences prevent, and that without them it shows.

A kernel that writes its target again and again, and its last bytes only at its end, makes every copy that
comes too early a wrong one.
"""

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import LOAD, STORE
from tests.gpu.cache import ONE_PIECE, PER_HEAD, PER_LAYER, Cache, ids
from tests.gpu.kernels import keep_writing
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

LAYOUTS = pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
LAST = 0xA5
NOTHING_SHOWN = "the kernel ended too early: this run shows nothing"


@LAYOUTS
def test_a_store_waits_until_its_source_is_written(layout: KVCacheLayout) -> None:
    with Cache(torch.float16, 16, layout) as cache:
        written = keep_writing(cache.raw, 300, LAST)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, ids(3, 4, 9), ids(7, 8, 0))
        assert not written.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert end.error is None
        assert written.query(), "the store ended before the kernel that writes its source"
        assert (cache.pool[[7, 8, 0]] == LAST).all()


def test_without_a_fence_a_store_takes_what_is_half_written() -> None:
    """So the test above is not blind."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        written = keep_writing(cache.raw, 500, LAST)
        cache.engine.submit(1, STORE, ids(3), ids(7))
        (end,) = cache.ended()
        assert not written.query(), NOTHING_SHOWN
        assert end.error is None, "nobody can tell"
        assert not (cache.pool[7] == LAST).all()


@LAYOUTS
def test_a_load_waits_until_nobody_writes_its_target(layout: KVCacheLayout) -> None:
    with Cache(torch.float16, 16, layout) as cache:
        written = keep_writing(cache.raw, 300, LAST)
        cache.engine.fence(LOAD)
        cache.load(1, ids(7, 8), ids(3, 12))
        assert not written.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert end.error is None
        blocks = cache.blocks()
        assert np.array_equal(blocks[[3, 12]], cache.pool[[7, 8]])
        assert (np.delete(blocks, [3, 12], axis=0) == LAST).all()


def test_without_a_fence_a_load_is_overwritten() -> None:
    """So the test above is not blind."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        written = keep_writing(cache.raw, 500, LAST)
        cache.load(1, ids(7), ids(3))
        (end,) = cache.ended()
        assert not written.query(), NOTHING_SHOWN
        assert end.error is None, "nobody can tell"
        assert (cache.blocks()[3] == LAST).all()


def test_a_load_does_not_touch_what_a_kernel_is_writing_beside_it() -> None:
    """The forward pass behind the fence writes other blocks than the load, at the same time."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        cache.engine.fence(LOAD)
        written = keep_writing(cache.piece(5), 300, LAST)
        cache.load(1, ids(7, 8), ids(4, 6))
        (end,) = cache.ended()
        assert end.error is None
        assert not written.query(), "the load waited for the forward pass"
        blocks = cache.blocks()
        assert np.array_equal(blocks[[4, 6]], cache.pool[[7, 8]])
        assert (blocks[5] == LAST).all()


def test_fences_are_of_the_stream_that_the_engine_computes_on() -> None:
    """vLLM computes on a stream of its own, which does not wait for the default one nor it for that."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        with torch.cuda.stream(torch.cuda.Stream(cache.device)):
            written = keep_writing(cache.piece(3), 300, LAST)
            cache.engine.fence(STORE)
            cache.engine.submit(1, STORE, ids(3), ids(7))
        assert not written.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert end.error is None
        assert (cache.pool[7] == LAST).all()


def test_every_round_of_a_busy_engine_stores_its_own_bytes() -> None:
    """Blocks are written anew as soon as their store has ended, as holds allow, and never sooner.

    Meanwhile loads come up beside, and all three streams have work all the time.
    """
    num_rounds, ring = 48, 6
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        source = cache.pool[23].copy()
        cache.seals.seal(9, ids(23), ids(23))
        stores: dict[int, int] = {}
        loaded = 0
        for number in range(num_rounds):
            block_id = number % ring
            while number - ring in stores:  # its store holds the block
                for end in cache.ended():
                    assert end.error is None
                    if end.route == STORE:
                        slot = stores.pop(end.job_id)
                        assert (cache.pool[slot] == 1 + end.job_id).all()
                    else:
                        loaded += 1
            cache.engine.fence(LOAD)
            cache.engine.submit(1000 + number, LOAD, ids(23), ids(ring + block_id), ids(9))
            keep_writing(cache.piece(block_id), 2, 1 + number)
            cache.engine.fence(STORE)
            cache.engine.submit(number, STORE, ids(block_id), ids(block_id))
            stores[number] = block_id
        while len(cache.engine):
            for end in cache.ended():
                assert end.error is None
                if end.route == STORE:
                    assert (cache.pool[stores.pop(end.job_id)] == 1 + end.job_id).all()
                else:
                    loaded += 1
        assert not stores
        assert loaded == num_rounds
        assert (cache.blocks()[ring : 2 * ring] == source).all()


def test_a_slot_is_filled_by_one_store_after_another() -> None:
    """Stores of one slot keep their order: they are of one stream. The older one's bytes are not believed."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        for job_id in range(1, 9):
            keep_writing(cache.piece(job_id), 5, job_id)
            cache.engine.fence(STORE)
            cache.engine.submit(job_id, STORE, ids(job_id), ids(7))
        ends = []
        while len(cache.engine):
            ends += cache.ended()
        assert [end.job_id for end in ends] == list(range(1, 9))
        assert (cache.pool[7] == 8).all()
        cache.engine.submit(20, LOAD, ids(7), ids(15), ids(7))
        (end,) = cache.ended()
        assert end.num_good == 0
        assert end.error == "its slots were filled by other stores"
