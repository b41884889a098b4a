"""Tiers that the configuration names, as places below the pool."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import UnsupportedError
from offload.files.tier_path import open_one
from offload.messages import POOL, Route, TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.tier import TierLimits, make_tier
from offload.tier_config import DISK, DiskConfig
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.vllm.places import Place
from offload.worker.media.lane import LanesBelow, PoolParts, medium_lanes, tier_facts
from offload.worker.media.slab import SlabMedium
from offload.worker.media.slab_file import SlabShape

_EXTENT_BYTES = 1 << 20


def tier_places(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> list[Place]:
    """A place for each tier of the configuration, in order."""
    if not config.tiers:
        return []
    groups = shape_of(kv_cache_config)
    columns = 1 if groups is None else groups.columns
    namespace = namespace_of(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    num_engines = max(parallel.data_parallel_size_local, 1)
    places = []
    for number, tier in enumerate(config.tiers):
        label = "disk" if len(config.tiers) == 1 else f"disk{number}"
        spill, fetch = Route("spill", POOL, label), Route("fetch", label, POOL)
        places.append(
            Place(
                partial(_make_flows, spill, fetch, tier, config.eviction_policy),
                partial(
                    _make_lanes,
                    spill,
                    fetch,
                    tier,
                    namespace,
                    parallel.rank,
                    parallel.world_size,
                    num_engines,
                    columns,
                ),
                {
                    "tier": label,
                    "kind": DISK,
                    "path": tier.path,
                    "gib": tier.gib,
                    "admit": str(tier.admit),
                    "namespace": hashlib.sha256(namespace.encode()).hexdigest()[:16],
                },
            )
        )
    return places


def _extent_slots(slot_bytes: int, columns: int) -> int:
    """Slots of the largest extent: the least power of two of positions that makes it a MiB on a rank."""
    position = max(columns, 1)
    return position << max(0, (_EXTENT_BYTES - 1) // (slot_bytes * position)).bit_length()


def _make_flows(
    spill: Route,
    fetch: Route,
    tier: DiskConfig,
    policy: str,
    common: Common,
    facts: Sequence[TierFacts],
) -> Below:
    limits = TierLimits(policy, tier.admit, tier.bytes_per_day)
    return make_tier(spill, fetch, common, facts, limits)


def _make_lanes(
    spill: Route,
    fetch: Route,
    tier: DiskConfig,
    namespace: str,
    rank: int,
    world_size: int,
    num_engines: int,
    columns: int,
    pool: PoolParts,
) -> LanesBelow:
    extent_slots = _extent_slots(pool.slots.slot_bytes, columns)
    shape = SlabShape(pool.slots.slot_bytes, extent_slots, 1)
    most_bytes = tier.num_bytes // (world_size * num_engines)
    record_bytes = 2 * (8 * extent_slots + 128)
    num_places = (most_bytes - (1 << 23)) // (shape.place_bytes + record_bytes) - 1
    if num_places < 1:
        raise UnsupportedError(
            f"the tier {tier.path} has {most_bytes:,} bytes for each rank, and one extent takes "
            f"{shape.place_bytes:,}; raise gib"
        )
    full = f"{namespace}\nrank {rank} of {world_size}, share {pool.share}"
    name = hashlib.sha256(full.encode()).hexdigest()[:16]

    def make(path: Path) -> SlabMedium:
        return SlabMedium(path, pool.slots, namespace=full, extent_slots=extent_slots, num_places=num_places)

    medium = open_one(tier.root, name, most_bytes, tier.num_bytes, make)
    facts = tier_facts(medium.recover(), medium.epoch, num_places, extent_slots, pool.share)
    return LanesBelow(medium_lanes(spill, fetch, medium, pool), facts)
