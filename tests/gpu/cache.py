"""A KV cache on the GPU and a pinned pool below it, laid out as vLLM does."""

import ctypes
import os

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheTensor, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload.messages import LOAD
from offload.testing.copiers.inline import InlineExecutor
from offload.vllm.copy_paths import copy_engine
from offload.vllm.regions import block_bytes, block_regions
from offload.worker.copiers import CudaCopier
from offload.worker.copiers.cuda import BatchedCopy, register_host_memory, unregister_host_memory
from offload.worker.jobs import TransferEnd
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout
from offload.worker.pool.memory import HostMemory
from offload.worker.seals import Seals
from offload.worker.transfer import TransferEngine
from tests.gpu.kernels import clock_kilohertz, load_kernels

Bytes = npt.NDArray[np.uint8]

NUM_LAYERS = 3
NUM_HEADS = 2
HEAD_SIZE = 64
_GUARD_BYTES = 1 << 16

ONE_PIECE = KVCacheLayout.BLHNC
PER_LAYER = KVCacheLayout.LBHNC
PER_HEAD = KVCacheLayout.LHBNC


def cache_config(
    dtype: torch.dtype, block_size: int, layout: KVCacheLayout, num_blocks: int
) -> KVCacheConfig:
    """What vLLM tells a worker about its cache."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=dtype)
    page = spec.page_size_bytes
    packed = NUM_LAYERS * page if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, num_blocks, NUM_LAYERS, layout, fixed_strides=(None, packed, None, None, None)
    )
    names = [f"layer.{number}" for number in range(NUM_LAYERS)]
    tensor = KVCacheTensor(NUM_LAYERS * page * num_blocks, names, layer_stride, block_stride)
    return KVCacheConfig(num_blocks, [tensor], kv_cache_groups=[])


class Cache:
    """``num_blocks`` GPU blocks of random bytes, as many slots of other ones, and a copier between.

    On exit the GPU memory before and behind the blocks has to be as it was.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        block_size: int,
        layout: KVCacheLayout,
        num_blocks: int = 24,
        max_registration_bytes: int = 1 << 20,
        copy: BatchedCopy | None = None,
    ) -> None:
        config = cache_config(dtype, block_size, layout, num_blocks)
        (tensor,) = config.kv_cache_tensors
        size = tensor.size
        load_kernels()
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Filled at first, so that the fill kernel is loaded: loading one may wait for the whole GPU.
        guarded = torch.full((size + 2 * _GUARD_BYTES,), 1, dtype=torch.uint8, device=self.device)
        guarded.random_(0, 256, generator=torch.Generator(self.device).manual_seed(1))
        self._guards = [guarded[:_GUARD_BYTES], guarded[-_GUARD_BYTES:]]
        self._guards_before = [guard.clone() for guard in self._guards]
        self.raw = guarded[_GUARD_BYTES:-_GUARD_BYTES]
        self.is_broken = False  # set where the device no longer answers
        self.num_blocks = num_blocks
        self.slot_bytes = block_bytes(config)
        self.memory = HostMemory(
            num_blocks,
            self.slot_bytes,
            register=register_host_memory,
            unregister=unregister_host_memory,
            max_registration_bytes=max_registration_bytes,
        )
        flat = np.frombuffer((ctypes.c_uint8 * size).from_address(self.memory.address), np.uint8)
        self.pool: Bytes = flat.reshape(num_blocks, self.slot_bytes)
        self.pool[:] = np.random.default_rng(2).integers(0, 256, self.pool.shape, dtype=np.uint8)
        self.regions = block_regions(config)
        self.copier = CudaCopier(self.device, copy or copy_engine())
        at = block_regions(config, self.raw.data_ptr())
        per_registration = self.memory.slots_per_registration
        self.layout = BlockLayout(at, self.memory.address, slots_per_registration=per_registration)
        self.seals = Seals(self.layout, num_blocks)
        lanes = gpu_lanes(self.layout, self.copier)
        self.engine = TransferEngine(lanes, self.seals, make_executor=InlineExecutor)
        torch.cuda.synchronize(self.device)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.engine.close(seconds=30)
        del self.pool
        self.memory.close()
        if error is None and not self.is_broken:
            for guard, before in zip(self._guards, self._guards_before, strict=True):
                assert torch.equal(guard, before), "a copy wrote outside the cache"

    def piece(self, block_id: int) -> torch.Tensor:
        """One GPU block itself, in a layout where it is one piece."""
        ((address, stride, size),) = self.regions
        return self.raw[address + block_id * stride :][:size]

    def load(self, job_id: int, slots: npt.NDArray[np.int64], block_ids: npt.NDArray[np.int64]) -> None:
        """Copy slots up, whatever they hold now."""
        self.seals.seal(job_id, block_ids, slots)
        self.engine.submit(job_id, LOAD, slots, block_ids, np.full_like(slots, job_id))

    def block(self, block_id: int) -> torch.Tensor:
        """The bytes of one GPU block in the order of a slot, put together piece by piece."""
        pieces = []
        for address, stride, size in self.regions:
            start = address + block_id * stride
            pieces.append(self.raw[start : start + size])
        return torch.cat(pieces)

    def blocks(self) -> Bytes:
        """A copy of all GPU blocks, one row each. Waits for the GPU."""
        torch.cuda.synchronize(self.device)
        rows: Bytes = torch.stack([self.block(number) for number in range(self.num_blocks)]).cpu().numpy()
        return rows

    def ended(self) -> list[TransferEnd]:
        """Poll until something has ended."""
        while not (ends := self.engine.poll()):
            os.sched_yield()
        return ends

    def write(self, block_id: int, value: int) -> None:
        """Overwrite one GPU block, in the order of the engine's stream."""
        for address, stride, size in self.regions:
            start = address + block_id * stride
            self.raw[start : start + size].fill_(value)


def ids(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def occupy_engine(milliseconds: int = 300) -> torch.cuda.Event:
    """Keep the engine's stream busy about that long; the event is that of the end."""
    torch.cuda._sleep(clock_kilohertz() * milliseconds)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event
