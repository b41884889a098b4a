"""What a worker must know of the engine's KV cache."""

from collections.abc import Mapping
from typing import Protocol

import torch

from offload.worker.layout import Region


class GpuCache(Protocol):
    """The engine's KV cache on this rank."""

    num_blocks: int
    block_bytes: int
    """Of one block, all layers of this rank."""
    least_slots: int
    """That the smallest store takes."""
    is_divisible: bool
    """Whether the engine can use the leading blocks of a load that fell short."""

    def regions(self, kv_caches: Mapping[str, torch.Tensor]) -> list[Region]:
        """The pieces that a block consists of, where they lie now; ``kv_caches`` by layer.

        Raises:
            UnsupportedError: the cache does not lie as its configuration says.
        """
