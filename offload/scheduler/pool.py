"""Makes the allocator of an engine's pool, as its configuration and its model say."""

import logging
from collections.abc import Callable

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, make_policy
from offload.config import OffloadConfig, StoreWhen
from offload.scheduler.adoption import Adoption
from offload.scheduler.common import Common, Compute, LateStores
from offload.scheduler.engine import Engine
from offload.scheduler.pool_target import PoolBounds, PoolTarget
from offload.scheduler.pool_target import Sizes as Sizes
from offload.scheduler.resizing import PoolResizing

logger = logging.getLogger(__name__)


def make_allocator(
    config: OffloadConfig,
    engine: Engine,
    num_slots: int,
    sizes: Sizes | None,
    clock: Callable[[], float],
    record_events: bool,
    adoption: Adoption | None,
    late: LateStores | None,
) -> CpuOffloadingBlockAllocator:
    """One of an empty pool of ``num_slots``. ``make_resizing`` says which of its slots it has at first.

    ``adoption``: what it will have from earlier engines; their slots are handed out first. ``late``: where
    the pool may lack what the GPU has, the policy ranks that, too.
    """
    groups = engine.groups
    num_ranked = num_slots + engine.num_blocks if late is not None and late.is_gapped else num_slots
    policy = make_policy(config.eviction_policy, num_ranked, clock)
    return CpuOffloadingBlockAllocator(
        num_slots if sizes is None else max(num_slots, sizes.most_slots),
        columns=groups.columns,
        bag_slots=groups.bag_slots,
        policy=HintedPolicy(policy, int(num_slots * config.hinted_share), clock),
        record_events=record_events,
        bag_reach=groups.reach + 1,  # events tell what comes before the first block, too
        order=None if adoption is None else adoption.order,
    )


def late_stores(
    config: OffloadConfig, engine: Engine, num_slots: int, *, is_read: bool, compute: Compute
) -> LateStores | None:
    """How blocks wait until the GPU is about to evict them, below which is a pool of ``num_slots``.

    None: they do not. ``is_read``: whether places below the pool, later engines or peers read it. For them
    a chain has to be in it from its beginning on. ``compute``: of the engine.
    """
    is_plain = engine.groups.is_plain
    if config.store is StoreWhen.LAZY and not is_plain:
        logger.warning(
            "store is %r, and this model has windows, states or several cache groups: its blocks are stored "
            "as they fill",
            config.store.value,
        )
    is_late = is_plain and config.stores_lazily(num_slots, engine.num_blocks, is_read=is_read)
    fills_room = config.store is StoreWhen.AUTO and not compute.shares_cores
    whens = ["as they fill"] if fills_room or not is_late else []
    whens += ["when the GPU is about to evict them"] if is_late else []
    logger.info(
        "blocks are stored %s: store is %r, for %d slots below %d GPU blocks",
        " while the pool has room, then ".join(whens),
        config.store.value,
        num_slots,
        engine.num_blocks,
    )
    return LateStores(not is_read, compute.overlaps, fills_room) if is_late else None


def make_resizing(
    common: Common,
    config: OffloadConfig,
    sizes: Sizes | None,
    num_slots: int,
    num_ranks: int,
    resized: Callable[[], None],
) -> PoolResizing:
    """What makes a pool of ``num_slots`` larger and smaller. ``sizes``: None: nobody will."""
    given = sizes or Sizes(num_slots, 0, PoolTarget(lambda num_bytes: None))
    groups, allocator = common.engine.groups, common.allocator
    bounds = PoolBounds(
        config.cpu_gib,
        config.most_gib,
        num_slots,
        allocator.num_slots,
        given.unit_slots,
        max(1, groups.columns) + groups.bag_slots,
        common.slot_bytes,
    )

    def changed() -> None:
        allocator.resizing.protect(int(allocator.capacity * config.hinted_share))
        resized()

    return PoolResizing(allocator, given.target, bounds, num_ranks, changed, common.clock)
