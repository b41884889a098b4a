"""Copies between GPU memory and pinned host memory, on streams of their own.

Not measured: written against the CUDA runtime's documented rules, run by ``tests/gpu`` where there is a GPU.
"""

import time
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
import torch

from offload.worker.copiers.base import CopyEnd, Direction
from offload.worker.layout import CopyBatch

_PAUSE_SECONDS = 0.001


class BatchedCopy(Protocol):
    """Enqueues all copies of a batch on the current stream with one call (``cuMemcpyBatchAsync``).

    Pointers and sizes are CPU tensors ``int64[n]``. The driver may read sources out of stream order
    only if ``is_src_access_order_any``, which is right when nothing writes them.
    """

    def __call__(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        /,
        *,
        is_src_access_order_any: bool,
    ) -> None: ...


class _InFlight(NamedTuple):
    end: CopyEnd
    event: torch.cuda.Event
    descriptors: list[torch.Tensor]
    """Pointers and sizes, kept until the copies are done: nothing says the driver has read them before."""


class CudaCopier:
    """One stream per direction, one batched call per job, events polled and never waited for.

    Stores start after the compute that wrote their source (``fence`` records an event on the engine's stream)
    and read in stream order. Loads start after everything enqueued before their fence, such as zeroing of
    their target blocks. They do not wait for the forward pass launched behind it. Their source is pinned
    memory that nobody writes, so the driver may read it in any order.
    """

    def __init__(
        self, device: torch.device, batched_copy: BatchedCopy, load_copy: BatchedCopy | None = None
    ) -> None:
        """``load_copy``: for loads, if they go another way than stores."""
        self._device = device
        self._copies = {Direction.STORE: batched_copy, Direction.LOAD: load_copy or batched_copy}
        self._streams = {way: torch.cuda.Stream(device) for way in Direction}  # of the lowest priority
        self._ended: list[CopyEnd] = []  # kept if asking after another one raises
        self._in_flight: dict[Direction, deque[_InFlight]] = {way: deque() for way in Direction}

    def fence(self, direction: Direction) -> None:
        self._streams[direction].wait_stream(torch.cuda.current_stream(self._device))

    def submit(self, job_id: int, direction: Direction, batch: CopyBatch) -> None:
        stream = self._streams[direction]
        descriptors = [torch.from_numpy(np.ascontiguousarray(column)) for column in batch]
        end = CopyEnd(job_id, len(batch.sizes), None)
        event = torch.cuda.Event()
        event.record(stream)  # makes it: if that fails, nothing has been copied yet
        with torch.cuda.stream(stream):
            try:
                self._copies[direction](*descriptors, is_src_access_order_any=direction is Direction.LOAD)
            except Exception as error:
                # Some copies may be under way all the same, so the batch ends no sooner than they do.
                end = CopyEnd(job_id, 0, f"{type(error).__name__}: {error}")
            event.record(stream)
        self._in_flight[direction].append(_InFlight(end, event, descriptors))

    def poll(self) -> list[CopyEnd]:
        for queue in self._in_flight.values():
            while queue and queue[0].event.query():
                self._ended.append(queue.popleft().end)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while any(not batch.event.query() for queue in self._in_flight.values() for batch in queue):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True


def pci_address(device: torch.device) -> str | None:
    """Where the GPU sits, as Linux names it (``0000:3b:00.0``); None if this torch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def register_host_memory(address: int, nbytes: int) -> None:
    """Pin mapped memory for the current CUDA context. Raises OSError with CUDA's reason."""
    _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0), "cudaHostRegister")


def unregister_host_memory(address: int) -> None:
    """Undo ``register_host_memory``. Raises OSError with CUDA's reason."""
    _check(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")


def _check(result: object, call: str) -> None:
    code = int(getattr(result, "value", result))  # type: ignore[call-overload]
    if code != 0:
        raise OSError(f"{call} returned CUDA error {code} ({torch.cuda.cudart().cudaGetErrorString(result)})")
