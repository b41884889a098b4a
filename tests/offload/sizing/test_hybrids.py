"""Bytes of KV per token of hybrid models: layers as vLLM deals them, checkpoints as we keep them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from offload.scheduler.groups import Group, Groups, Kind
from offload.sizing.hybrids import CHUNK, FULL, LINEAR, WINDOW, deal
from offload.sizing.kv_bytes import bytes_per_token

BLOCK = 16
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
    },
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
}


@pytest.mark.parametrize(
    ("config", "layer_bytes", "layers", "made_of"),
    [
        (GEMMA_3_27B, 8192, 10 * 1.5, "slots of 10 layers, 16 KV heads of 2 x 128 elements, 2 bytes each; "
         "1 slots per block, and 384 for a checkpoint every 768 blocks"),
        (GPT_OSS_20B, 2048, 12 * 1.5, "and 8 for a checkpoint every 16 blocks"),
        ({**GPT_OSS_20B, "layer_types": None}, 2048, 12 * 1.5, "slots of 12 layers"),
        (LLAMA_4_SCOUT, 4096, 12 * 1.5, "and 1533 for a checkpoint every 3066 blocks"),
        (QWEN3_NEXT_80B, 2048, 12 * 1.5, "and 3 for a checkpoint every 6 blocks"),
        (MISTRAL_7B, 4096, 32 / 2, "0 slots per block, and 256 for a checkpoint every 512 blocks"),
    ],
    ids=["Gemma 3", "gpt-oss", "gpt-oss without a list", "Llama 4", "Qwen3-Next", "Mistral"],
)  # fmt: skip
def test_models(
    config: dict[str, Any], layer_bytes: int, layers: float, made_of: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    token = bytes_per_token(str(tmp_path))
    assert token.count == layer_bytes * layers
    assert made_of in token.made_of and token.has_checkpoints


def test_layers_that_are_listed_come_before_what_is_usual(tmp_path: Path) -> None:
    text = {**LLAMA_4_SCOUT["text_config"], "no_rope_layers": [1, 0] * 24}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_4_SCOUT, "text_config": text}))
    assert "slots of 24 layers" in bytes_per_token(str(tmp_path)).made_of


COUNTS: list[dict[str, int]] = [
    {FULL: 10, WINDOW: 52},
    {FULL: 5, WINDOW: 29},
    {FULL: 13, WINDOW: 12},
    {FULL: 12, WINDOW: 18},
    {FULL: 24, WINDOW: 3},
    {FULL: 12, CHUNK: 36},
    {FULL: 12, LINEAR: 36},
    {FULL: 30, LINEAR: 2},
    {FULL: 4, WINDOW: 8, CHUNK: 7},
    {WINDOW: 32},
    {WINDOW: 8, CHUNK: 20},
]
SPANS = {WINDOW: 1000, CHUNK: 200}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_layers_are_dealt_as_vllm_does_and_checkpoints_kept_as_the_connector_does(
    counts: dict[str, int],
) -> None:
    dealt = deal([kind for kind, num in counts.items() for _ in range(num)], SPANS)
    groups, group_layers = by_vllm(counts)
    assert dealt == (group_layers, groups.columns, groups.bag_slots, groups.spacing)
    share = groups.columns + groups.bag_slots / groups.spacing
    assert dealt.layers == group_layers * share


def by_vllm(counts: Mapping[str, int]) -> tuple[Groups, int]:
    """The groups, and how many layers each has room for."""
    common: dict[str, Any] = {
        "block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32
    }  # fmt: skip
    specs: dict[str, KVCacheSpec] = {
        FULL: FullAttentionSpec(**common),
        WINDOW: SlidingWindowSpec(sliding_window=SPANS[WINDOW], **common),
        CHUNK: ChunkedLocalAttentionSpec(attention_chunk_size=SPANS[CHUNK], **common),
        LINEAR: MambaSpec(
            block_size=BLOCK,
            shapes=((1,),),
            dtypes=(torch.float32,),
            page_size_padded=FullAttentionSpec(**common).page_size_bytes,
            mamba_cache_mode="align",
        ),
    }
    names = {f"{kind}.{index}": specs[kind] for kind, num in counts.items() for index in range(num)}
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "LBHNC"
    made = get_kv_cache_groups(config, names)
    kinds = {FullAttentionSpec: Kind.FULL, SlidingWindowSpec: Kind.WINDOW,
             ChunkedLocalAttentionSpec: Kind.CHUNK, MambaSpec: Kind.STATE}  # fmt: skip
    spans = {Kind.WINDOW: SPANS[WINDOW] - 1, Kind.CHUNK: SPANS[CHUNK]}
    groups: Sequence[Group] = [
        Group(kind, BLOCK, spans.get(kind, 0)) for kind in (kinds[type(each.kv_cache_spec)] for each in made)
    ]
    return Groups(groups, BLOCK), max(len(each.layer_names) for each in made)
