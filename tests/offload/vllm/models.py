"""Directories with a ``config.json`` and nothing else: enough for vLLM to configure an engine."""

import json
from pathlib import Path
from typing import Any

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "dtype": "float32",
}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    # vLLM serves windowed kinds by its Llama class as well, and looks up no further class for them.
    "sliding window": {"model_type": "mistral", "sliding_window": 64},
    "alternating windows": {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "chunks": {
        "model_type": "llama4_text",
        "attention_chunk_size": 64,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "hybrid": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
    },
}

KINDS = tuple(_KINDS)

LEAST_BLOCK_BYTES_PER_TOKEN = 2 * 1 * 32 * 2
"""Keys and values of one head in two layers, at one byte per element."""


def write_model(root: Path, kind: str) -> str:
    """Write the configuration of one of ``KINDS`` and return its directory."""
    directory = root / kind.replace(" ", "-")
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], **_SHAPE, **_KINDS[kind]}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
