"""How many bytes of KV a token takes, from a model's config.json alone."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import OffloadError, UnsupportedError
from offload.sizing.hybrids import FULL, KINDS, LINEAR, SPAN_KEYS, WINDOW, deal, layer_kinds

_ELEMENT_BYTES = 2
"""vLLM serves float16 and bfloat16 models as they are, float32 ones as one of these, and KV likewise."""

_MLA_MODELS = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"},
)
"""Model types with one latent vector per token and layer in vLLM, and no index beside it."""

_STATE_KEYS = ("mamba", "ssm", "conv_", "linear_attn", "rwkv")
"""Beginnings of keys that only models with a recurrent state have, of a kind that is not counted here."""

_NOT_COUNTED = {
    "attn_type_list": "only some of its layers have full attention",
    "block_configs": "its layers differ",
    "global_head_dim": "its layers differ",
    "hybrid_override_pattern": "only some of its layers have full attention",
    "layers_block_type": "only some of its layers have full attention",
    "is_encoder_decoder": "it has an encoder",
    "index_topk": "it keeps an index beside the KV",
    "num_kv_shared_layers": "its layers share KV",
    "multi_query": "its KV heads are counted in another way",
    "multi_query_attention": "its KV heads are counted in another way",
    "num_global_key_value_heads": "its layers differ",
    "num_kv_heads": "its KV heads are counted in another way",
}
"""Keys of models that take more or less than the sum below, and why."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """KV of one token over all layers; of windows and states what checkpoints have, spread over all tokens.

    Attributes:
        count: bytes.
        made_of: how they add up, for people; empty for a number that was given.
        has_checkpoints: requests go on at checkpoints only, which the bytes are a mean of.
    """

    count: int
    made_of: str = ""
    has_checkpoints: bool = False


def bytes_per_token(model: str) -> TokenBytes:
    """KV of one token; ``model`` is that number itself, or a directory with a Hugging Face config.json.

    Raises:
        OffloadError: neither a positive number nor such a directory.
        UnsupportedError: a model whose KV cannot be told from its configuration.
    """
    if re.fullmatch(r"[+-]?\d{1,18}", model):
        if int(model) < 1:
            raise OffloadError(f"{model} bytes of KV per token; give a positive number, such as 131072")
        return TokenBytes(int(model))
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OffloadError(
            f"{path}: {error.strerror}; give a model's directory, or the bytes of KV per token as a number"
        ) from None
    except ValueError as error:
        raise OffloadError(f"{path} is not JSON ({error}); {_REMEDY}") from None
    if not isinstance(config, dict):
        raise OffloadError(f"{path} is not a JSON object; {_REMEDY}")
    text = config.get("text_config")
    return _count({**config, **text} if isinstance(text, dict) else config, str(path))


_REMEDY = "give the bytes of KV per token as a number (vLLM's log says how many tokens fit how much memory)"


def _count(config: Mapping[str, Any], where: str) -> TokenBytes:
    _refuse_what_is_not_counted(config, where)
    layers = _number(config, "num_hidden_layers", where)
    if config.get("kv_lora_rank") is not None:
        if config.get("model_type") not in _MLA_MODELS:
            raise _unsupported(
                where, "model_type", config.get("model_type"), "its kind of MLA is unknown here"
            )
        latent = _number(config, "kv_lora_rank", where) + _number(config, "qk_rope_head_dim", where)
        made_of = f"{layers} layers, MLA of {latent} elements, {_ELEMENT_BYTES} bytes each"
        return TokenBytes(layers * latent * _ELEMENT_BYTES, made_of)
    heads = _number(config, "num_attention_heads", where)
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _number(config, "num_key_value_heads", where)
    if config.get("head_dim") is not None:
        head_dim = _number(config, "head_dim", where)
    else:
        head_dim = _number(config, "hidden_size", where) // heads
    layer_bytes = 2 * kv_heads * head_dim * _ELEMENT_BYTES
    made_of = f"{kv_heads} KV heads of 2 x {head_dim} elements, {_ELEMENT_BYTES} bytes each"
    kinds = _kinds(config, layers, where)
    if set(kinds) == {FULL}:
        return TokenBytes(layers * layer_bytes, f"{layers} layers, {made_of}")
    spans = {kind: _number(config, SPAN_KEYS[kind], where) for kind in set(kinds) & set(SPAN_KEYS)}
    dealt = deal(kinds, spans)
    made_of = (
        f"slots of {dealt.group_layers} layers, {made_of}; {dealt.columns} slots per block, "
        f"and {dealt.bag_slots} for a checkpoint every {dealt.spacing} blocks"
    )
    return TokenBytes(math.ceil(layer_bytes * dealt.layers), made_of, has_checkpoints=True)


def _kinds(config: Mapping[str, Any], layers: int, where: str) -> Sequence[str]:
    """Of all layers, where their KV can be counted."""
    kinds = layer_kinds(config, layers)
    others = ", ".join(sorted(set(kinds) - set(KINDS)))
    if others:
        raise _unsupported(where, "layer_types", others, "what such layers keep is unknown here")
    if len(kinds) != layers:
        raise _unsupported(where, "layer_types", f"of {len(kinds)} layers", f"the model has {layers}")
    if LINEAR in kinds and not set(kinds) <= {LINEAR, FULL}:
        raise _unsupported(
            where, "layer_types", ", ".join(sorted(set(kinds))), "the size of blocks is unknown"
        )
    if set(kinds) == {LINEAR}:
        raise _unsupported(where, "layer_types", LINEAR, "the size of a state is unknown here")
    windowed_from = config.get("max_window_layers")
    if WINDOW in kinds and not config.get("layer_types") and windowed_from not in (None, 0, layers):
        raise _unsupported(where, "max_window_layers", windowed_from, "which layers are windowed is unknown")
    return kinds


def _refuse_what_is_not_counted(config: Mapping[str, Any], where: str) -> None:
    for key, value in config.items():
        if not value:
            continue
        if key in _NOT_COUNTED:
            raise _unsupported(where, key, value, _NOT_COUNTED[key])
        if key.startswith(_STATE_KEYS):
            raise _unsupported(where, key, value, "it keeps a state beside the KV (Mamba or the like)")
    quantized = config.get("quantization_config")
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if isinstance(quantized, Mapping) and quantized.get(key):
            raise _unsupported(where, key, quantized[key], "its KV is quantized")


def _number(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UnsupportedError(f"{where}: {key} is {value!r}, not a positive whole number; {_REMEDY}")
    return value


def _unsupported(where: str, key: str, value: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {key} is {str(value)[:60]}, so the KV of a token cannot be told: {why}; {_REMEDY}"
    )
