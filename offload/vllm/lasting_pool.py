"""A pool that outlives its engine, as the configuration asks for it."""

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import UnsupportedError
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.worker.pool.region import RegionPlan


def region_plan(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> RegionPlan | None:
    """Where this rank's part of the pool lies; None if it ends with the engine.

    Raises:
        UnsupportedError: a model without full attention, of which a later engine could not tell which chain
            a checkpoint is of.
    """
    if config.pool is None:
        return None
    groups = shape_of(kv_cache_config)
    if groups is not None and not groups.columns:
        raise UnsupportedError(
            "pool is set, and no layer of this model has full attention: what the pool holds could not be "
            "found again by a later engine; remove pool"
        )
    parallel = vllm_config.parallel_config
    return RegionPlan(
        config.pool.root,
        namespace_of(vllm_config, kv_cache_config),
        parallel.rank,
        parallel.world_size,
        config.pool.num_bytes,
    )
