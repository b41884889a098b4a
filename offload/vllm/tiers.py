"""Tiers that the configuration names, as places below the pool."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import UnsupportedError
from offload.files.tier_path import open_one
from offload.messages import POOL, SCHEDULER, Route, TierFacts
from offload.mooncake_config import MooncakeConfig
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.tier import TierLimits, make_store, make_tier
from offload.store_config import StoreConfig
from offload.tier_config import DISK, SHUTDOWN_SECONDS, DiskConfig, short_name
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.vllm.places import Place
from offload.worker.media.base import Medium, PoolSlots
from offload.worker.media.lane import (
    LanesBelow,
    PoolParts,
    medium_lanes,
    store_facts,
    store_lanes,
    tier_facts,
)
from offload.worker.media.mooncake_medium import MooncakeMedium, MooncakeOptions
from offload.worker.media.resp_medium import RespMedium, RespOptions
from offload.worker.media.slab import SlabMedium
from offload.worker.media.slab_file import SlabShape
from offload.worker.media.store_names import Whose
from offload.worker.media.store_value import value_bytes

_EXTENT_BYTES = 2 << 20
_STORE_EXTENT_BYTES = 1 << 20
_TEARDOWN_SECONDS = 2.5
"""That a shutdown takes beside."""
AnyStore = StoreConfig | MooncakeConfig
_VALUE_BYTES = 32
"""What a store keeps beside a value in one piece of memory."""


class _Engine(NamedTuple):
    """What tiers must know of the engine."""

    namespace: str
    rank: int
    world_size: int
    num_engines: int
    columns: int
    ending_seconds: float

    def named(self, facts: TierFacts) -> TierFacts:
        """The same, with the short name of the namespace, which only workers know."""
        return facts._replace(namespace=short_name(self.namespace))

    def rank_of(self, pool: PoolParts) -> str:
        """Whose bytes these are."""
        return f"rank {self.rank} of {self.world_size}, share {pool.share}"


def tier_places(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> list[Place]:
    """A place for each tier of the configuration, in order."""
    if not config.tiers:
        return []
    groups = shape_of(kv_cache_config)
    parallel = vllm_config.parallel_config
    engine = _Engine(
        namespace_of(vllm_config, kv_cache_config),
        parallel.rank,
        parallel.world_size,
        max(parallel.data_parallel_size_local, 1),
        1 if groups is None else groups.columns,
        _ending_seconds(vllm_config),
    )
    kinds = [DISK if isinstance(tier, DiskConfig) else tier.kind for tier in config.tiers]
    places = []
    for number, (tier, kind) in enumerate(zip(config.tiers, kinds, strict=True)):
        label = kind if kinds.count(kind) == 1 else f"{kind}{number}"
        if isinstance(tier, DiskConfig):
            places.append(_disk_place(label, tier, config.eviction_policy, engine))
        else:
            places.append(_store_place(label, tier, config.eviction_policy, engine))
    return places


def _disk_place(label: str, tier: DiskConfig, policy: str, engine: _Engine) -> Place:
    spill, fetch = Route("spill", POOL, label), Route("fetch", label, POOL)
    return Place(
        partial(_make_flows, spill, fetch, tier, policy, min(tier.shutdown_seconds, engine.ending_seconds)),
        partial(_make_lanes, spill, fetch, tier, engine),
        {"tier": label, "kind": DISK, "path": tier.path, "gib": tier.gib, "admit": str(tier.admit)},
    )


def _store_place(label: str, tier: AnyStore, policy: str, engine: _Engine) -> Place:
    spill, fetch = Route("spill", POOL, label), Route("fetch", label, POOL)
    probe = Route("probe", label, SCHEDULER)
    seconds = min(SHUTDOWN_SECONDS, engine.ending_seconds)
    limits = TierLimits(policy, tier.admit, wait_seconds=tier.wait_seconds, shutdown_seconds=seconds)

    def make_flows(common: Common, facts: Sequence[TierFacts]) -> Below:
        below = make_store(spill, fetch, probe, common, facts, limits)
        return below._replace(namespace=facts[0].namespace)

    def make_lanes(pool: PoolParts) -> LanesBelow:
        extent_slots = store_extent_slots(pool.slots.slot_bytes, engine.columns)
        whose = Whose(f"{engine.namespace}\n{extent_slots}", engine.rank_of(pool))
        lanes = store_lanes(spill, fetch, probe, _store_medium(tier, pool.slots, whose, extent_slots), pool)
        return LanesBelow(lanes, engine.named(store_facts(extent_slots, pool.share)))

    about = {"tier": label, "kind": tier.kind, "url": tier.shown, "admit": str(tier.admit)}
    return Place(make_flows, make_lanes, about)


def _store_medium(tier: AnyStore, slots: PoolSlots, whose: Whose, extent_slots: int) -> Medium:
    if isinstance(tier, MooncakeConfig):
        options = MooncakeOptions(name_key=tier.name_key)
        return MooncakeMedium(tier, slots, whose=whose, extent_slots=extent_slots, options=options)
    return RespMedium(
        tier.address,
        slots,
        whose=whose,
        extent_slots=extent_slots,
        options=RespOptions(ca_file=tier.ca_file, ttl_seconds=tier.ttl_seconds, name_key=tier.name_key),
    )


def store_extent_slots(slot_bytes: int, columns: int) -> int:
    """Slots of the largest extent of a store: of 1 to 2 MiB, what its allocator wastes least of.

    jemalloc, which Valkey and Redis take memory from, has four sizes from one power of two to the next. A
    value of exactly a power of two and its header would take a quarter more.
    """
    position = max(columns, 1)
    least = -(-_STORE_EXTENT_BYTES // (slot_bytes * position))
    most = max(least, 2 * _STORE_EXTENT_BYTES // (slot_bytes * position))

    def waste(count: int) -> float:
        num_bytes = value_bytes(count * position, slot_bytes) + _VALUE_BYTES
        step = 1 << max((num_bytes - 1).bit_length() - 3, 0)
        return -(-num_bytes // step) * step / (count * position * slot_bytes)

    return min(range(least, most + 1), key=waste) * position


def _ending_seconds(vllm_config: VllmConfig) -> float:
    """Of a shutdown, for what is yet to be written: vLLM kills an engine that takes longer.

    Without ``shutdown_timeout``, offline engines have 5 seconds; servers have none and are killed at once.
    """
    seconds: float = vllm_config.shutdown_timeout
    return max(seconds - _TEARDOWN_SECONDS, _TEARDOWN_SECONDS)


def _extent_slots(slot_bytes: int, columns: int) -> int:
    """Slots of the largest extent: the least power of two of positions that makes it 2 MiB on a rank."""
    position = max(columns, 1)
    return position << max(0, (_EXTENT_BYTES - 1) // (slot_bytes * position)).bit_length()


def _make_flows(
    spill: Route,
    fetch: Route,
    tier: DiskConfig,
    policy: str,
    seconds: float,
    common: Common,
    facts: Sequence[TierFacts],
) -> Below:
    limits = TierLimits(policy, tier.admit, tier.bytes_per_day, shutdown_seconds=seconds)
    return make_tier(spill, fetch, common, facts, limits)._replace(namespace=facts[0].namespace)


def _make_lanes(
    spill: Route,
    fetch: Route,
    tier: DiskConfig,
    engine: _Engine,
    pool: PoolParts,
) -> LanesBelow:
    extent_slots = _extent_slots(pool.slots.slot_bytes, engine.columns)
    shape = SlabShape(pool.slots.slot_bytes, extent_slots, 1)
    most_bytes = tier.num_bytes // (engine.world_size * engine.num_engines)
    record_bytes = 2 * (8 * extent_slots + 128)
    num_places = (most_bytes - (1 << 23)) // (shape.place_bytes + record_bytes) - 1
    if num_places < 1:
        raise UnsupportedError(
            f"the tier {tier.path} has {most_bytes:,} bytes for each rank, and one extent takes "
            f"{shape.place_bytes:,}; raise gib"
        )
    full = f"{engine.namespace}\n{engine.rank_of(pool)}"
    name = short_name(full)

    def make(path: Path) -> SlabMedium:
        return SlabMedium(path, pool.slots, namespace=full, extent_slots=extent_slots, num_places=num_places)

    medium = open_one(tier.root, name, most_bytes, tier.num_bytes, make)
    facts = tier_facts(medium.recover(), medium.epoch, num_places, extent_slots, pool.share, medium.seconds)
    return LanesBelow(medium_lanes(spill, fetch, medium, pool), engine.named(facts))
