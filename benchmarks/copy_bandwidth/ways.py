"""Ways to make the same copies: the product's, one torch call per piece, and one large copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from benchmarks.copy_bandwidth.arena import Arena, host_tensor
from benchmarks.copy_bandwidth.devices import Device
from benchmarks.copy_bandwidth.moves import Moves, Pairs
from offload.messages import GPU_ROUTES, LOAD, STORE, Route

__all__ = ["OurWay", "PeakWay", "TorchWay", "Way"]

_CLOSE_SECONDS = 30.0


class Way(Protocol):
    """Makes the copies of one turn after the other."""

    name: str

    def prepare(self, moves: Moves) -> Callable[[], None]:
        """What begins the copies when called: what a caller who has the ids and slots must do and pay."""

    def wait(self) -> None:
        """Wait until all that was begun has ended. Raises RuntimeError if a copy failed."""

    def close(self) -> None:
        """Release threads and streams."""


class OurWay:
    """The product's layout and copier, as its transfer engine calls them."""

    name = "ours"

    def __init__(self, arena: Arena, device: Device) -> None:
        self._layout = arena.layout
        self._copier = device.make_copier(arena.layout, arena.num_blocks)
        self._job_ids = itertools.count(1)
        self._in_flight: set[int] = set()

    def prepare(self, moves: Moves) -> Callable[[], None]:
        def begin() -> None:
            for direction, (block_ids, slots) in moves.items():
                if direction == STORE:
                    batch = self._layout.store(block_ids, slots)
                else:
                    batch = self._layout.load(slots, block_ids)
                job_id = next(self._job_ids)
                self._in_flight.add(job_id)
                self._copier.fence(direction)
                self._copier.submit(job_id, direction, batch)

        return begin

    def wait(self) -> None:
        self._copier.drain()
        while self._in_flight:
            for end in self._copier.poll():
                self._in_flight.remove(end.job_id)
                if end.error is not None:
                    raise RuntimeError(f"a copy failed: {end.error}")

    def close(self) -> None:
        self._copier.close(_CLOSE_SECONDS)


class TorchWay:
    """One `Tensor.copy_` per piece."""

    name = "torch"

    def __init__(self, arena: Arena, device: Device) -> None:
        self._arena = arena
        self._device = device

    def prepare(self, moves: Moves) -> Callable[[], None]:
        def begin() -> None:
            for direction, pairs in moves.items():
                self._device.enqueue(direction, self._copies(direction, pairs))

        return begin

    def wait(self) -> None:
        self._device.settle()

    def close(self) -> None:
        """Threads and streams are the device's."""

    def _copies(self, direction: Route, pairs: Pairs) -> Callable[[], None]:
        blocks, slots = self._arena.blocks, self._arena.slots

        def copy() -> None:
            for block, slot in zip(pairs.block_ids.tolist(), pairs.slots.tolist(), strict=True):
                for piece in range(self._arena.shape.num_pieces):
                    gpu, host = blocks[piece, block], slots[slot, piece]
                    if direction == STORE:
                        host.copy_(gpu, non_blocking=True)
                    else:
                        gpu.copy_(host, non_blocking=True)

        return copy


class PeakWay:
    """One copy of one large buffer per direction, between buffers of its own: what the link can do."""

    name = "peak"

    def __init__(self, device: Device, gpu: dict[Route, torch.Tensor], host: dict[Route, torch.Tensor]):
        self._device = device
        self._gpu = gpu
        self._host = host
        self.num_bytes = gpu[STORE].numel()

    @classmethod
    @contextmanager
    def opened(cls, device: Device, nbytes: int) -> Iterator[PeakWay]:
        """With buffers of that size, two on either side."""
        gpu = {way: device.make_cache(nbytes) for way in GPU_ROUTES}
        with closing(device.make_pool(len(GPU_ROUTES), nbytes)) as memory:
            host = dict(zip(GPU_ROUTES, host_tensor(memory).view(len(GPU_ROUTES), nbytes), strict=True))
            yield cls(device, gpu, host)

    def prepare(self, moves: Moves) -> Callable[[], None]:
        """The ids do not matter."""

        def begin() -> None:
            for direction in moves:
                target, source = self._host[direction], self._gpu[direction]
                if direction == LOAD:
                    target, source = source, target
                self._device.enqueue(direction, _copy(target, source))

        return begin

    def wait(self) -> None:
        self._device.settle()

    def close(self) -> None:
        """Threads and streams are the device's."""


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    return lambda: target.copy_(source, non_blocking=True)
