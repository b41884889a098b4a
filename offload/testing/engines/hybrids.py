"""Tiny models with windows, local chunks or states beside full attention, made on the spot.

As in ``models``, weights are random but of real size. Some classes of transformers draw theirs around 0.02
whatever ``initializer_range`` says, so those are drawn again. States forget slowly, so that wrong ones show.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.testing.engines.models import cached_directory

__all__ = ["HYBRIDS", "Hybrid", "tiny_hybrid"]

WINDOW = 64
"""Tokens that a windowed layer sees."""

CHUNK = 160
"""Tokens in a local chunk."""

_WIDTH = 128
_RANGE = 0.12
_SMALL = 0.05
"""Matrices whose deviation is below this did not follow ``initializer_range``."""

_SLOW = -4.0
"""Bias of the time steps of states: what they hold is halved in tens of tokens, not in one."""

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_COMMON = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "initializer_range": _RANGE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Hybrid(NamedTuple):
    """A kind of model.

    Attributes:
        config_class: of transformers, by name.
        fields: what the configuration says beside the usual sizes.
        settings: of ``vllm.EngineArgs`` without which vLLM's CPU backend does not serve it.
        groups: the KV cache groups that vLLM makes of it, by the class of their specs.
        block_size: tokens of a block of each, where ``block_size=32`` is asked for.
    """

    config_class: str
    fields: Mapping[str, Any]
    groups: tuple[str, ...]
    settings: Mapping[str, Any] = {}
    block_size: int = 32


_FULL, _WINDOWED, _CHUNKED = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
_STATE = "MambaSpec"

HYBRIDS = {
    "gemma3": Hybrid(
        "Gemma3TextConfig",
        _ATTENTION | {"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
        (_WINDOWED,) * 5 + (_FULL,),
    ),
    "gpt_oss": Hybrid(
        "GptOssConfig",
        _ATTENTION
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        (_WINDOWED, _FULL),
    ),
    "mistral": Hybrid(
        "MistralConfig",
        _ATTENTION | {"num_hidden_layers": 4, "sliding_window": WINDOW},
        (_WINDOWED,),
    ),
    "llama4": Hybrid(
        "Llama4TextConfig",
        _ATTENTION
        | {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 2 * _WIDTH,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": CHUNK,
        },
        (_CHUNKED,) * 3 + (_FULL,),
    ),
    "qwen3_next": Hybrid(
        "Qwen3NextConfig",
        _ATTENTION
        | {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": _WIDTH,
            "shared_expert_intermediate_size": _WIDTH,
            "num_experts": 4,
            "num_experts_per_tok": 4,  # which ones would hang on the last bit of bfloat16
        },
        (_STATE,) * 3 + (_FULL,),
        settings={"dtype": "bfloat16"},
        block_size=544,
    ),
    "falcon_h1": Hybrid(
        "FalconH1Config",
        _ATTENTION
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_chunk_size": 32,
        },
        (_FULL, _STATE),
        settings={"max_num_batched_tokens": 64},
        block_size=64,
    ),
    "granite4": Hybrid(
        "GraniteMoeHybridConfig",
        _ATTENTION
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "shared_intermediate_size": _WIDTH,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_chunk_size": 32,
            "attention_multiplier": 32**-0.5,
        },
        (_STATE,) * 3 + (_FULL,),
        settings={"max_num_batched_tokens": 64},
        block_size=64,
    ),
}
"""What vLLM's CPU backend serves, with answers that do not depend on where a step ends.

Others do not start there. With LFM2, log-probabilities change by 0.01 where a step ends elsewhere.
"""


def tiny_hybrid(
    kind: str,
    directory: Path | None = None,
    *,
    vocab_size: int = 256,
    max_position_embeddings: int = 8192,
    seed: int = 0,
) -> Path:
    """Return a directory with a checkpoint of that kind, a key of ``HYBRIDS``, making it if it is not there.

    Args:
        directory, vocab_size, max_position_embeddings, seed: as for ``models.tiny_llama``.
    """
    hybrid = HYBRIDS[kind]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}

    def write(target: Path) -> None:
        _write(target, hybrid, sizes, seed)

    return cached_directory(directory, f"tiny-{kind}", {**sizes, "seed": seed, "kind": repr(hybrid)}, write)


def _write(target: Path, hybrid: Hybrid, sizes: Mapping[str, int], seed: int) -> None:
    import torch
    import transformers

    config_class: Callable[..., Any] = getattr(transformers, hybrid.config_class)
    config = config_class(**{**_COMMON, **hybrid.fields, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models: Any = transformers.AutoModelForCausalLM
        model = models.from_config(config).float()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and weight.std() < _SMALL:
                    weight.normal_(0.0, _RANGE)
                elif name.endswith("dt_bias"):
                    weight.fill_(_SLOW)
        model.save_pretrained(target)
