"""What the benchmark needs of a device, for a GPU and, as a dry run, for host memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.worker.copiers import Copier, CpuCopier, CudaCopier
from offload.worker.copiers.cuda import pci_address, register_host_memory, unregister_host_memory
from offload.worker.layout import BlockLayout
from offload.worker.pool.host_limits import memory_limits
from offload.worker.pool.memory import HostMemory
from offload.worker.pool.numa import node_of_pci_device

__all__ = ["CpuDevice", "CudaDevice", "Device"]

_MIB = 1 << 20


class Device(Protocol):
    """Memory of the two kinds, ways to copy beside each other, and a clock.

    Attributes:
        name: as given to `--device`.
        remark: what figures taken here mean, None if they mean what they say.
        block_counts: measured unless asked for otherwise.
        peak_bytes: size of the large copy that shows the peak, unless asked for otherwise.
        has_vllm: whether vLLM's native worker runs here.
    """

    name: str
    remark: str | None
    block_counts: Sequence[int]
    peak_bytes: int
    has_vllm: bool

    def limit_bytes(self) -> int:
        """Bytes that a cache, and a pool as large, may have now."""

    def make_cache(self, nbytes: int) -> torch.Tensor:
        """`uint8[nbytes]` where the engine computes, every page touched."""

    def make_pool(self, num_slots: int, slot_bytes: int) -> HostMemory:
        """Host memory, pinned where that means something."""

    def make_copier(self, layout: BlockLayout, num_blocks: int) -> Copier:
        """The product's; there are as many slots as blocks."""

    def enqueue(self, direction: Route, copy: Callable[[], None]) -> None:
        """Run `copy`, or what it enqueues, after what was enqueued for the direction and beside the other."""

    def settle(self) -> None:
        """Wait for all that was enqueued."""

    def timed(self, copy: Callable[..., None]) -> Callable[..., None]:
        """The same, watched by the device's clock."""

    def begin_turn(self) -> None:
        """Wait until nothing is under way, and set the device's clock back."""

    def turn_seconds(self) -> float | None:
        """From the first start to the last end of what was timed in this turn; None without such a clock."""

    def close(self) -> None:
        """Release threads and streams."""


class CudaDevice:
    """One GPU; its clock is events on the streams that copy."""

    name = "cuda"
    remark: str | None = None
    block_counts: Sequence[int] = (1, 8, 64, 512, 8192)
    peak_bytes = 1024 * _MIB
    has_vllm = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in GPU_ROUTES}
        self._origin = torch.cuda.Event(enable_timing=True)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []  # making one takes time that counts as submission

    def limit_bytes(self) -> int:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(int(free * 0.9), int(_free_host_bytes() * 0.6))

    def make_cache(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 1, dtype=torch.uint8, device=self._device)

    def make_pool(self, num_slots: int, slot_bytes: int) -> HostMemory:
        address = pci_address(self._device)
        return HostMemory(
            num_slots,
            slot_bytes,
            node=None if address is None else node_of_pci_device(address),
            register=register_host_memory,
            unregister=unregister_host_memory,
        )

    def make_copier(self, layout: BlockLayout, num_blocks: int) -> Copier:
        from offload.vllm.copy_paths import pick_paths

        paths = pick_paths(self._device, layout, num_blocks, num_blocks)
        return CudaCopier(self._device, *(self.timed(paths[way]) for way in (STORE, LOAD)))

    def enqueue(self, direction: Route, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[direction]), self._span():
            copy()

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def timed(self, copy: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **more: Any) -> None:
            with self._span():
                copy(*arguments, **more)

        return run

    def begin_turn(self) -> None:
        torch.cuda.synchronize(self._device)
        while self._spans:
            self._unused.extend(self._spans.pop())
        self._origin.record(torch.cuda.current_stream(self._device))

    def turn_seconds(self) -> float | None:
        torch.cuda.synchronize(self._device)
        first: float = min(self._origin.elapsed_time(start) for start, _ in self._spans)
        last: float = max(self._origin.elapsed_time(end) for _, end in self._spans)
        return (last - first) / 1e3

    def close(self) -> None:
        """Streams are torch's."""

    @contextmanager
    def _span(self) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        start, end = self._event(), self._event()
        start.record(stream)
        yield
        end.record(stream)
        self._spans.append((start, end))

    def _event(self) -> torch.cuda.Event:
        return self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)


class CpuDevice:
    """Host memory on both sides and a thread per direction; the only clock is the host's."""

    name = "cpu"
    remark: str | None = "a dry run: copies within the memory of a CPU, whose figures say nothing about a GPU"
    block_counts: Sequence[int] = (1, 8, 64)
    peak_bytes = 64 * _MIB
    has_vllm = False

    def __init__(self) -> None:
        self._lanes = {way: ThreadPoolExecutor(1, f"copies-{way.verb}") for way in GPU_ROUTES}
        self._enqueued: list[Future[None]] = []

    def limit_bytes(self) -> int:
        return int(_free_host_bytes() * 0.25)

    def make_cache(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def make_pool(self, num_slots: int, slot_bytes: int) -> HostMemory:
        return HostMemory(num_slots, slot_bytes)

    def make_copier(self, layout: BlockLayout, num_blocks: int) -> Copier:
        return CpuCopier()

    def enqueue(self, direction: Route, copy: Callable[[], None]) -> None:
        self._enqueued.append(self._lanes[direction].submit(copy))

    def settle(self) -> None:
        while self._enqueued:
            self._enqueued.pop().result()

    def timed(self, copy: Callable[..., None]) -> Callable[..., None]:
        return copy

    def begin_turn(self) -> None:
        """Nothing is under way once a turn has ended."""

    def turn_seconds(self) -> float | None:
        return None

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown()


def _free_host_bytes() -> int:
    return min(limit.room for limit in memory_limits())
