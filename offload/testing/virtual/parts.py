"""What virtual engines are made of: vLLM's real scheduler, and connectors of workers with their caches."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager

from offload.testing.copiers.inline import InlineExecutor
from offload.testing.seams import Join, seams
from offload.testing.virtual.cells import BlockSizes
from offload.testing.virtual.settings import VirtualSettings, make_kv_cache_config
from offload.vllm.places import Place
from offload.vllm.replicas import join_replicas


def on_network(settings: VirtualSettings, clock: Callable[[], float]) -> dict[str, Any]:
    """What connectors are made with to meet others over the network of these settings."""
    network = settings.network
    if network is None:
        return {}
    extent_bytes = settings.peer_extent * settings.slot_bytes
    places = partial(network.places, settings.peer_limits, extent_bytes, clock)
    return {"make_listener": network.listener, "engine_places": places}


def make_hash(vllm_config: VllmConfig) -> Callable[[Any], bytes]:
    """The function that names blocks; call it before there is a scheduler."""
    function: Callable[[Any], bytes] = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return function


def tell_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> BlockSizes:
    """Find the sizes as vLLM's engine core does, and put them where it puts them for connectors."""
    register_all_kvcache_specs(vllm_config)
    scheduler, hashes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    resolve_alignment = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if resolve_alignment is None:  # the oldest vLLM, which tells connectors nothing of these
        return BlockSizes(scheduler, hashes, vllm_config.cache_config.prefix_match_unit or scheduler)
    hits = resolve_alignment(kv_cache_config, vllm_config, scheduler, hashes)
    kv_cache_config.hash_block_size, kv_cache_config.cache_hit_alignment_tokens = hashes, hits
    return BlockSizes(scheduler, hashes, hits)


def make_worker(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    places: Sequence[Place] = (),
    join: Join = join_replicas,
    **instead: Any,
) -> Any:
    """A connector of worker role. Ours has these places, replicas and ``Seams``; checksums come at once."""
    with seams(places, join, make_executor=InlineExecutor, **instead):
        return KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )


def make_cache(settings: VirtualSettings, kv_cache_config: KVCacheConfig, connector: Any) -> torch.Tensor:
    """The bytes of a GPU cache, in host memory, of which ``connector`` is told if there is one."""
    tensors = kv_cache_config.kv_cache_tensors
    backing = torch.zeros(tensors[0].size, dtype=torch.uint8)
    if connector is not None:
        views = {
            name: backing.as_strided(
                (settings.gpu_blocks, settings.page_bytes),
                (tensor.block_stride, 1),
                layer * tensor.layer_stride,
            )
            for tensor in tensors
            for layer, name in enumerate(tensor.layers)
        }
        connector.register_kv_caches(views)
    return backing


def make_scheduler(
    settings: VirtualSettings,
    vllm_config: VllmConfig,
    clock: Callable[[], float],
    workers: Mapping[tuple[int, int], Any],
) -> Scheduler:
    """vLLM's scheduler with its side of the connector; ours knows what the workers see.

    Args:
        settings: of the engine.
        vllm_config: made of them.
        clock: seconds, for our connector.
        workers: connectors by pipeline rank and tensor rank.
    """
    scheduler_class = AsyncScheduler if settings.overlapped else Scheduler
    kv_cache_config = make_kv_cache_config(settings)
    sizes = tell_sizes(kv_cache_config, vllm_config)
    network = on_network(settings, clock)
    with seams(settings.places, clock=clock, shares_cores=settings.shares_cores, **network):
        scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=sizes.scheduler,
            hash_block_size=sizes.hashes,
            log_stats=settings.log_stats,
        )
    if settings.connector == "offload":
        facts = {rank: worker.get_handshake_metadata() for rank, worker in workers.items()}
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(facts)
    return scheduler
