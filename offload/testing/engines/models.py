"""Small Llama models made on the spot, so that nothing has to be downloaded.

The weights are random but of real size (``initializer_range`` 0.12): attention then matters, different
prompts give different log-probabilities, and a wrongly restored KV block shows. vLLM's own
``load_format="dummy"`` draws weights around 1e-3, which hides such errors; use it for speed alone.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "LLAMA_8B",
    "cached_directory",
    "kv_bytes_per_token",
    "llama_config_only",
    "llama_parameters",
    "tiny_eagle",
    "tiny_llama",
]

_FORMAT = 1  # part of the cache key; raise it when what is written below changes

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Shape of Llama 3.1 8B, for ``llama_config_only``: in bfloat16 131,072 bytes of KV per token."""


def kv_bytes_per_token(*, hidden_size: int, layers: int, heads: int, kv_heads: int, dtype_bytes: int) -> int:
    """Bytes of KV cache that one token takes over all layers (keys and values)."""
    return 2 * layers * kv_heads * (hidden_size // heads) * dtype_bytes


def llama_parameters(shape: Mapping[str, int]) -> int:
    """How many parameters a Llama of that shape (keys of ``LLAMA_8B``) has, embeddings not tied."""
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    kv_width = width // shape["heads"] * shape["kv_heads"]
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * inner + 2 * width
    return 2 * shape["vocab_size"] * width + shape["layers"] * layer + width


def tiny_llama(
    directory: Path | None = None,
    *,
    hidden_size: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 512,
    max_position_embeddings: int = 8192,
    intermediate_size: int | None = None,
    seed: int = 0,
    with_tokenizer: bool = False,
) -> Path:
    """Return a directory with a Llama checkpoint of the given shape, making it if it is not there yet.

    Args:
        directory: where made models are kept, one sub-directory per set of parameters; None means a
            directory below the system's temporary one.
        hidden_size: width of the model; a multiple of ``heads``.
        intermediate_size: width of the feed-forward layers; None means 8/3 of ``hidden_size``.
        vocab_size: tokens in the vocabulary; at least 260 with a tokenizer (bytes and specials).
        max_position_embeddings: longest sequence, in tokens.
        seed: seed of the random weights (float32).
        with_tokenizer: also write a byte-level tokenizer, which ``vllm serve`` needs.

    Raises ValueError for a shape that no Llama can have. Concurrent makers do not clash: each writes
    apart and renames into place.
    """
    _check_shape(hidden_size, layers, heads, kv_heads, vocab_size, max_position_embeddings, with_tokenizer)
    shape = {
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "intermediate_size": intermediate_size or _default_intermediate(hidden_size),
    }

    def write(target: Path) -> None:
        _write_weights(target, shape, seed)
        if with_tokenizer:
            _write_tokenizer(target, max_position_embeddings)

    return cached_directory(
        directory, "tiny-llama", shape | {"seed": seed, "tokenizer": with_tokenizer}, write
    )


def tiny_eagle(model: Path, *, seed: int = 0) -> Path:
    """Return a directory beside ``model``, one of ``tiny_llama``, with an EAGLE head for it.

    One layer with random weights, which has no input norm, behind a projection of embedding and hidden state.
    Embedding and output are the model's. What it drafts is hardly ever right, and depends on all of its KV.
    """

    def write(target: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig.from_pretrained(model)
        config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            llama: Any = LlamaForCausalLM
            made = llama(config).float().state_dict()
            width = config.hidden_size
            weights = {"fc.weight": torch.randn(width, 2 * width) * config.initializer_range}
        for name, weight in made.items():
            if name.startswith("model.layers.") and "input_layernorm" not in name:
                weights[name.removeprefix("model.")] = weight.contiguous()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(target)

    return cached_directory(model.parent, f"eagle-of-{model.name}", {"seed": seed}, write)


def llama_config_only(shape: Mapping[str, int] = LLAMA_8B, directory: Path | None = None) -> Path:
    """Return a directory with a Llama ``config.json`` alone, to be loaded with ``load_format="dummy"``.

    Args:
        shape: sizes under the keys of ``LLAMA_8B``.
        directory: as for ``tiny_llama``.
    """

    def write(target: Path) -> None:
        config = _llama_config(shape)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(target)

    return cached_directory(directory, "llama-config", dict(shape), write)


def _check_shape(
    hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int, with_tokenizer: bool
) -> None:
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "max_position_embeddings": positions}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if hidden < 1 or hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"hidden_size={hidden}: must be an even multiple of heads={heads}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads}: must divide heads={heads}")
    least = 260 if with_tokenizer else 4
    if vocab < least:
        raise ValueError(f"vocab_size={vocab}: must be at least {least}")


def _default_intermediate(hidden_size: int) -> int:
    """8/3 of the width, rounded up to a multiple of 32, as in Llama."""
    return -(-hidden_size * 8 // 3 // 32) * 32


def _llama_config(shape: Mapping[str, int]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_position_embeddings"],
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _write_weights(target: Path, shape: Mapping[str, int], seed: int) -> None:
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        llama: Any = LlamaForCausalLM
        llama(_llama_config(shape)).float().save_pretrained(target)


def _write_tokenizer(target: Path, max_length: int) -> None:
    """Write a byte-level tokenizer: 0 pad, 1 begin, 2 end, 3 unknown, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(specials + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def cached_directory(
    directory: Path | None, kind: str, key: Mapping[str, int | bool | str], write: Callable[[Path], None]
) -> Path:
    """Return ``directory/kind-hash(key)``, calling ``write`` on a fresh directory if it does not exist."""
    root = directory or Path(tempfile.gettempdir()) / f"kv-offload-models-{os.getuid()}"
    digest = hashlib.sha256(json.dumps([_FORMAT, dict(key)], sort_keys=True).encode()).hexdigest()[:16]
    final = root / f"{kind}-{digest}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=root))
    try:
        write(scratch)
        scratch.chmod(0o755)
        scratch.rename(final)
    except OSError:
        if not final.is_dir():  # otherwise another maker was first, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


if __name__ == "__main__":
    # A model to try a server with:
    # python -m vllm.entrypoints.openai.api_server --model $(python -m offload.testing.engines.models)
    print(tiny_llama(layers=8, heads=8, kv_heads=8, with_tokenizer=True))
