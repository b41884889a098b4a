"""What must be equal for bytes to be usable is in the namespace: equal engines have the same, others not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from offload import UnsupportedError
from offload.vllm import namespace, support
from offload.vllm.namespace import check_hashes, namespace_of, weights_of
from offload.vllm.plugin import CONNECTOR, register
from tests.offload.vllm.models import write_model

SEED = "PYTHONHASHSEED"
WEIGHTS = "model-00001-of-00002.safetensors"
SIZE = 300_000
"""Bytes of a file of weights: more than both ends together that are read."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory with two files of weights."""
    path = Path(write_model(tmp_path, "llama"))
    for name in (WEIGHTS, WEIGHTS.replace("00001-of", "00002-of")):
        (path / name).write_bytes(bytes(range(250)) * (SIZE // 250))
    return path


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEED, raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def configure(model: Path, **arguments: Any) -> VllmConfig:
    settings = {"dtype": "float32", "block_size": 32, **arguments}
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, **settings
    ).create_engine_config()


def cache_of(
    vllm_config: VllmConfig, layout: str = "BLHNC", dtype: torch.dtype = torch.float32, num_heads: int = 1
) -> KVCacheConfig:
    """Two layers, as the model has them."""
    block_size = vllm_config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=num_heads, head_size=32, dtype=dtype)
    layers = ["layer.0", "layer.1"]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=8 * page, layers=layers, layer_stride=page, block_stride=2 * page)
    return KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout=layout,
    )


def told(model: Path, cache: dict[str, Any] | None = None, **arguments: Any) -> str:
    """The namespace of an engine with these arguments."""
    vllm_config = configure(model, **arguments)
    return namespace_of(vllm_config, cache_of(vllm_config, **(cache or {})))


Said = Callable[[], str]


@pytest.fixture
def said(model: Path) -> Said:
    """What an engine's namespace is with the weights as they are then."""
    vllm_config = configure(model)
    return lambda: namespace_of(vllm_config, cache_of(vllm_config))


# Equal


def test_equal_engines_have_the_same(model: Path) -> None:
    assert told(model) == told(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 0.5},
        {"scheduling_policy": "priority"},
        {"served_model_name": "another"},
        {"seed": 7},
    ],
    ids=str,
)
def test_what_does_not_touch_bytes_is_not_in_it(model: Path, arguments: dict[str, Any]) -> None:
    assert told(model, **arguments) == told(model)


def test_neither_is_where_the_weights_lie(model: Path, tmp_path: Path) -> None:
    """A copy of the model, or a mount of another name, serves as well."""
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copied)
    os.utime(copied / WEIGHTS, (1, 1))
    assert told(copied) == told(model)


def test_it_is_text_that_people_can_read(model: Path) -> None:
    found = json.loads(told(model))
    assert found["format"] == 2
    assert [name for name, _, _ in found["weights"]] == sorted(
        [WEIGHTS, WEIGHTS.replace("00001-of", "00002-of")]
    )


def test_no_secret_is_in_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows the seed of a hash can make prompts that meet others'."""
    monkeypatch.setenv(SEED, "123454321")
    assert "123454321" not in told(model)


# Weights


@pytest.mark.parametrize("position", [0, 100, 65_535, SIZE - 65_536, SIZE - 1])
def test_a_byte_at_either_end_of_weights(model: Path, said: Said, position: int) -> None:
    before = said()
    path = model / WEIGHTS
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert said() != before


def test_weights_of_another_size(model: Path, said: Said) -> None:
    before = said()
    content = (model / WEIGHTS).read_bytes()
    half = len(content) // 2
    (model / WEIGHTS).write_bytes(content[:half] + b"x" + content[half:])
    assert said() != before


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537])
def test_small_files_are_read_whole(model: Path, said: Said, size: int) -> None:
    path = model / "more.bin"
    path.write_bytes(bytes(size))
    before = said()
    path.write_bytes(bytes(size)[:-1] + b"x")
    assert said() != before


