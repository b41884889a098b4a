"""Models with windows, local chunks or linear attention in some layers: what of their KV the pool keeps.

vLLM deals layers of one kind into groups of equally many, and a block of any group is as large. The pool
keeps all blocks of groups with full attention, and of the others those of checkpoints: at the distance that
is kept between them, as ``offload.scheduler.groups.Groups`` has it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

FULL, WINDOW, CHUNK, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
KINDS = (FULL, WINDOW, CHUNK, LINEAR)
SPAN_KEYS = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}
"""What says how many tokens back layers of a kind look."""

_BLOCK = 16
"""Tokens of a block, unless vLLM is told otherwise. A larger one makes checkpoints rarer and larger alike."""

_FEW_MORE = 1.5
"""If one kind has less than so many times the layers of another, vLLM pads groups to the larger number."""


class Dealt(NamedTuple):
    """How a model's layers lie in the pool.

    Attributes:
        group_layers: layers of a group, and so of a slot.
        columns: slots of a block of tokens.
        bag_slots: slots of a checkpoint.
        spacing: blocks from one checkpoint to the next.
    """

    group_layers: int
    columns: int
    bag_slots: int
    spacing: int

    @property
    def layers(self) -> float:
        """Layers of which the pool keeps the KV of a token, on average."""
        return self.group_layers * (self.columns + self.bag_slots / self.spacing)


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """The kind of each layer, as ``config`` says it or, for some models, leaves it to be understood."""
    if config.get("layer_types"):
        return list(map(str, config["layer_types"]))
    match config.get("model_type"):
        case "gemma2":
            every, other = 2, WINDOW
        case "gemma3_text":
            every, other = config.get("sliding_window_pattern") or 6, WINDOW
        case "gpt_oss":
            every, other = 2, WINDOW
        case "llama4_text":
            if config.get("no_rope_layers"):
                return [CHUNK if has_rope else FULL for has_rope in config["no_rope_layers"]]
            every, other = config.get("no_rope_layer_interval") or 4, CHUNK
        case "qwen3_next":
            every, other = config.get("full_attention_interval") or 4, LINEAR
        case _:
            has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
            return [WINDOW if has_window else FULL] * num_layers
    return [other if (index + 1) % every else FULL for index in range(num_layers)]


def deal(kinds: Sequence[str], spans: Mapping[str, int]) -> Dealt:
    """Deal layers of these kinds into groups as vLLM does. ``spans``: tokens, of windows and chunks."""
    counts = Counter(kinds)
    least, most = min(counts.values()), max(counts.values())
    group_layers = most if most < _FEW_MORE * least else least
    num_groups = {kind: -(-num // group_layers) for kind, num in counts.items()}
    bag_slots = sum(
        num * _blocks_of_bag(kind, spans.get(kind, 0)) for kind, num in num_groups.items() if kind != FULL
    )
    columns = num_groups.get(FULL, 0)
    spacing = max(-(-2 * bag_slots // max(columns, 1)), 1)
    return Dealt(group_layers, columns, bag_slots, spacing)


def _blocks_of_bag(kind: str, span: int) -> int:
    """Blocks that a checkpoint has of a group, at most."""
    match kind:
        case "sliding_attention":
            return -(-(span - 1) // _BLOCK)
        case "chunked_attention":
            return -(-(span - gcd(span, _BLOCK)) // _BLOCK)
        case _:
            return 1
