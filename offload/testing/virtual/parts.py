"""What virtual engines are made of: vLLM's real scheduler, and connectors of workers with their caches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager

from offload.testing.copiers.inline import InlineExecutor
from offload.testing.seams import seams
from offload.testing.virtual.settings import CELL_BYTES, VirtualSettings, make_kv_cache_config
from offload.vllm.places import Place


def make_hash(vllm_config: VllmConfig) -> Callable[[Any], bytes]:
    """The function that names blocks; call it before there is a scheduler."""
    function: Callable[[Any], bytes] = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return function


def make_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, places: Sequence[Place] = (), **instead: Any
) -> Any:
    """A connector of worker role. Ours has these places and ``Seams``, and makes checksums at once."""
    with seams(places, make_executor=InlineExecutor, **instead):
        return KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )


def make_cache(settings: VirtualSettings, kv_cache_config: KVCacheConfig, connector: Any) -> torch.Tensor:
    """The bytes of a GPU cache, in host memory, of which ``connector`` is told if there is one."""
    (tensor,) = kv_cache_config.kv_cache_tensors
    backing = torch.zeros(tensor.size, dtype=torch.uint8)
    size, stride = (settings.gpu_blocks, settings.block_size * CELL_BYTES), (tensor.block_stride, 1)
    if connector is not None:
        views = {
            name: backing.as_strided(size, stride, layer * tensor.layer_stride)
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
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    with seams(settings.places, clock=clock):
        scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=settings.log_stats,
        )
    if settings.connector == "offload":
        facts = {rank: worker.get_handshake_metadata() for rank, worker in workers.items()}
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(facts)
    return scheduler
