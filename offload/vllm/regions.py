"""Where vLLM puts a block's bytes: ``KVCacheConfig`` to regions."""

from collections.abc import Mapping

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.errors import UnsupportedError
from offload.vllm.groups import is_full, least_slots
from offload.worker.layout import Region


class VllmCache:
    """A rank's KV cache as its ``KVCacheConfig`` describes it: the worker's ``GpuCache``."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.num_blocks: int = kv_cache_config.num_blocks
        self.block_bytes = block_bytes(kv_cache_config)
        self._config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.is_divisible = len(specs) == 1 and is_full(specs[0])
        self.least_slots = least_slots(kv_cache_config)

    def regions(self, kv_caches: Mapping[str, torch.Tensor]) -> list[Region]:
        """Where they lie now. UnsupportedError if not as the configuration says."""
        return block_regions(self._config, cache_address(kv_caches, self._config))


def block_regions(kv_cache_config: KVCacheConfig, base_address: int = 0) -> list[Region]:
    """The pieces that one GPU block consists of, from the placement vLLM's cache tensors describe.

    Layer-outermost layouts give every layer (or group of heads) a run of all blocks. Block-outermost ones
    give every block one packed piece of all layers, which several tensors may describe.

    Args:
        kv_cache_config: the worker's.
        base_address: of the backing allocation; 0 when only sizes matter.
    """
    num_blocks = kv_cache_config.num_blocks
    regions: dict[int, Region] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = num_blocks * tensor.block_stride
        if tensor.layer_stride >= span:
            offsets = range(tensor.offset, tensor.offset + len(tensor.layers) * tensor.layer_stride, span)
        else:
            offsets = range(0, span, span)
        for offset in offsets:
            address = base_address + offset
            regions[address] = Region(address, tensor.block_stride, tensor.block_stride)
    return list(regions.values())


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one block on one rank, all layers."""
    return sum(region.piece_bytes for region in block_regions(kv_cache_config))


def cache_address(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> int:
    """Address of the allocation that backs every layer's cache.

    Raises:
        UnsupportedError: the layers do not share one allocation of the size the configuration tells.
    """
    storages: dict[int, int] = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in kv_caches.values()
    }
    needed = max(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    if len(storages) != 1 or next(iter(storages.values())) < needed:
        raise UnsupportedError(
            f"the KV cache lies in {len(storages)} allocations of {list(storages.values())} bytes; this "
            f"release expects a single one of at least {needed} bytes. Remove the connector for this model"
        )
    return next(iter(storages))