@pytest.mark.parametrize("name", ["model.gguf", "deeper/part.safetensors", "model.safetensors.index.json"])
def test_files_that_come_or_go(model: Path, said: Said, name: str) -> None:
    before = said()
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    assert said() != before
    path.unlink()
    assert said() == before


def test_a_directory_without_weights_is_refused(model: Path, said: Said) -> None:
    """As of loaders that take them from elsewhere: other weights would not be noticed."""
    for path in model.glob("*.safetensors"):
        path.unlink()
    (model / "model.tensors").write_bytes(b"1")
    with pytest.raises(UnsupportedError, match=f"{model}: .*safetensors.*remove tiers"):
        said()


def test_weights_that_changed_places(model: Path, said: Said) -> None:
    (model / WEIGHTS).write_bytes(b"first")
    (model / "other.safetensors").write_bytes(b"second")
    before = said()
    (model / WEIGHTS).write_bytes(b"second")
    (model / "other.safetensors").write_bytes(b"first")
    assert said() != before


def test_files_beside_weights_are_not_read(model: Path, said: Said) -> None:
    before = said()
    (model / "README.md").write_text("read me")
    assert said() == before


def test_weights_of_a_seed(model: Path) -> None:
    """Those of ``dummy`` are drawn."""
    first, second = (told(model, load_format="dummy", seed=seed) for seed in (0, 1))
    assert first != second and first != told(model)


class Hub:
    """What is known of a model that was named, not a directory."""

    def __init__(self, **changes: Any) -> None:
        values = {"model": "org/model", "revision": None, "commit": "aaa", **changes}
        self.model, self.revision = values["model"], values["revision"]
        self.hf_config = type("Config", (), {"_commit_hash": values["commit"]})()


@pytest.mark.parametrize("change", [{"model": "org/other"}, {"revision": "v2"}, {"commit": "bbb"}], ids=str)
def test_weights_of_a_hub(model: Path, change: dict[str, str]) -> None:
    vllm_config = configure(model)
    vllm_config.model_config = Hub()  # type: ignore[assignment]
    before = weights_of(vllm_config)
    assert weights_of(vllm_config) == before
    vllm_config.model_config = Hub(**change)  # type: ignore[assignment]
    assert weights_of(vllm_config) != before


# The rest


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"max_model_len": 256},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 12_345.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.5}},
        {"hf_overrides": {"num_hidden_layers": 1}},
    ],
    ids=str,
)
def test_other_engines_have_another(model: Path, arguments: dict[str, Any]) -> None:
    assert told(model, **arguments) != told(model)


