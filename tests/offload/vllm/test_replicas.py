"""Which ranks hold the same KV, asked of vLLM's own configurations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from offload.vllm.replicas import Shape, replica_shape
from tests.strategies import thorough

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas  # since 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

Configure = Callable[..., VllmConfig]


def full(num_kv_heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=num_kv_heads, head_size=64, head_size_v=64, dtype=torch.float32
    )


def latent(max_tp_shards: int | None = 1) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        head_size_v=576,
        dtype=torch.float32,
        max_tp_shards=max_tp_shards,
    )


STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


def cache_of(*specs: KVCacheSpec) -> KVCacheConfig:
    """With a group for each."""
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(4, [], groups)


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Makes the configuration of an engine for a model with so many KV heads; more of its config if given."""

    def make(num_kv_heads: int, num_ranks: int, dcp: int = 1, pcp: int = 1, **model: Any) -> VllmConfig:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": num_kv_heads,
            "vocab_size": 256,
            "max_position_embeddings": 512,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | model))
        vllm_config: VllmConfig = EngineArgs(
            str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=32,
            tensor_parallel_size=num_ranks,
            distributed_executor_backend="mp" if num_ranks > 1 else "uni",
        ).create_engine_config()
        parallel = vllm_config.parallel_config  # no runner of the CPU backend takes what follows
        parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size = dcp, pcp
        return vllm_config

    return make


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "copies"),
    [(1, 1, 1), (1, 2, 2), (1, 8, 8), (2, 8, 4), (4, 8, 2), (8, 8, 1), (16, 8, 1), (8, 2, 1)],
)
def test_heads_are_copied_where_there_are_fewer_than_ranks(
    configure: Configure, num_kv_heads: int, num_ranks: int, copies: int
) -> None:
    config = configure(num_kv_heads, num_ranks)
    spec = full(config.model_config.get_num_kv_heads(config.parallel_config))
    assert replica_shape(config, cache_of(spec)) == Shape(copies)
    assert replica_shape(config, cache_of(spec, spec)) == Shape(copies)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize(
    "specs", [(latent(),), (latent(), latent()), (latent(2),)], ids=["one", "two groups", "two shards"]
)
def test_latent_attention_is_as_vllm_says(
    configure: Configure, num_ranks: int, specs: tuple[KVCacheSpec, ...]
) -> None:
    cache = cache_of(*specs)
    expected = kv_cache_groups_tp_replicas(cache.kv_cache_groups, num_ranks)
    assert expected == max(1, num_ranks // specs[0].max_tp_shards)  # type: ignore[attr-defined]
    assert replica_shape(configure(16, num_ranks), cache) == Shape(expected)


def test_layers_of_one_group_are_asked_one_by_one(configure: Configure) -> None:
    specs = {"layer.0": latent(), "layer.1": latent(2)}
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    assert replica_shape(configure(16, 8), cache_of(group)) == Shape(4)


def test_the_least_of_all_layers_counts(configure: Configure) -> None:
    assert replica_shape(configure(2, 8), cache_of(latent(), full())) == Shape(4)
    assert replica_shape(configure(2, 8), cache_of(latent(), full(2))) == Shape(1)


def test_what_has_a_state_is_divided(configure: Configure) -> None:
    assert replica_shape(configure(1, 2, pcp=2), cache_of(full(), STATE)) == Shape()


@pytest.mark.parametrize("pcp", [1, 2])
def test_decode_context_parallelism_divides_everything(configure: Configure, pcp: int) -> None:
    config = configure(1, 4, dcp=2, pcp=pcp)
    assert replica_shape(config, cache_of(full())) == replica_shape(config, cache_of(latent())) == Shape()


@pytest.mark.parametrize(("num_kv_heads", "num_ranks"), [(2, 2), (1, 1), (1, 4)])
def test_trap_79_ranks_of_prefill_context_parallelism_hold_the_same(
    configure: Configure, num_kv_heads: int, num_ranks: int
) -> None:
    config = configure(num_kv_heads, num_ranks, pcp=2)
    assert replica_shape(config, cache_of(full())) == Shape(num_ranks // num_kv_heads, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"num_global_key_value_heads": 8},
        {"swa_num_key_value_heads": 8},
        {"layers": [{"num_kv_heads": 3}]},
        {"kv_heads_of_layers": [{"kv_heads": [1, 8]}]},
        {"block_configs": [{"attention": {"n_heads_in_group": 4}}]},
    ],
)
def test_models_whose_layers_differ_in_heads_are_not_taken_for_granted(
    configure: Configure, more: dict[str, Any]
) -> None:
    """Which layer has which is up to the model: on 8 ranks all may hold other heads."""
    assert replica_shape(configure(1, 8, **more), cache_of(full())) == Shape()
    assert replica_shape(configure(1, 8, **more), cache_of(latent())) == Shape(8)


def test_a_cache_without_layers_has_no_copies(configure: Configure) -> None:
    assert replica_shape(configure(1, 2), cache_of()) == Shape()


@given(tensor=st.integers(1, 4), sets=st.integers(1, 4), prefill=st.integers(1, 3))
@thorough(100)
def test_sets_divide_the_ranks_of_a_stage(tensor: int, sets: int, prefill: int) -> None:
    """Every rank is in one, neighbours of tensor parallelism are together, and all agree."""
    num_tensor, shape = tensor * sets, Shape(tensor, prefill)
    members = [shape.members_of(rank % num_tensor, num_tensor) for rank in range(num_tensor * prefill)]
    assert all(rank in theirs and theirs == tuple(sorted(theirs)) for rank, theirs in enumerate(members))
    assert all(len(theirs) == tensor * prefill for theirs in members)
    assert sorted(rank for theirs in set(members) for rank in theirs) == list(range(len(members)))
    assert all(members[other] == theirs for theirs in members for other in theirs)
    assert all(len({rank % num_tensor // tensor for rank in theirs}) == 1 for theirs in members)
