"""What a virtual engine cannot show of a vLLM: where it lays a cache's bytes, and that they are copied right.

The worker's side itself runs, on a cache that vLLM has planned, and views that vLLM has made. On a GPU every
way of copying runs on that GPU (not measured: needs one).
"""

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.errors import UnsupportedError
from offload.messages import LOAD, STORE, Fingerprint, Ids, Order, Part, StepPlan
from offload.testing.virtual.settings import VirtualSettings, make_kv_cache_config, make_vllm_config
from offload.vllm.copy_paths import COPY_ENGINE, KERNEL, possible_paths
from offload.vllm.fingerprint import check_fingerprint, take_fingerprint
from offload.vllm.regions import VllmCache
from offload.worker.copiers import Copier, CpuCopier, CudaCopier
from offload.worker.layout import BlockLayout
from offload.worker.side import Seams, WorkerSide

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

Bytes = npt.NDArray[np.int8]

THREADS = "threads"
_NUM_BLOCKS = 64
_NUM_SLOTS = 48
_NUM_COPIED = 40  # blocks at once: enough for a kernel, see copy_paths
_TAIL_BYTES = 4096  # behind the cache, which nobody may write
_PATIENCE_SECONDS = 120.0

_SPECS: dict[str, KVCacheSpec] = {
    "full attention": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16),
    "latent attention": MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=96, dtype=torch.bfloat16),
}


class _NotPossibleError(Exception):
    """This way of copying is not there, for such blocks or on this machine."""


def self_checks(seed: int) -> Iterator[str]:
    """Run all; what was checked, in words, one by one.

    Raises:
        AssertionError: a check failed; whatever else vLLM or a copier raises fails it too.
    """
    yield check_fingerprints()
    device = torch.device("cpu")
    if current_platform.is_cuda():
        current_platform.import_kernels()
        device = torch.device("cuda", torch.cuda.current_device())
    for path in (COPY_ENGINE, KERNEL) if device.type == "cuda" else (THREADS,):
        yield check_copies(device, path, seed)
    if device.type != "cuda":
        yield "copies on a GPU: not measured, there is none here"


def check_fingerprints() -> str:
    """What scheduler and workers compare tells apart what must not differ, and nothing else."""
    settings = VirtualSettings()
    ours = _fingerprint(settings)
    check_fingerprint(ours, pickle.loads(pickle.dumps(_fingerprint(settings))), "an equal worker")
    others = {
        "world_size": _fingerprint(replace(settings, num_ranks=2)),
        "block_size": _fingerprint(replace(settings, block_size=2)),
        "dtype": _fingerprint(settings, torch.float16),
        "layout": _fingerprint(replace(settings, block_outermost=True)),
    }
    for name, theirs in others.items():
        differ = [each for each in ours._fields if getattr(ours, each) != getattr(theirs, each)]
        assert differ == [name], f"workers that differ in {name} have fingerprints that differ in {differ}"
        with suppress(UnsupportedError):
            check_fingerprint(ours, theirs, "another worker")
            raise AssertionError(f"a worker with another {name} was not refused")
    return f"fingerprint: workers with another {', '.join(others)} are told apart and refused"


def check_copies(device: torch.device, path: str, seed: int) -> str:
    """Blocks go down and come up whole, to others than they came from, in every layout that vLLM has."""
    vllm_config = make_vllm_config(VirtualSettings())
    rng = np.random.default_rng(seed)
    places, missing = 0, ""
    for spec in _SPECS.values():
        for layout in KVCacheLayout:
            try:
                _check_place(vllm_config, spec, layout, device, path, rng)
            except _NotPossibleError as error:
                missing = str(error)
            else:
                places += 1
    what = f"layout and copies by {path} on {current_platform.get_device_name()}"
    if not places:
        return f"{what}: not measured, {missing}"
    return (
        f"{what}: {places} caches ({len(KVCacheLayout)} layouts, {' and '.join(_SPECS)}), "
        f"{_NUM_COPIED} blocks of each down and up, all bytes right"
    )


def _fingerprint(settings: VirtualSettings, dtype: torch.dtype | None = None) -> Fingerprint:
    vllm_config = make_vllm_config(settings)
    if dtype is not None:
        vllm_config.model_config.dtype = dtype
    return take_fingerprint(vllm_config, make_kv_cache_config(settings))