@pytest.mark.parametrize("cache", [{"layout": "LBHNC"}, {"dtype": torch.bfloat16}, {"num_heads": 2}], ids=str)
def test_other_caches_have_another(model: Path, cache: dict[str, Any]) -> None:
    """Where the namespace does not say it, the size of a slot does, which is compared beside it."""
    vllm_config = configure(model)
    told, page = [], []
    for each in ({}, cache):
        config = cache_of(vllm_config, **each)
        told.append(namespace_of(vllm_config, config))
        page.append(config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    assert told[0] != told[1] or page[0] != page[1]


class Layer:
    """One of the model's, as a worker has it."""

    def __init__(self, backend: type) -> None:
        self._backend = backend

    def get_attn_backend(self) -> type:
        return self._backend


class OneBackend:
    """Of attention."""


class AnotherBackend(OneBackend):
    """With another layout, say."""


def test_the_backends_that_layers_have(model: Path) -> None:
    """Whatever was asked for: with nothing asked, machines have different ones."""
    told = {}
    for name, asked, backends in (
        ("scheduler", None, []),
        ("one", None, [OneBackend, OneBackend]),
        ("asked", "CPU_ATTN", [OneBackend, OneBackend]),
        ("another", None, [AnotherBackend, AnotherBackend]),
        ("both", None, [OneBackend, AnotherBackend]),
    ):
        vllm_config = configure(model, attention_backend=asked)
        layers = {f"layer.{index}": Layer(backend) for index, backend in enumerate(backends)}
        layers["without KV"] = Layer(Said)
        vllm_config.compilation_config.static_forward_context.update(layers)
        told[name] = namespace_of(vllm_config, cache_of(vllm_config))
    assert told["one"] == told.pop("asked"), "what is asked for does not matter"
    assert len(set(told.values())) == 4
    assert "OneBackend" in told["one"]


def test_another_seed_of_hashes(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {said()}
    for seed in ("0", "1"):
        monkeypatch.setenv(SEED, seed)
        found.add(said())
    assert len(found) == 3


@pytest.mark.parametrize(("algorithm", "differs"), [("sha256", True), ("sha256_cbor", False)])
def test_pickles_are_of_one_python(
    model: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, differs: bool
) -> None:
    vllm_config = configure(model, prefix_caching_hash_algo=algorithm)
    before = namespace_of(vllm_config, cache_of(vllm_config))
    newer = type("Version", (), {"major": 3, "minor": 99})
    monkeypatch.setattr(namespace.sys, "version_info", newer)
    assert (namespace_of(vllm_config, cache_of(vllm_config)) != before) is differs


def test_another_gpu(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer has blocks of 128 tokens on some, and two of 64 in their place on others."""
    found = set()
    for capability in (DeviceCapability(9, 0), DeviceCapability(10, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(current_platform, "get_device_capability", lambda found=capability: found)
            found.add(said())
    assert len(found) == 2


def test_another_vllm(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    before = said()
    monkeypatch.setattr(namespace.vllm, "__version__", "9.9.9")
    assert said() != before


# Hashes that another process would not find


def hashed(model: Path, algorithm: str) -> VllmConfig:
    vllm_config = configure(model)
    vllm_config.cache_config.prefix_caching_hash_algo = algorithm  # type: ignore[assignment]
    return vllm_config


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, ""])
def test_xxhash_without_a_seed_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    if seed is not None:
        monkeypatch.setenv(SEED, seed)
    vllm_config = hashed(model, algorithm)
    with pytest.raises(UnsupportedError) as refused:
        check_hashes(vllm_config)
    for part in (f"prefix_caching_hash_algo is {algorithm},", SEED, "--prefix-caching-hash-algo sha256_cbor"):
        assert part in str(refused.value)
    monkeypatch.setenv(SEED, "0")
    check_hashes(vllm_config)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_others_need_none(model: Path, algorithm: str) -> None:
    check_hashes(hashed(model, algorithm))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("others", ["nobody", "a tier", "peers"])
def test_one_line_recommends_hashes_that_are_the_same_everywhere(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: str,
    algorithm: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    register()
    monkeypatch.setattr(support, "check_pinning", lambda: None)
    tier = {"kind": "disk", "path": str(tmp_path), "gib": 1}
    more: dict[str, object] = {"a tier": {"tiers": [tier]}, "peers": {"peers": ["127.0.0.1:7100"]}}.get(
        others, {}
    )
    extra = {"cpu_gib": 0.01, **more}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with caplog.at_level("INFO", logger="offload"):
        configure(model, kv_transfer_config=transfer, prefix_caching_hash_algo=algorithm)
    advice = [text for text in caplog.messages if "--prefix-caching-hash-algo sha256_cbor" in text]
    assert len(advice) == (others != "nobody" and algorithm == "sha256")


@pytest.mark.parametrize("has_tier", [False, True])
def test_it_is_asked_where_there_are_tiers(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_tier: bool, tmp_path: Path
) -> None:
    register()
    monkeypatch.setattr(support, "check_pinning", lambda: None)
    tiers = [{"kind": "disk", "path": str(tmp_path), "gib": 1}] if has_tier else []
    extra = {"cpu_gib": 0.01, "tiers": tiers}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    start: Callable[[], VllmConfig] = lambda: configure(  # noqa: E731
        model, kv_transfer_config=transfer, prefix_caching_hash_algo="xxhash"
    )
    if has_tier:
        with pytest.raises(UnsupportedError, match=SEED):
            start()
    else:
        start()
