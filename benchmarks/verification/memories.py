"""Where blocks and slots are, and what copies between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np

from benchmarks.copy_bandwidth.shapes import Shape
from benchmarks.verification.cases import MIB
from offload.testing.copiers.paced import Link, Pace, PacedCopier, RealClock
from offload.worker.copiers import Copier, CpuCopier
from offload.worker.pool.memory import HostMemory

__all__ = ["Blocks", "has_gpu", "make_pacer", "memories"]


class Blocks(NamedTuple):
    """Where the engine's blocks are, and what copies them."""

    address: int
    make_copier: Callable[[], Copier]


@contextmanager
def memories(num_slots: int, shape: Shape, on_gpu: bool) -> Iterator[tuple[Blocks, HostMemory]]:
    """Blocks and a pool of as many slots, the blocks filled with random bytes."""
    nbytes = num_slots * shape.block_bytes
    if not on_gpu:
        with (
            closing(HostMemory(num_slots, shape.block_bytes)) as blocks,
            closing(HostMemory(num_slots, shape.block_bytes)) as pool,
        ):
            _fill(blocks.address, nbytes)
            yield Blocks(blocks.address, CpuCopier), pool
        return
    import torch

    from offload.vllm.copy_paths import copy_engine
    from offload.worker.copiers import CudaCopier
    from offload.worker.copiers.cuda import register_host_memory, unregister_host_memory

    device = torch.device("cuda", torch.cuda.current_device())
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    pinned = HostMemory(
        num_slots, shape.block_bytes, register=register_host_memory, unregister=unregister_host_memory
    )
    with closing(pinned):
        torch.cuda.synchronize(device)
        yield Blocks(raw.data_ptr(), lambda: CudaCopier(device, copy_engine())), pinned


def _fill(address: int, nbytes: int) -> None:
    """Random bytes, the same 16 MiB again and again."""
    random = np.random.default_rng(1).bytes(min(nbytes, 16 * MIB))
    for offset in range(0, nbytes, len(random)):
        ctypes.memmove(address + offset, random, min(len(random), nbytes - offset))


def make_pacer(gb_per_second: float) -> Callable[[], Copier]:
    """What copies nothing, and ends when a copier with that bandwidth would have."""
    pace = Pace(gb_per_second * 1e9)
    return lambda: PacedCopier(Link(RealClock(), lambda: pace))


def has_gpu() -> bool:
    """Whether torch finds one."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
