"""A pool that outlives its engine, as the configuration asks for it, and those beside it."""

from functools import partial

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import UnsupportedError
from offload.messages import POOL, SCHEDULER, Route
from offload.scheduler.tiers.tier import TierLimits, make_siblings
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.vllm.places import Place
from offload.worker.media.lane import LanesBelow, PoolParts, sibling_lanes, store_facts
from offload.worker.media.runner import MakeRunner, Runner
from offload.worker.media.siblings import SiblingMedium
from offload.worker.pool.region import RegionPlan
from offload.worker.pool.siblings import Siblings

SIBLINGS = "siblings"
FETCH, PROBE = Route("fetch", SIBLINGS, POOL), Route("probe", SIBLINGS, SCHEDULER)


def region_plan(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> RegionPlan | None:
    """Where this rank's part of the pool lies; None if it ends with the engine.

    Raises:
        UnsupportedError: a model without full attention, and siblings are not read.
    """
    if config.pool is None:
        return None
    groups = shape_of(kv_cache_config)
    if groups is not None and not groups.columns and not config.pool.siblings:
        raise UnsupportedError(
            "siblings of pool is false, and no layer of this model has full attention: what its pool holds "
            "is found again as what siblings have; set siblings to true, or remove pool"
        )
    parallel = vllm_config.parallel_config
    return RegionPlan(
        config.pool.root,
        namespace_of(vllm_config, kv_cache_config),
        parallel.rank,
        parallel.world_size,
        config.pool.num_bytes,
    )


def sibling_places(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> list[Place]:
    """The place that siblings' pools are; none if they are not to be read."""
    if config.pool is None or not config.pool.siblings:
        return []
    groups = shape_of(kv_cache_config)
    columns = 1 if groups is None else groups.columns
    about = {"tier": SIBLINGS, "kind": SIBLINGS, "path": config.pool.path}
    make_flows = partial(
        make_siblings, FETCH, PROBE, limits=TierLimits(wait_seconds=config.pool.wait_seconds)
    )
    return [Place(make_flows, partial(sibling_lanes_of, columns), about)]


def sibling_lanes_of(columns: int, pool: PoolParts, make_runner: MakeRunner = Runner) -> LanesBelow:
    """The lanes of that place on a rank whose pool outlives the engine.

    A model whose positions have no slots finds there what its own pool has from before, too: the chain of a
    checkpoint is known when somebody asks for it, and not at start.
    """
    assert pool.home is not None, "the pool ends with the engine"
    siblings = Siblings(pool.home, columns, reads_home=not columns)
    medium = SiblingMedium(siblings, pool.slots, make_runner=make_runner)
    return LanesBelow(sibling_lanes(FETCH, PROBE, medium, pool), store_facts(1, pool.share))
