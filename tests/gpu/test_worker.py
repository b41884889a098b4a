"""The worker's side on a GPU as the engine calls it: orders in, copies and checksums, reports out."""

import os

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.config import Verify
from offload.messages import LOAD, STORE, Fingerprint, JobReport, Order, Part, StepPlan
from offload.vllm.copy_paths import make_copier
from offload.vllm.regions import VllmCache
from offload.worker.side import Seams, WorkerSide
from tests.gpu.cache import ONE_PIECE, PER_HEAD, PER_LAYER, Bytes, cache_config, ids
from tests.gpu.kernels import keep_writing, load_kernels
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

NUM_BLOCKS = 24
OURS = Fingerprint("ours", "its", 1, 16, "bfloat16", "any")


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
def test_a_step_stores_what_it_computes_and_a_later_one_restores_it(
    layout: KVCacheLayout, verify: Verify
) -> None:
    load_kernels()
    config = cache_config(torch.bfloat16, 16, layout, NUM_BLOCKS)
    (tensor,) = config.kv_cache_tensors
    raw = torch.zeros(tensor.size, dtype=torch.uint8, device="cuda")
    worker = WorkerSide(VllmCache(config), tensor.size, OURS, Seams(make_copier), verify)
    assert worker.facts.num_slots == NUM_BLOCKS
    worker.register(dict.fromkeys(tensor.layers, raw))
    try:
        # A step: the plan comes first, then the forward pass, then the stores behind it.
        worker.bind(StepPlan(OURS, [Order(STORE, [Part(1, 0, 3)], ids(5, 6, 9), ids(0, 1, 20))]))
        worker.begin_step()
        written = keep_writing(raw, 300, 0x5A)
        worker.end_step()
        assert not written.query(), "the engine waited for its own compute"
        assert [report[:3] for report in reports(worker, 1).values()] == [(1, 3, False)]

        # Another one, which restores: its forward pass writes other blocks.
        raw.fill_(0x11)
        parts = [Part(2, 0, 1), Part(3, 1, 3)]
        order = Order(LOAD, parts, ids(0, 1, 20), ids(9, 3, 23), ids(1, 1, 1), "a")
        worker.bind(StepPlan(OURS, [order]))
        worker.begin_step()
        received: set[str] = set()
        while received != {"a"}:
            received |= worker.poll().requests
            os.sched_yield()
        assert worker.take_unfilled() == set()
        report = worker.take_report()
        assert report is not None
        told = {job_id: job[:3] for job_id, job in report.jobs.items()}
        assert told == {2: (1, 1, False), 3: (1, 2, False)}
        torch.cuda.synchronize()
        assert block_values(raw.cpu().numpy(), layout) == [
            {0x5A} if block_id in (3, 9, 23) else {0x11} for block_id in range(NUM_BLOCKS)
        ]
    finally:
        worker.close()


def reports(worker: WorkerSide, num_jobs: int) -> dict[int, JobReport]:
    """Poll until so many jobs were reported."""
    found: dict[int, JobReport] = {}
    while len(found) < num_jobs:
        worker.poll()
        report = worker.take_report()
        found |= report.jobs if report else {}
        os.sched_yield()
    return found


def block_values(raw: Bytes, layout: KVCacheLayout) -> list[set[int]]:
    """Which bytes occur in each block."""
    if layout.is_block_outermost:
        by_block = raw.reshape(NUM_BLOCKS, -1)
    else:  # runs of all blocks: one per layer, or per layer and group of heads
        config = cache_config(torch.bfloat16, 16, layout, NUM_BLOCKS)
        piece = config.kv_cache_tensors[0].block_stride
        by_block = raw.reshape(-1, NUM_BLOCKS, piece).swapaxes(0, 1).reshape(NUM_BLOCKS, -1)
    return [set(np.unique(block).tolist()) for block in by_block]
