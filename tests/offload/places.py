"""Two memories with a copier between them, so that one test serves every copier."""

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.platforms import current_platform

from offload.messages import STORE, Route
from offload.testing.copiers.faulty import FaultyCopier
from offload.vllm.copy_paths import copy_engine
from offload.worker.copiers import Copier, CpuCopier, CudaCopier
from offload.worker.copiers.cuda import register_host_memory, unregister_host_memory
from offload.worker.pool.memory import HostMemory

Bytes = npt.NDArray[np.uint8]


def _missing() -> str:
    """What copies on a GPU lack here."""
    if not torch.cuda.is_available():
        return "an NVIDIA GPU"
    current_platform.import_kernels()
    has_copy = hasattr(torch.ops._C_cache_ops, "swap_blocks_batch")
    return "" if has_copy else f"a vLLM whose kernels load with torch {torch.__version__}"


_MISSING = _missing()
needs_gpu = pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}")

NUM_BYTES = 4096
"""Size of each memory, unless asked for otherwise."""


class Places(ABC):
    """A "GPU" memory and a pool memory of the same size, at addresses a copier understands.

    GPU bytes are below 128 and pool bytes from 128 on to begin with, so that every byte tells which
    side it came from.
    """

    copier: Copier
    gpu_address: int
    pool_address: int
    pool: Bytes
    """The pool's bytes themselves."""
    is_host: bool
    """Whether the "GPU" is host memory."""

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.copier.close(seconds=30)

    @abstractmethod
    def gpu(self) -> Bytes:
        """A copy of the GPU's bytes."""

    @abstractmethod
    def stores_held(self) -> Any:
        """A context: stores submitted in it do not start copying before it ends, or a little longer."""

    def spread(self, source: int, target: int, size: int, direction: Route) -> tuple[int, int, int]:
        """Addresses of a copy between two offsets."""
        if direction == STORE:
            return self.gpu_address + source, self.pool_address + target, size
        return self.pool_address + source, self.gpu_address + target, size


def first_gpu_bytes(num_bytes: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 128, num_bytes, dtype=np.uint8)


def first_pool_bytes(num_bytes: int) -> Bytes:
    return np.random.default_rng(2).integers(128, 256, num_bytes, dtype=np.uint8)


class HostPlaces(Places):
    """Both memories are host memory and the copier is the one for vLLM's CPU backend."""

    is_host = True

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        self._gpu = first_gpu_bytes(num_bytes)
        self.pool = first_pool_bytes(num_bytes)
        self.gpu_address = self._gpu.ctypes.data
        self.pool_address = self.pool.ctypes.data
        self.copier = CpuCopier()

    def gpu(self) -> Bytes:
        return self._gpu.copy()

    @contextmanager
    def stores_held(self) -> Iterator[None]:
        gpu = range(self.gpu_address, self.gpu_address + len(self._gpu))
        go = threading.Event()
        memmove = ctypes.memmove

        def hold_then_move(target: int, source: int, size: int) -> None:
            if source in gpu:
                go.wait()
            memmove(target, source, size)

        with mock.patch.object(ctypes, "memmove", hold_then_move):
            try:
                yield
            finally:
                go.set()
                self.copier.drain()


class CudaPlaces(Places):
    """A GPU's memory and pinned memory. Nobody else may use the GPU's current stream meanwhile."""

    is_host = False

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._gpu = torch.from_numpy(first_gpu_bytes(num_bytes)).to(device)
        torch.cuda.synchronize(device)
        self._memory = HostMemory(
            1, num_bytes, register=register_host_memory, unregister=unregister_host_memory
        )
        self.pool = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(self._memory.address), np.uint8)
        self.pool[:] = first_pool_bytes(num_bytes)
        self.gpu_address = self._gpu.data_ptr()
        self.pool_address = self._memory.address
        self.copier = CudaCopier(device, copy_engine())

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        del self.pool
        self._memory.close()

    def gpu(self) -> Bytes:
        torch.cuda.synchronize()
        copied: Bytes = self._gpu.cpu().numpy()
        return copied

    @contextmanager
    def stores_held(self) -> Iterator[None]:
        torch.cuda._sleep(1 << 31)  # about a second of the engine's stream
        self.copier.fence(STORE)
        yield
        self.copier.drain()


PlacesFactory = Callable[..., Places]

ALL_PLACES = [
    pytest.param(HostPlaces, id="cpu"),
    pytest.param(CudaPlaces, id="cuda", marks=[pytest.mark.gpu, needs_gpu]),
]
"""Every copier that copies; parametrize over it."""


def faulty(make: PlacesFactory) -> PlacesFactory:
    """The same places behind a ``FaultyCopier`` that commits no fault."""

    def wrapped(num_bytes: int = NUM_BYTES) -> Places:
        places = make(num_bytes)
        places.copier = FaultyCopier(places.copier)
        return places

    return wrapped
