"""Every path that this GPU offers brings the right bytes, and a trial at start picks among them."""

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import GPU_ROUTES, STORE
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
    rng = np.random.default_rng(4)
    with Cache(torch.bfloat16, 16, layout, num_blocks=600, copy=possible[name]) as cache:
        gpu, pool = cache.blocks(), cache.pool.copy()
        for job_id, count in enumerate((3, 400)):  # few, that no kernel is started for, and enough
            source, target = rng.permutation(600)[:count], rng.permutation(600)[:count]
            cache.engine.submit(2 * job_id, STORE, source, target)
            assert [end.error for end in cache.ended()] == [None]
            pool[target] = gpu[source]
            assert (cache.pool == pool).all()
            source, target = rng.permutation(600)[:count], rng.permutation(600)[:count]
            cache.load(2 * job_id + 1, source, target)
            assert [end.error for end in cache.ended()] == [None]
            gpu[target] = pool[source]
            assert (cache.blocks() == gpu).all()


def test_more_copies_than_one_call_takes() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD, num_blocks=4000) as cache:
        gpu, pool = cache.blocks(), cache.pool.copy()
        every_second = ids(*range(0, 4000, 2))  # 12,000 copies
        cache.engine.submit(1, STORE, every_second, every_second + 1)
        assert [end.error for end in cache.ended()] == [None]
        pool[every_second + 1] = gpu[every_second]
        assert (cache.pool == pool).all()


def test_a_kernel_behind_a_busy_stream_does_not_keep_the_caller_waiting() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD, num_blocks=4000) as cache:
        possible = possible_paths(cache.device, cache.layout)
    if KERNEL not in possible:
        pytest.skip("no kernel here: it needs Triton and host pointers that a kernel can use")
    with Cache(torch.bfloat16, 16, PER_HEAD, num_blocks=4000, copy=possible[KERNEL]) as cache:
        every_second = ids(*range(0, 4000, 2))
        for job_id in (1, 2):  # at first the kernel is compiled and its descriptors' memory is pinned
            busy = occupy_engine() if job_id == 2 else None
            cache.engine.fence(STORE)
            cache.engine.submit(job_id, STORE, every_second, every_second)
            assert busy is None or not busy.query()
            assert [end.error for end in cache.ended()] == [None]


def test_a_trial_picks_a_path_for_each_direction() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD) as cache:
        picked = pick_paths(cache.device, cache.layout, cache.num_blocks, cache.num_blocks)
        assert picked.keys() == set(GPU_ROUTES)
