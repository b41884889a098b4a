"""Cancellations, no memory left, and a device that breaks: jobs end, and the process goes on."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import LOAD, STORE
from offload.worker.jobs import CANCELLED, TransferEnd
from tests.gpu.cache import ONE_PIECE, PER_LAYER, Cache, ids, occupy_engine
from tests.offload.places import needs_gpu
from tests.test_architecture import ROOT

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]


def all_ends(cache: Cache) -> dict[int, TransferEnd]:
    """Wait until no job is left; each has ended once."""
    ends: list[TransferEnd] = []
    while len(cache.engine):
        ends += cache.ended()
    assert len({end.job_id for end in ends}) == len(ends)
    return {end.job_id: end for end in ends}


def test_a_cancelled_store_ends_with_its_copies_and_is_not_believed() -> None:
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        busy = occupy_engine(300)
        cache.engine.fence(STORE)
        cache.engine.submit(1, STORE, ids(3, 4), ids(7, 8))
        cache.engine.cancel(1)
        assert cache.engine.poll() == []
        assert not busy.query(), "the engine's work ended too early: this run shows nothing"
        (end,) = cache.ended()
        assert busy.query(), "the store was reported while it could still write"
        assert (end.num_good, end.error, end.is_over) == (0, CANCELLED, True)
        cache.engine.submit(2, LOAD, ids(7, 8), ids(5, 6), ids(1, 1))
        assert all_ends(cache)[2].num_good == 0


@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seed", range(3))
def test_cancelling_some_of_many_leaves_the_others_right(layout: KVCacheLayout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Cache(torch.bfloat16, 16, layout) as cache:
        blocks, pool = cache.blocks(), cache.pool.copy()
        pairs = rng.permutation(24).astype(np.int64).reshape(12, 2)
        for job_id, pair in enumerate(pairs):
            if job_id % 2:
                cache.load(job_id, pair, pair)
            else:
                cache.engine.submit(job_id, STORE, pair, pair)
        cancelled = set(rng.choice(12, 5, replace=False).tolist())
        for job_id in cancelled:
            cache.engine.cancel(job_id)
        ends = all_ends(cache)
        after = cache.blocks()
        for job_id, pair in enumerate(pairs):
            expected = (0, CANCELLED) if job_id in cancelled else (2, None)
            assert (ends[job_id].num_good, ends[job_id].error) == expected
            if job_id not in cancelled:
                moved, source = (after, pool) if job_id % 2 else (cache.pool, blocks)
                assert np.array_equal(moved[pair], source[pair])
            untouched, before = (cache.pool, pool) if job_id % 2 else (after, blocks)
            assert np.array_equal(untouched[pair], before[pair]), "a source was changed"


@contextlib.contextmanager
def no_gpu_memory() -> Iterator[None]:
    """Take all memory of the GPU that can be had."""
    taken = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 1 << 21:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


def test_without_gpu_memory_jobs_end_right_or_failed() -> None:
    """Copies take none; where the driver wants some nevertheless, that is a failed job."""
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        blocks, pool = cache.blocks(), cache.pool.copy()
        with no_gpu_memory():
            for number in range(6):
                cache.engine.fence(STORE)
                cache.engine.fence(LOAD)
                cache.engine.submit(number, STORE, ids(number), ids(number))
                cache.load(100 + number, ids(12 + number), ids(12 + number))
            ends = all_ends(cache)
        after = cache.blocks()
        assert len(ends) == 12
        for number in range(6):
            if ends[number].error is None:
                assert np.array_equal(cache.pool[number], blocks[number])
            if ends[100 + number].error is None:
                assert np.array_equal(after[12 + number], pool[12 + number])
        cache.engine.fence(STORE)
        cache.engine.submit(7, STORE, ids(20), ids(20))
        assert all_ends(cache)[7].error is None, "memory is there again"
        assert np.array_equal(cache.pool[20], blocks[20])


def test_a_broken_device_fails_its_jobs_and_hangs_nobody() -> None:
    """Jobs in flight are given up, later ones refused, and what can be released is."""
    command = [sys.executable, "-m", "tests.gpu.broken_device"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout.splitlines()[-1])
    ends = {end["job"]: end for end in told["ends"]}
    assert sorted(end["job"] for end in told["ends"]) == [1, 2, 3, 4], "each is reported, and once"
    for end in ends.values():
        assert end["blocks"] == 0
        assert end["error"]
    assert ends[3]["over"] and ends[4]["over"], "nothing of them was begun"
    assert told["late"] == []
    assert told["closed"]
    assert told["close_seconds"] < 10
    assert told["unmapped"]
