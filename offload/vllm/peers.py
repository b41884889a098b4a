"""Peers to fetch from, as the configuration names them, as a place below the pool."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.fleet_config import read_fleet_key
from offload.messages import POOL, SCHEDULER, Route
from offload.scheduler.tiers.tier import make_peers
from offload.vllm.groups import shape_of
from offload.vllm.hand_offs import peer_of
from offload.vllm.lasting_pool import sibling_places
from offload.vllm.namespace import namespace_of
from offload.vllm.places import Place
from offload.worker.media.lane import LanesBelow, PoolParts, peer_lanes, store_facts
from offload.worker.peers.fetching import FetchPlan, peer_medium

PEERS = "peers"
FETCH, PROBE = Route("fetch", PEERS, POOL), Route("probe", PEERS, SCHEDULER)


def peer_places(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> list[Place]:
    """The place that peers' pools are; none if there are no peers.

    Raises:
        ConfigError: the fleet's key cannot be read, or this engine listens where it cannot.
    """
    if not config.fleet.peers:
        return []
    about = {"tier": PEERS, "kind": PEERS, "peers": list(config.fleet.peers)}
    plan = fetch_plan(vllm_config, kv_cache_config, config)
    return [
        Place(
            partial(make_peers, FETCH, PROBE, peer_wait_seconds=config.fleet.peer_wait_seconds),
            partial(peer_lanes_of, plan),
            about,
        )
    ]


def engine_places(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> list[Place]:
    """Those that pools of other engines are: of siblings, then of peers. Raises as ``peer_places``."""
    siblings = sibling_places(vllm_config, kv_cache_config, config)
    return [*siblings, *peer_places(vllm_config, kv_cache_config, config)]


def fetch_plan(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig) -> FetchPlan:
    """From whom this rank fetches. Raises as ``peer_places``."""
    fleet, parallel = config.fleet, vllm_config.parallel_config
    groups = shape_of(kv_cache_config)
    return FetchPlan(
        peers=fleet.peers,
        rank=parallel.rank,
        world_size=parallel.world_size,
        namespace=namespace_of(vllm_config, kv_cache_config),
        columns=1 if groups is None else groups.columns,
        peer=peer_of(vllm_config, fleet) or b"",
        key=b"" if fleet.fleet_key_file is None else read_fleet_key(fleet.fleet_key_file),
        tls=fleet.fleet_tls,
        has_nixl=fleet.has_nixl,
    )


def peer_lanes_of(plan: FetchPlan, pool: PoolParts, make: Callable[..., Any] = peer_medium) -> LanesBelow:
    """The lanes of that place on a rank; ``make``: makes its medium."""
    medium = make(plan, pool.slots, pool.share)
    return LanesBelow(peer_lanes(FETCH, PROBE, medium, pool, plan.rank), store_facts(1, pool.share))