def _check_place(
    vllm_config: VllmConfig,
    spec: KVCacheSpec,
    layout: KVCacheLayout,
    device: torch.device,
    path: str,
    rng: np.random.Generator,
) -> None:
    where = f"layout {layout.name}, {type(spec).__name__}, copies by {path}"
    config = _plan(vllm_config, spec, layout)
    cache = _Cache(config, spec, layout, device)
    ours = VllmCache(config)
    seams = Seams(partial(_copier, path))
    worker = WorkerSide(ours, _NUM_SLOTS * ours.block_bytes, take_fingerprint(vllm_config, config), seams)
    try:
        worker.register(cache.views)
        source, target = (rng.permutation(_NUM_BLOCKS)[:_NUM_COPIED] for _ in range(2))
        slots = rng.permutation(_NUM_SLOTS)[:_NUM_COPIED]
        before = cache.fill(rng)
        _store(worker, source, slots)
        assert (cache.blocks() == before).all(), f"a store changed its source: {where}"
        expected = cache.fill(rng)
        _load(worker, slots, target)
        expected[target] = before[source]
        wrong = np.flatnonzero((cache.blocks() != expected).any(axis=1)).tolist()
        assert not wrong, f"blocks {wrong} hold wrong bytes after a load into {target.tolist()}: {where}"
        assert cache.is_tail_whole(), f"a copy wrote behind the cache: {where}"
    finally:
        worker.close()


def _plan(vllm_config: VllmConfig, spec: KVCacheSpec, layout: KVCacheLayout) -> KVCacheConfig:
    """As vLLM itself places three layers of that kind."""
    vllm_config.cache_config.kv_cache_layout = layout.name
    vllm_config.cache_config.num_gpu_blocks_override = _NUM_BLOCKS
    group = KVCacheGroupSpec([f"layer.{number}" for number in range(3)], spec)
    config: KVCacheConfig = get_kv_cache_config_from_groups(vllm_config, [group], 1 << 30)
    assert config.num_blocks == _NUM_BLOCKS, f"vLLM planned {config.num_blocks} blocks, not {_NUM_BLOCKS}"
    return config


class _Cache:
    """A cache as a worker of vLLM has it, and a tail behind it."""

    def __init__(
        self, config: KVCacheConfig, spec: KVCacheSpec, layout: KVCacheLayout, device: torch.device
    ) -> None:
        self._size = max(tensor.size for tensor in config.kv_cache_tensors)
        self._raw = torch.zeros(self._size + _TAIL_BYTES, dtype=torch.int8, device=device)
        self.views: dict[str, torch.Tensor] = {}
        for tensor in config.kv_cache_tensors:
            made = create_kv_cache_views(self._raw, spec, config.num_blocks, layout, tensor)
            self.views.update(zip(tensor.layers, made, strict=True))

    def fill(self, rng: np.random.Generator) -> Bytes:
        """Put random bytes everywhere; those of the blocks."""
        drawn = rng.integers(-128, 128, len(self._raw), dtype=np.int8)
        self._raw.copy_(torch.from_numpy(drawn))
        self._tail = drawn[self._size :]
        return self.blocks()

    def blocks(self) -> Bytes:
        """A copy of the bytes of each block as vLLM's views have them, one row each."""
        rows = [view.reshape(_NUM_BLOCKS, -1) for view in self.views.values()]
        found: Bytes = torch.cat(rows, dim=1).view(torch.int8).cpu().numpy().copy()
        return found

    def is_tail_whole(self) -> bool:
        """Whether the bytes behind the cache are as they were filled."""
        return bool((self._raw[self._size :].cpu().numpy() == self._tail).all())


def _copier(path: str, device: torch.device, layout: BlockLayout, num_blocks: int, num_slots: int) -> Copier:
    """In place of the worker's own choice."""
    if path == THREADS:
        return CpuCopier()
    paths = possible_paths(device, layout)
    if path not in paths:
        raise _NotPossibleError("it needs Triton, and a GPU whose kernels can use host memory")
    return CudaCopier(device, paths[path])


def _store(worker: WorkerSide, blocks: Ids, slots: Ids) -> None:
    order = Order(STORE, [Part(1, 0, len(blocks))], blocks, slots)
    worker.bind(StepPlan(worker.facts.fingerprint, [order]))
    worker.begin_step()
    worker.end_step()
    worker.bind(None)
    _wait(worker, 1)


def _load(worker: WorkerSide, slots: Ids, blocks: Ids) -> None:
    order = Order(LOAD, [Part(2, 0, len(slots))], slots, blocks, np.ones_like(slots), "a request")
    worker.bind(StepPlan(worker.facts.fingerprint, [order]))
    worker.begin_step()
    _wait(worker, 2)


def _wait(worker: WorkerSide, job_id: int) -> None:
    """Until the job has ended well."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while (report := worker.take_report()) is None:
        assert time.monotonic() < until, f"a copy has not ended after {_PATIENCE_SECONDS:g} s"
        os.sched_yield()
        worker.poll()
    told = {other: (each.num_ranks, each.num_good) for other, each in report.jobs.items()}
    assert told == {job_id: (1, _NUM_COPIED)}, f"a copy of {_NUM_COPIED} blocks failed: {report}"
