"""A KV cache and a pool below it, seen as blocks and slots of a shape."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from benchmarks.copy_bandwidth.devices import Device
from benchmarks.copy_bandwidth.shapes import Shape, layer_by_layer
from offload.messages import Ids
from offload.worker.pool.memory import HostMemory

__all__ = ["Arena", "arenas", "host_tensor"]


class Arena:
    """As many blocks as slots. One piece per layer: all blocks' pieces of a layer lie side by side.

    Attributes:
        shape: of the blocks.
        num_blocks: and slots.
        blocks: `uint8[pieces, blocks, piece bytes]` on the device.
        slots: `uint8[slots, pieces, piece bytes]` in host memory.
        layout: the same for the copier.
    """

    def __init__(self, shape: Shape, num_blocks: int, cache: torch.Tensor, pool: HostMemory) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.blocks = cache.view(shape.num_pieces, num_blocks, shape.piece_bytes)
        self.slots = host_tensor(pool).view(num_blocks, shape.num_pieces, shape.piece_bytes)
        self.layout = layer_by_layer(shape, num_blocks, cache.data_ptr(), pool)

    def read_blocks(self, block_ids: Ids) -> torch.Tensor:
        """A copy in host memory, `uint8[n, pieces, piece bytes]`."""
        return self.blocks[:, self._on_device(block_ids)].transpose(0, 1).cpu()

    def write_blocks(self, block_ids: Ids, content: torch.Tensor | int) -> None:
        """Overwrite them with a tensor as `read_blocks` returns it, or with one value."""
        if isinstance(content, torch.Tensor):
            content = content.to(self.blocks.device).transpose(0, 1)
        self.blocks[:, self._on_device(block_ids)] = content

    def read_slots(self, slots: Ids) -> torch.Tensor:
        """A copy, `uint8[n, pieces, piece bytes]`."""
        return self.slots[torch.from_numpy(slots)]

    def write_slots(self, slots: Ids, content: torch.Tensor | int) -> None:
        """Overwrite them with a tensor as `read_slots` returns it, or with one value."""
        self.slots[torch.from_numpy(slots)] = content

    def _on_device(self, block_ids: Ids) -> torch.Tensor:
        return torch.from_numpy(block_ids).to(self.blocks.device)


@contextmanager
def arenas(device: Device, shapes: Sequence[Shape], num_blocks: int) -> Iterator[list[Arena]]:
    """The same memory seen in each shape; their blocks must be of one size."""
    block_bytes = shapes[0].block_bytes
    cache = device.make_cache(num_blocks * block_bytes)
    with closing(device.make_pool(num_blocks, block_bytes)) as pool:
        yield [Arena(shape, num_blocks, cache, pool) for shape in shapes]


def host_tensor(memory: HostMemory) -> torch.Tensor:
    """All of it, `uint8`. Not to be touched once the memory is closed."""
    return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address), dtype=torch.uint8)
