"""Which ranks hold the same KV, and how they meet."""

import re
from collections.abc import Iterator
from functools import reduce
from math import gcd
from typing import Any, NamedTuple

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_pcp_group, get_tp_group
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from offload.vllm.groups import layer_specs
from offload.worker.replicas import Replicas

_HEADS = re.compile(r"(kv|key_value)_.*heads?$|heads?_(kv|key_value)$|attention_groups$|query_group_num$")


class Shape(NamedTuple):
    """Ranks that hold the same KV, of each pipeline stage.

    Attributes:
        tensor: so many consecutive ranks of tensor parallelism.
        prefill: so many ranks of prefill context parallelism, which are all of them or one.
    """

    tensor: int = 1
    prefill: int = 1

    def members_of(self, tensor_rank: int, num_tensor: int) -> tuple[int, ...]:
        """Places of those that hold the KV of a rank, among all of a stage.

        Ranks of prefill context parallelism are apart by ``num_tensor``, those of tensor parallelism by one.
        """
        first = tensor_rank // self.tensor * self.tensor
        return tuple(
            prefill_rank * num_tensor + first + index
            for prefill_rank in range(self.prefill)
            for index in range(self.tensor)
        )


def replica_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shape:
    """How many ranks hold the same KV in every layer.

    vLLM knows for layers that say into how many parts they can be cut, as MLA's do
    (``kv_tp_replicas``). Heads of other layers are copied where there are fewer than ranks. What has a state
    is divided, and decode context parallelism divides everything.
    """
    parallel = vllm_config.parallel_config
    specs = [each for group in kv_cache_config.kv_cache_groups for each in layer_specs(group.kv_cache_spec)]
    if parallel.decode_context_parallel_size > 1 or not specs:
        return Shape()
    if not all(isinstance(spec, AttentionSpec) for spec in specs):
        return Shape()
    num_ranks = parallel.tensor_parallel_size
    heads = _copies_of_heads(vllm_config, num_ranks)
    copies = (_copies(spec, num_ranks, heads) for spec in specs)
    return Shape(reduce(gcd, copies, num_ranks), parallel.prefill_context_parallel_size)


def most_replicas(vllm_config: VllmConfig) -> int:
    """How many ranks hold the same KV at most, before the cache is known."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return 1
    num_ranks = parallel.tensor_parallel_size
    is_latent = vllm_config.model_config.use_mla
    copies = num_ranks if is_latent else _copies_of_heads(vllm_config, num_ranks)
    return int(copies * parallel.prefill_context_parallel_size)


def join_replicas(shape: Shape) -> Replicas | None:
    """In a worker: those that hold the KV of this rank; None if no other does."""
    if shape == Shape():
        return None
    tensor, prefill = get_tp_group(), get_pcp_group()

    def exchange(mine: Any) -> list[Any]:
        rows = _gather(prefill, _gather(tensor, mine))
        return [said for row in rows for said in row]

    members = shape.members_of(tensor.rank_in_group, tensor.world_size)
    place = prefill.rank_in_group * tensor.world_size + tensor.rank_in_group
    return Replicas(members, members.index(place), exchange)


def _copies(spec: AttentionSpec, num_ranks: int, copies_of_heads: int) -> int:
    """How many consecutive ranks have the KV of that layer."""
    if spec.max_tp_shards is not None:
        return max(1, num_ranks // int(spec.max_tp_shards))
    return copies_of_heads if spec.num_kv_heads == 1 else 1


def _copies_of_heads(vllm_config: VllmConfig, num_ranks: int) -> int:
    """How many ranks have each KV head, of the model and of what drafts.

    Layers may differ in heads, and which has how many is up to the model. So all numbers of heads count
    that its configuration has.
    """
    models = [vllm_config.model_config]
    if vllm_config.speculative_config is not None:
        models.append(vllm_config.speculative_config.draft_model_config)
    counts = {count for model in models if model is not None for count in _head_counts(model)}
    return reduce(gcd, (_copies_of_each(count, num_ranks) for count in counts), num_ranks)


def _copies_of_each(num_heads: int, num_ranks: int) -> int:
    return num_ranks // num_heads if 0 < num_heads < num_ranks and num_ranks % num_heads == 0 else 1


def _head_counts(model: ModelConfig) -> Iterator[int]:
    yield model.get_total_num_kv_heads()
    for layer in model.model_arch_config.per_layer_overrides or ():
        yield layer.get("total_num_kv_heads", model.get_total_num_kv_heads())
    settings = model.hf_text_config.to_dict()
    if settings.get("block_configs"):
        yield 0  # each layer has its own, under other names
    yield from _named_counts(settings)


def _named_counts(settings: Any, name: str = "") -> Iterator[int]:
    """Numbers of heads in a model's configuration, at any depth of it."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _named_counts(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _named_counts(value, name)
    elif isinstance(settings, int) and not isinstance(settings, bool) and _HEADS.search(name):
        yield settings


def _gather(group: Any, mine: Any) -> list[Any]:
    """What each rank of a group says, by rank."""
    said: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    return said
