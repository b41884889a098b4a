"""Where vLLM puts a block's bytes: each is in exactly one region, and in no other block's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload import UnsupportedError
from offload.vllm.regions import VllmCache, block_bytes, block_regions, cache_address
from offload.worker.layout import Region

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

NUM_BLOCKS = 5


def config_of(*tensors: KVCacheTensor, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, list(tensors), kv_cache_groups=[])


def names(num_layers: int, first: int = 0) -> list[str]:
    return [f"layer.{number}" for number in range(first, first + num_layers)]


def covered(regions: list[Region], size: int, block: int) -> np.ndarray:
    """How many regions hold each byte of the allocation for that block."""
    times = np.zeros(size, dtype=np.int64)
    for region in regions:
        start = region.address + block * region.block_stride
        assert start >= 0
        assert start + region.piece_bytes <= size, f"{region} leaves the allocation of {size} bytes"
        times[start : start + region.piece_bytes] += 1
    return times


def check_covers(config: KVCacheConfig, bytes_of_block: list[np.ndarray]) -> None:
    """``bytes_of_block[b]`` tells for every byte of the allocation whether it is KV of block ``b``."""
    regions = block_regions(config)
    size = config.kv_cache_tensors[0].size
    everything = np.zeros(size, dtype=np.int64)
    for block, theirs in enumerate(bytes_of_block):
        times = covered(regions, size, block)
        assert (times[theirs] == 1).all(), "a byte of the block is in no region or in two"
        everything += times
    assert everything.max() == 1, "a byte belongs to two blocks"
    assert block_bytes(config) == sum(region.piece_bytes for region in regions)
    assert block_bytes(config) * config.num_blocks <= size


def brute_force(config: KVCacheConfig, page_bytes: int) -> list[np.ndarray]:
    """Bytes of each block by the address that ``KVCacheTensor`` promises for pages of ``page_bytes``."""
    blocks = []
    for block in range(config.num_blocks):
        theirs = np.zeros(config.kv_cache_tensors[0].size, dtype=bool)
        for tensor in config.kv_cache_tensors:
            for layer in range(len(tensor.layers)):
                start = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
                assert not theirs[start : start + page_bytes].any()
                theirs[start : start + page_bytes] = True
        blocks.append(theirs)
    return blocks


class TestByHand:
    def test_layers_outermost(self) -> None:
        page, layers = 64, 3
        tensor = KVCacheTensor(layers * page * NUM_BLOCKS, names(layers), page * NUM_BLOCKS, page)
        config = config_of(tensor)
        assert block_regions(config, 10_000) == [
            Region(10_000 + layer * page * NUM_BLOCKS, page, page) for layer in range(layers)
        ]
        check_covers(config, brute_force(config, page))

    def test_layers_outermost_with_padded_pages(self) -> None:
        page, padded = 60, 64
        config = config_of(KVCacheTensor(2 * padded * NUM_BLOCKS, names(2), padded * NUM_BLOCKS, padded))
        assert block_bytes(config) == 2 * padded
        check_covers(config, brute_force(config, page))

    def test_layers_outermost_in_two_tensors_of_different_pages(self) -> None:
        size = (2 * 64 + 16) * NUM_BLOCKS
        config = config_of(
            KVCacheTensor(size, names(2), 64 * NUM_BLOCKS, 64),
            KVCacheTensor(size, names(1, 2), 16 * NUM_BLOCKS, 16, offset=2 * 64 * NUM_BLOCKS),
        )
        assert [region.piece_bytes for region in block_regions(config)] == [64, 64, 16]
        check_covers(config, brute_force(config, 16))

    def test_heads_outermost(self) -> None:
        heads, piece, layers = 4, 16, 2
        layer_stride = heads * NUM_BLOCKS * piece
        config = config_of(KVCacheTensor(layers * layer_stride, names(layers), layer_stride, piece))
        assert block_regions(config, 7) == [
            Region(7 + layer * layer_stride + head * NUM_BLOCKS * piece, piece, piece)
            for layer in range(layers)
            for head in range(heads)
        ]
        check_covers(config, brute_force(config, piece))

    def test_blocks_outermost(self) -> None:
        page, layers = 64, 3
        config = config_of(KVCacheTensor(layers * page * NUM_BLOCKS, names(layers), page, layers * page))
        assert block_regions(config, 10_000) == [Region(10_000, layers * page, layers * page)]
        check_covers(config, brute_force(config, page))

    def test_blocks_outermost_in_two_tensors_and_padding(self) -> None:
        packed = 2 * 64 + 16 + 8  # two pages, a small one, and 8 bytes that hold nothing
        size = packed * NUM_BLOCKS
        config = config_of(
            KVCacheTensor(size, names(2), 64, packed),
            KVCacheTensor(size, names(1, 2), 16, packed, offset=2 * 64),
        )
        assert block_regions(config, 3) == [Region(3, packed, packed)]
        check_covers(config, brute_force(config, 16))

    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_single_block(self, layers: int) -> None:
        for tensor in (
            KVCacheTensor(layers * 64, names(layers), 64, 64),  # layers outermost
            KVCacheTensor(layers * 64, names(layers), 64, layers * 64),  # blocks outermost
        ):
            config = config_of(tensor, num_blocks=1)
            assert block_bytes(config) == layers * 64
            check_covers(config, brute_force(config, 64))


def full(head_size: int = 4, dtype: torch.dtype = torch.int8, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=2, num_kv_heads=3, head_size=head_size, dtype=dtype, **more)


def packed() -> FullAttentionSpec:
    """As of types that keep the scales beside the values: 11 bytes where the element type says 8."""
    return full(state_content_bytes=11)


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=2, num_kv_heads=1, head_size=20, dtype=torch.int8)


MODELS: dict[str, tuple[dict[str, KVCacheSpec], list[KVCacheLayout]]] = {
    "full attention": (dict.fromkeys(names(3), full()), list(KVCacheLayout)),
    "one layer": (dict.fromkeys(names(1), full()), list(KVCacheLayout)),
    "aligned blocks": (
        dict.fromkeys(names(2), full(block_stride_alignment=64)),
        [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC],
    ),
    "packed type": (dict.fromkeys(names(2), packed()), list(KVCacheLayout)),
    "latent attention": (dict.fromkeys(names(3), latent()), list(KVCacheLayout)),
    "two head sizes": (
        {**dict.fromkeys(names(2), full()), **dict.fromkeys(names(1, 2), full(head_size=6))},
        [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC],
    ),
}


@pytest.mark.parametrize(
    ("specs", "layout"),
    [
        pytest.param(specs, layout, id=f"{model}-{layout.name}")
        for model, (specs, layouts) in MODELS.items()
        for layout in layouts
    ],
)
def test_regions_are_where_vllms_own_views_write(
    specs: dict[str, KVCacheSpec], layout: KVCacheLayout
) -> None:
    config = placed(specs, layout)
    size = config.kv_cache_tensors[0].size
    raw = torch.zeros(size, dtype=torch.int8)
    bytes_of_block = []
    for block in range(config.num_blocks):
        raw.zero_()
        for tensor in config.kv_cache_tensors:
            spec = specs[tensor.layers[0]]
            for view in create_kv_cache_views(raw, spec, config.num_blocks, layout, tensor):
                view[block].fill_(1)
        bytes_of_block.append(raw.numpy() != 0)
    kv_bytes = sum(spec.unpadded_page_size_bytes for spec in specs.values())  # type: ignore[attr-defined]
    assert [int(theirs.sum()) for theirs in bytes_of_block] == [kv_bytes] * config.num_blocks
    check_covers(config, bytes_of_block)


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC])
def test_a_block_is_one_piece_where_blocks_are_outermost(layout: KVCacheLayout) -> None:
    (region,) = block_regions(placed(dict.fromkeys(names(3), full()), layout))
    assert region.block_stride == region.piece_bytes


def placed(specs: dict[str, KVCacheSpec], layout: KVCacheLayout) -> KVCacheConfig:
    """The configuration that vLLM itself makes for one cache group."""
    spec = next(iter(specs.values()))
    if len(set(specs.values())) > 1:
        spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=specs)
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
    )
    engine: Any = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None), model_config=None
    )
    config = get_kv_cache_config_from_groups(engine, [KVCacheGroupSpec(list(specs), spec)], 1 << 20)
    assert config.num_blocks == NUM_BLOCKS
    return config


class TestCacheAddress:
    config = config_of(KVCacheTensor(640, names(2), 64 * NUM_BLOCKS, 64))

    def test_is_that_of_the_allocation_behind_all_layers(self) -> None:
        raw = torch.zeros(700, dtype=torch.int8)
        caches = {"layer.0": raw[320:640], "layer.1": raw[:320].view(torch.float16)}
        assert cache_address(caches, self.config) == raw.data_ptr()

    def test_trap_85_layers_that_share_the_kv_of_others_add_nothing(self) -> None:
        """vLLM names them beside the layers whose KV they read; the configuration does not."""
        raw = torch.zeros(640, dtype=torch.int8)
        caches = {"layer.0": raw[:320], "layer.1": raw[320:]}
        shared = caches | {"layer.2": caches["layer.1"], "layer.3": caches["layer.0"][64:]}
        cache = VllmCache(self.config)
        assert cache.regions(shared) == cache.regions(caches) == block_regions(self.config, raw.data_ptr())
        assert sum(region.piece_bytes for region in cache.regions(shared)) == cache.block_bytes == 128

    def test_several_allocations_are_refused(self) -> None:
        caches = {name: torch.zeros(640, dtype=torch.int8) for name in names(2)}
        with pytest.raises(
            UnsupportedError, match=r"2 allocations of \[640, 640\] bytes.*Remove the connector"
        ):
            cache_address(caches, self.config)

    def test_an_allocation_that_is_too_small_is_refused(self) -> None:
        caches = {"layer.0": torch.zeros(639, dtype=torch.int8)}
        with pytest.raises(UnsupportedError, match=r"\[639\] bytes; this release expects .* at least 640"):
            cache_address(caches, self.config)
