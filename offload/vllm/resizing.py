"""What of an engine's pool may change its size, on both sides."""

from functools import partial

from offload.config import OffloadConfig
from offload.scheduler.pool_target import PoolTarget, Sizes
from offload.settings import GIB
from offload.vllm.pool_size import PoolSize
from offload.worker.pool.host_limits import ASK_FOR_LESS, check_room
from offload.worker.pool.pressure import PressureWatch
from offload.worker.resizing import SizeRange


def target_of(config: OffloadConfig) -> PoolTarget:
    """How large the pool of that configuration is to be; as it is at the start until somebody asks."""
    return PoolTarget(partial(check_room, instead=ASK_FOR_LESS), config.fixed_because)


def range_of(config: OffloadConfig, num_ranks: int) -> SizeRange | None:
    """Sizes that a rank's part of the pool may have; None: it keeps its size."""
    if config.fixed_because is not None:
        return None
    return SizeRange(int(config.most_gib * GIB) // num_ranks, config.is_resizing_meant)


def sizes_of(size: PoolSize, target: PoolTarget) -> Sizes:
    """The same of all ranks together."""
    return Sizes(size.most_slots, size.unit_slots, target)


def watch_of(config: OffloadConfig, target: PoolTarget) -> PressureWatch | None:
    """Makes the pool smaller where memory is short, if the configuration says so."""
    if not config.shrink_under_pressure:
        return None
    watch = PressureWatch(target.yield_memory)
    watch.start()
    return watch
