"""Bytes of KV per token from a model's configuration, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OffloadError, UnsupportedError
from offload.sizing.kv_bytes import bytes_per_token

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def folder(path: Path, config: object) -> str:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "count", "made_of"),
    [
        (LLAMA_8B, 131072, "32 layers, 8 KV heads of 2 x 128 elements, 2 bytes each"),
        (MLA, 61 * 576 * 2, "61 layers, MLA of 576 elements, 2 bytes each"),
        ({**LLAMA_8B, "head_dim": 64}, 65536, "2 x 64"),
        ({**LLAMA_8B, "num_key_value_heads": None}, 524288, "32 KV heads"),
        ({**LLAMA_8B, "torch_dtype": "float32"}, 131072, "2 bytes"),
        ({**LLAMA_8B, "sliding_window": None}, 131072, ""),
        ({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}, 131072, ""),
        ({**LLAMA_8B, "layer_types": ["full_attention"] * 32}, 131072, ""),
        ({**LLAMA_8B, "is_encoder_decoder": False, "quantization_config": {"bits": 4}}, 131072, ""),
        ({"model_type": "seeing", "hidden_size": 1, "text_config": LLAMA_8B}, 131072, ""),
    ],
)
def test_models_that_can_be_counted(config: dict[str, Any], count: int, made_of: str, tmp_path: Path) -> None:
    token = bytes_per_token(folder(tmp_path, config))
    assert token.count == count
    assert made_of in token.made_of


def test_a_number_is_the_answer() -> None:
    assert bytes_per_token("131072").count == 131072
    for number in ("0", "-5"):
        with pytest.raises(OffloadError, match=f"{number} bytes .* give a positive number"):
            bytes_per_token(number)


@pytest.mark.parametrize(
    ("extra", "named", "reason"),
    [
        ({"layer_types": ["full_attention"] * 31}, "layer_types is of 31 layers", "the model has 32"),
        ({"layer_types": ["full_attention", "conv"] * 16}, "layer_types is conv", "unknown here"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types is linear_attention", "size of a state"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"] * 16, "sliding_window": 64},
            "layer_types is linear_attention, sliding_attention",
            "the size of blocks",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "sliding_window is None", "positive"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 16}, "attention_chunk_size is None", ""),
        ({"sliding_window": 4096, "max_window_layers": 28}, "max_window_layers is 28", "which layers"),
        ({"attn_type_list": [0, 1]}, "attn_type_list", "only some of its layers"),
        ({"global_head_dim": 512}, "global_head_dim is 512", "its layers differ"),
        ({"mamba_d_state": 128}, "mamba_d_state is 128", "a state beside the KV"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg", "a state beside the KV"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern", "only some of its layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder", "an encoder"),
        ({"multi_query": True}, "multi_query", "counted in another way"),
        ({"index_topk": 2048}, "index_topk is 2048", "an index"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "model_type is llama", "its kind of MLA"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme", "quantized"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "FP8", "quantized"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None", "not a positive whole number"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads is [8, 4]", "not a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0", "not a positive whole number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_others_are_refused(extra: dict[str, Any], named: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as refused:
        bytes_per_token(folder(tmp_path, {**LLAMA_8B, **extra}))
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert named in message
    assert reason in message
    assert "give the bytes of KV per token as a number" in message


@pytest.mark.parametrize(("content", "reason"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_file_that_is_no_configuration_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=reason):
        bytes_per_token(folder(tmp_path, content))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"No such file.*give a model's directory, or the bytes"):
        bytes_per_token(str(tmp_path / "nothing"))
