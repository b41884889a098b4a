"""Makes the allocator of an engine's pool, as its configuration and its model say."""

from collections.abc import Callable

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, make_policy
from offload.config import OffloadConfig
from offload.messages import Ids
from offload.scheduler.groups import Groups


def make_allocator(
    config: OffloadConfig,
    groups: Groups,
    num_slots: int,
    clock: Callable[[], float],
    record_events: bool,
    order: Ids | None,
) -> CpuOffloadingBlockAllocator:
    """One of an empty pool. ``order``: of slots as they are handed out at first; None: ascending."""
    policy = make_policy(config.eviction_policy, num_slots, clock)
    return CpuOffloadingBlockAllocator(
        num_slots,
        columns=groups.columns,
        bag_slots=groups.bag_slots,
        policy=HintedPolicy(policy, int(num_slots * config.hinted_share), clock),
        record_events=record_events,
        bag_reach=groups.reach + 1,  # events tell what comes before the first block, too
        order=order,
    )
