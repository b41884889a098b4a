"""vLLM's cache groups as ``offload.scheduler.groups``."""

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from offload.scheduler.groups import Group, Groups, Kind

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

KINDS: dict[type[KVCacheSpec], Kind] = {
    FullAttentionSpec: Kind.FULL,
    MLAAttentionSpec: Kind.FULL,
    SinkFullAttentionSpec: Kind.FULL,
    SlidingWindowSpec: Kind.WINDOW,
    SlidingWindowMLASpec: Kind.WINDOW,
    ChunkedLocalAttentionSpec: Kind.CHUNK,
    MambaSpec: Kind.STATE,
}
"""What is served. Each by its own type: one that is derived may need other blocks."""


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Of the layers of a group, as far as they differ."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def is_full(spec: KVCacheSpec) -> bool:
    """Whether its layers attend to all tokens."""
    return all(KINDS.get(type(each)) is Kind.FULL for each in layer_specs(spec))


def describe(kv_cache_config: KVCacheConfig) -> str:
    """Kind and span of each group, the same on every rank of an engine; of several the block sizes, too."""
    specs = [layer_specs(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]
    kinds = []
    for spec in specs:
        kind = KINDS[type(spec)].name.lower() if type(spec) in KINDS else type(spec).__name__
        span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        size = f" in blocks of {spec.block_size}" if len(specs) > 1 else ""
        kinds.append(f"{kind}{f' {span}' if span else ''}{size}")
    return ", ".join(kinds)


def shape_of(kv_cache_config: KVCacheConfig) -> Groups | None:
    """Its groups by sizes of this rank's blocks; None if there are none.

    How many blocks a position and a bag have is the same on all ranks, and for the scheduler.
    """
    groups = []
    for index in cached_groups(kv_cache_config):
        spec = layer_specs(kv_cache_config.kv_cache_groups[index].kv_cache_spec)[0]
        window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
        span = {Kind.WINDOW: (window or 1) - 1, Kind.CHUNK: chunk or 0}
        kind = KINDS[type(spec)]
        groups.append(Group(kind, spec.block_size, span.get(kind, 0)))
    return Groups(groups, lcm(*(group.block_size for group in groups))) if groups else None


def least_slots(kv_cache_config: KVCacheConfig) -> int:
    """Slots that the smallest store takes: a chain position, and a bag if there are any."""
    groups = shape_of(kv_cache_config)
    return 1 if groups is None else groups.least


def cached_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """Ids of the groups whose blocks have prefix hashes. The engine makes what is in others anew."""
    return [
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True)
        and getattr(group.kv_cache_spec, "prefix_cacheable", True)
    ]


class EventGroup(NamedTuple):
    """A group as KV events tell of it.

    Attributes:
        group_id: vLLM's.
        kind: in vLLM's words.
        window: tokens of a sliding window; None where the kind has none.
        group: what it needs.
    """

    group_id: int
    kind: str
    window: int | None
    group: Group


def groups_of(vllm_config: VllmConfig, kv_cache_manager: "KVCacheManager") -> Groups:
    """The groups that ``cached_groups`` lists, with sizes as the scheduler counts them."""
    groups = [each.group for each in event_groups(vllm_config, kv_cache_manager)]
    return Groups(groups, kv_cache_manager.coordinator.scheduler_block_size)


def event_groups(vllm_config: VllmConfig, kv_cache_manager: "KVCacheManager") -> list[EventGroup]:
    """The same, with what vLLM's own events say of them."""
    managers = kv_cache_manager.coordinator.single_type_managers
    writes_late = getattr(vllm_config.cache_config, "use_replayssm", False)
    groups = []
    for index in cached_groups(kv_cache_manager.kv_cache_config):
        kind, window = kv_cache_manager.kv_cache_event_metadata[index]
        groups.append(EventGroup(index, kind, window, _group(managers[index], writes_late)))
    return groups


def _group(manager: "SingleTypeKVCacheManager", writes_late: bool) -> Group:
    """``writes_late``: states are not written in every step."""
    spec = layer_specs(manager.kv_cache_spec)[0]
    kind, span, moves = KINDS[type(spec)], 0, False
    match kind:
        case Kind.WINDOW:
            span = manager.sliding_window - 1 + getattr(manager, "extra_retained_tokens", 0)
        case Kind.CHUNK:
            span = manager.attention_chunk_size
        case Kind.STATE:
            moves = writes_late or manager.num_speculative_blocks > 0
    return Group(kind, manager.block_size, span, moves)
