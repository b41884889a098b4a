"""Hits and misses of a tier that knows what it has."""

from offload.messages import Route
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.tiers.names import Grid


def count_asked(
    common: Common, route: Route, grid: Grid, request: Request, num_usable: int, stop: int
) -> None:
    """A request asks for the extents behind what the pool has for it; those up to ``stop`` are there.

    Args:
        common: has the metrics.
        route: from the tier.
        grid: how chains are cut.
        request: may use extents that end within its chain; before its last token, if it needs a checkpoint.
        num_usable: leading positions that the pool has.
        stop: leading positions that the tier has.
    """
    size, limit = grid.positions, len(common.engine.chain(request))
    if common.engine.groups.has_bags:
        limit = min(limit, (request.num_tokens - 1) // common.block_size)
    else:
        limit -= limit % size
    num_known = num_usable // size if size else 0
    ends = [-(-end // size) if size else int(end > num_usable) for end in (limit, stop)]
    num_asked, num_found = (max(0, end - num_known) for end in ends)
    common.metrics.count("route_probed_extents", num_asked, route)
    common.metrics.count("route_found_extents", min(num_found, num_asked), route)
