"""Copies between GPU memory and pinned host memory, on streams of their own.

Written against the CUDA runtime's documented rules; ``tests/gpu`` run it where there is a GPU.
"""

import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.worker.copiers.base import CopyEnd
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
    began: torch.cuda.Event
    ended: torch.cuda.Event
    descriptors: list[torch.Tensor]
    """Pointers and sizes, kept until the copies are done: nothing says the driver has read them before."""


class CudaCopier:
    """One stream per route, one batched call per job, events polled and never waited for.

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
        self._copies = {STORE: batched_copy, LOAD: load_copy or batched_copy}
        self._streams = {way: torch.cuda.Stream(device) for way in GPU_ROUTES}  # of the lowest priority
        self._ended: list[CopyEnd] = []  # kept if asking after another one raises
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # to be used again
        self._in_flight: dict[Route, deque[_InFlight]] = {way: deque() for way in GPU_ROUTES}

    def fence(self, route: Route) -> None:
        self._streams[route].wait_stream(torch.cuda.current_stream(self._device))

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        stream = self._streams[route]
        descriptors = [torch.from_numpy(np.ascontiguousarray(column)) for column in batch]
        end = CopyEnd(job_id, len(batch.sizes), None)
        began, ended = self._spans.pop() if self._spans else _make_span(stream)
        with torch.cuda.stream(stream):
            began.record(stream)
            try:
                self._copies[route](*descriptors, is_src_access_order_any=route == LOAD)
            except Exception as error:
                # Some copies may be under way all the same, so the batch ends no sooner than they do.
                end = CopyEnd(job_id, 0, f"{type(error).__name__}: {error}")
            ended.record(stream)
        self._in_flight[route].append(_InFlight(end, began, ended, descriptors))

    def poll(self) -> list[CopyEnd]:
        for queue in self._in_flight.values():
            while queue and queue[0].ended.query():
                batch = queue[0]
                seconds = batch.began.elapsed_time(batch.ended) / 1000
                self._ended.append(replace(batch.end, seconds=seconds))
                queue.popleft()  # not before: what raises above must not lose it
                self._spans.append((batch.began, batch.ended))
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while any(not batch.ended.query() for queue in self._in_flight.values() for batch in queue):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True


def _make_span(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events. CUDA makes them with their first record: if that fails, nothing has been copied yet."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(stream)
    ended.record(stream)
    return began, ended


def pci_address(device: torch.device) -> str | None:
    """Where the GPU sits, as Linux names it (``0000:3b:00.0``); None if this torch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def use_device(device: torch.device) -> None:
    """What this thread asks of CUDA is of that GPU from now on; a thread begins with the first one.

    For another device than a GPU it does nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


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
