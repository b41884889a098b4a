"""Blocks of real models: how many bytes, in how many pieces."""

from __future__ import annotations

from typing import NamedTuple

from offload.worker.layout import BlockLayout, Region
from offload.worker.pool.memory import HostMemory

__all__ = ["SHAPES", "Shape", "layer_by_layer"]

_BLOCK_TOKENS = 16
_BF16_BYTES = 2


class Shape(NamedTuple):
    """A block of `num_pieces` times `piece_bytes`.

    Attributes:
        name: as in the rows.
        num_pieces: 1 if the engine lays a block out in one piece, else one per layer.
        piece_bytes: size of each.
    """

    name: str
    num_pieces: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes


class _Model(NamedTuple):
    """What a model keeps: `values` numbers in bf16 per token and layer."""

    name: str
    layers: int
    values: int


_MODELS = (
    # Figures are those of the models' config.json. Llama 3.1 8B: num_hidden_layers 32, num_key_value_heads 8,
    # head_dim 128; keys and values make 64 KiB per layer.
    _Model("llama-8b", 32, 2 * 8 * 128),
    # Qwen3 32B, and Qwen2.5 32B: num_hidden_layers 64, num_key_value_heads 8, head_dim 128.
    _Model("qwen-32b", 64, 2 * 8 * 128),
    # DeepSeek V2 Lite: num_hidden_layers 27, kv_lora_rank 512, qk_rope_head_dim 64; one latent vector instead
    # of keys and values, 18 KiB per layer.
    _Model("deepseek-v2-lite", 27, 512 + 64),
)


def _shapes() -> dict[str, Shape]:
    found = {}
    for name, layers, values in _MODELS:
        layer_bytes = _BLOCK_TOKENS * values * _BF16_BYTES
        for shape in (Shape(name, 1, layers * layer_bytes), Shape(f"{name}-per-layer", layers, layer_bytes)):
            found[shape.name] = shape
    return found


SHAPES = _shapes()
"""By name; shapes with blocks of the same size stand side by side."""


def layer_by_layer(shape: Shape, num_blocks: int, address: int, pool: HostMemory) -> BlockLayout:
    """Blocks at `address` whose pieces lie side by side, as one layer's do in a layer-outermost cache."""
    span = num_blocks * shape.piece_bytes
    regions = [
        Region(address + number * span, shape.piece_bytes, shape.piece_bytes)
        for number in range(shape.num_pieces)
    ]
    return BlockLayout(regions, pool.address, slots_per_registration=pool.slots_per_registration)
