"""The namespace of KV that outlives an engine: all that must be equal for its bytes to be usable."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.errors import UnsupportedError
from offload.vllm.fingerprint import take_fingerprint

_FORMAT = 2
_END_BYTES = 64 << 10
"""Read of each file of weights, at its beginning and at its end."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_PICKLES = ("sha256", "xxhash")
"""Hash algorithms that pickle what they hash, so that they depend on Python's version."""


def check_hashes(vllm_config: VllmConfig) -> None:
    """Refuse prefix hashes that another process would not find again.

    Raises:
        UnsupportedError: xxhash without a seed of its own.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and not os.environ.get("PYTHONHASHSEED"):
        raise UnsupportedError(
            f"prefix_caching_hash_algo is {algorithm}, which has another seed in every process: a tier would "
            f"never find anything again. Set the environment variable PYTHONHASHSEED to a number, the same "
            f"for all engines, or --prefix-caching-hash-algo sha256_cbor"
        )


def hash_advice(vllm_config: VllmConfig) -> str | None:
    """What to say of prefix hashes that may differ where the content is the same; None: nothing."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _PICKLES:
        return None
    return (
        f"prefix_caching_hash_algo is {algorithm}, which may hash the same content otherwise in another "
        f"process, and then finds nothing there; --prefix-caching-hash-algo {algorithm}_cbor does not"
    )


def namespace_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Of an engine, as text that is compared in full. The rank and sizes are not in it.

    Only workers know it: attention backends are those that their layers have, whatever was asked for.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    seed = os.environ.get("PYTHONHASHSEED", "")
    algorithm = cache.prefix_caching_hash_algo
    told: dict[str, Any] = {
        "format": _FORMAT,
        "vllm": vllm.__version__,
        "model": {**model.hf_text_config.to_dict(), "_name_or_path": ""},
        "length": model.max_model_len,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "weights": weights_of(vllm_config),
        "cache": take_fingerprint(vllm_config, kv_cache_config)._replace(kv_offload="", vllm=""),
        "block": cache.block_size,
        "backends": backends_of(vllm_config, kv_cache_config),
        "ranks": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
        ],
        "device": _device(),
        "hash": [algorithm, hashlib.sha256(seed.encode()).hexdigest()],
    }
    if algorithm in _PICKLES:
        told["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return json.dumps(told, sort_keys=True, default=str)


def backends_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Of the layers that have KV, each once; in the scheduler's process, which has no layers: none."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    backends = {layers[name].get_attn_backend() for name in names if name in layers}
    return sorted({f"{backend.__module__}.{backend.__qualname__}" for backend in backends})


def weights_of(vllm_config: VllmConfig) -> list[list[object]]:
    """Name, size and both ends of each file of weights, or what else says which they are.

    Raises:
        UnsupportedError: a directory without such files.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return [["dummy", model.model, model.seed]]
    directory = Path(model.model)
    if directory.is_dir():
        found = [_described(path, directory) for path in sorted(_files(directory))]
        if not found:
            raise UnsupportedError(
                f"{directory}: no weights lie there ({', '.join(_WEIGHTS)}), so that a tier could not tell "
                f"these from others; put them there, or remove tiers"
            )
        return found
    return [[model.model, str(model.revision), _commit(model)]]


def _device() -> str:
    """What computes. One backend may divide blocks otherwise on another GPU, and then bytes lie otherwise."""
    capability = current_platform.get_device_capability()
    kind = envs.VLLM_TARGET_DEVICE
    return kind if capability is None else f"{kind} {capability.as_version_str()}"


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and path.name.endswith(_WEIGHTS))


def _described(path: Path, directory: Path) -> list[object]:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return [str(path.relative_to(directory)), size, digest.hexdigest()]


def _commit(model: Any) -> str:
    """The commit of a model from a hub, as its configuration was resolved."""
    return str(getattr(model.hf_config, "_commit_hash", None))
