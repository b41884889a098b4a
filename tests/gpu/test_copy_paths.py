"""Every path that this GPU offers brings the right bytes, and a trial at start picks among them."""

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.copiers import Direction
from offload.vllm.copy_paths import COPY_ENGINE, KERNEL, pick_paths, possible_paths
from tests.gpu.cache import ONE_PIECE, PER_HEAD, PER_LAYER, Cache, ids, occupy_engine
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", [COPY_ENGINE, KERNEL])
@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
def test_a_path_brings_the_right_bytes(layout: KVCacheLayout, name: str) -> None:
    with Cache(torch.bfloat16, 16, layout) as cache:
        possible = possible_paths(cache.device, cache.layout)
    if name not in possible:
        pytest.skip(f"no {name} here: it needs Triton and host pointers that a kernel can use")
    with Cache(torch.bfloat16, 16, layout, copy=possible[name]) as cache:
        gpu, pool = cache.blocks(), cache.pool.copy()
        cache.engine.store(1, ids(5, 6, 2, 17), ids(1, 2, 0, 20))
        assert [end.error for end in cache.ended()] == [None]
        pool[ids(1, 2, 0, 20)] = gpu[ids(5, 6, 2, 17)]
        assert (cache.pool == pool).all()
        cache.load(2, ids(9, 20, 8), ids(3, 4, 11))
        assert [end.error for end in cache.ended()] == [None]
        gpu[ids(3, 4, 11)] = pool[ids(9, 20, 8)]
        assert (cache.blocks() == gpu).all()


def test_a_kernel_behind_a_busy_stream_does_not_keep_the_caller_waiting() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD, num_blocks=4000) as cache:
        possible = possible_paths(cache.device, cache.layout)
    if KERNEL not in possible:
        pytest.skip("no kernel here: it needs Triton and host pointers that a kernel can use")
    with Cache(torch.bfloat16, 16, PER_HEAD, num_blocks=4000, copy=possible[KERNEL]) as cache:
        every_second = ids(*range(0, 4000, 2))
        for job_id in (1, 2):  # at first the kernel is compiled and its descriptors' memory is pinned
            busy = occupy_engine() if job_id == 2 else None
            cache.engine.fence(Direction.STORE)
            cache.engine.store(job_id, every_second, every_second)
            assert busy is None or not busy.query()
            assert [end.error for end in cache.ended()] == [None]


def test_a_trial_picks_a_path_for_each_direction() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD) as cache:
        picked = pick_paths(cache.device, cache.layout, cache.num_blocks, cache.num_blocks)
        assert picked.keys() == set(Direction)
