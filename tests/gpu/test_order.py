"""Copies and the engine's own work on the GPU: what waits for what, and what does not."""

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import GPU_ROUTES, LOAD, STORE
from tests.gpu.cache import ONE_PIECE, PER_LAYER, Cache, ids, occupy_engine
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

NOTHING_SHOWN = "the engine's work ended too early: this run shows nothing"


@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER], ids=lambda layout: layout.name)
def test_a_store_copies_what_the_work_before_its_fence_writes_last(layout: KVCacheLayout) -> None:
    with Cache(torch.float16, 16, layout) as cache:
        cache.write(3, 0)
        for value in (17, 34, 51):  # a long forward pass that writes the block again and again
            written = occupy_engine(150)
            cache.write(3, value)
        written = occupy_engine(50)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, ids(3), ids(7))
        assert cache.engine.poll() == []
        assert not written.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert (end.job_id, end.num_good, end.error) == (1, 1, None)
        assert written.query(), "the store ended before the work that writes its source"
        assert (cache.pool[7] == 51).all()


def test_a_store_does_not_wait_for_work_behind_its_fence() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        before = cache.blocks()
        cache.engine.fence(STORE)
        behind = occupy_engine(500)
        cache.engine.submit(1, STORE, ids(3), ids(7))
        (end,) = cache.ended()
        assert end.error is None
        assert not behind.query(), "the store waited for work behind its fence"
        assert (cache.pool[7] == before[3]).all()


@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER], ids=lambda layout: layout.name)
def test_a_load_lands_after_the_work_before_its_fence(layout: KVCacheLayout) -> None:
    """Zeroing of its target blocks, which the engine enqueued earlier, must not overwrite it."""
    with Cache(torch.float16, 16, layout) as cache:
        occupy_engine(300)
        cache.write(3, 0)
        zeroed = torch.cuda.Event()
        zeroed.record(torch.cuda.current_stream())
        cache.engine.fence(LOAD)
        cache.load(1, ids(7), ids(3))
        assert cache.engine.poll() == []
        assert not zeroed.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert end.error is None
        assert (cache.blocks()[3] == cache.pool[7]).all()


def test_a_load_does_not_wait_for_the_forward_pass_behind_its_fence() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        cache.engine.fence(LOAD)
        forward = occupy_engine(500)
        cache.load(1, ids(7), ids(3))
        (end,) = cache.ended()
        assert end.error is None
        assert not forward.query(), "the load waited for the forward pass"
        assert (cache.blocks()[3] == cache.pool[7]).all()


def test_a_load_does_not_wait_for_stores() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        cache.engine.fence(LOAD)
        occupy_engine(500)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, ids(1, 2), ids(1, 2))
        cache.load(2, ids(7), ids(3))
        (first,) = cache.ended()
        assert first.job_id == 2
        (second,) = cache.ended()
        assert second.job_id == 1


def test_a_cancelled_load_ends_once_and_only_when_its_copies_have() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        busy = occupy_engine(300)
        cache.engine.fence(LOAD)
        cache.load(1, ids(7, 8), ids(3, 4))
        cache.engine.cancel(1)
        assert cache.engine.poll() == []
        assert not busy.query(), NOTHING_SHOWN
        (end,) = cache.ended()
        assert busy.query(), "the load was reported while it could still write"
        assert (end.job_id, end.num_good, end.error) == (1, 0, "cancelled")
        assert cache.engine.poll() == []


def test_closing_waits_for_the_copies() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        before = cache.blocks()
        occupy_engine(200)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, ids(3), ids(7))
        cache.engine.close(seconds=30)
        assert (cache.pool[7] == before[3]).all()
        cache.engine.close(seconds=30)


def test_the_engines_stream_stays_the_current_one() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        stream = torch.cuda.current_stream()
        for direction in GPU_ROUTES:
            cache.engine.fence(direction)
        cache.engine.submit(1, STORE, ids(3), ids(7))
        cache.load(2, ids(8), ids(4))
        assert torch.cuda.current_stream() == stream
        cache.copier.drain()
