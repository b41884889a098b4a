"""Lanes: how the bytes of each route move on this rank."""

from dataclasses import dataclass

from offload.messages import GPU, LOAD, POOL, STORE, Ids, Route
from offload.worker.copiers.base import Copier
from offload.worker.layout import BlockLayout, CopyBatch


@dataclass(slots=True, eq=False)
class Lane:
    """What copies along a route, one end of which is the pool.

    Attributes:
        route: the route.
        layout: where bytes lie in the pool and in the place at the other end.
        copier: makes the copies; other lanes may have the same one.
        is_awaited: requests wait for its jobs. Those of other lanes give way to them.
    """

    route: Route
    layout: BlockLayout
    copier: Copier
    is_awaited: bool

    @property
    def fills_pool(self) -> bool:
        """Whether it is one that changes slots; if not, it reads them."""
        return self.route.target == POOL

    @property
    def meets_gpu(self) -> bool:
        """Whether the engine's own work touches the place at its other end, so that a fence is needed."""
        return GPU in (self.route.source, self.route.target)

    def batch(self, sources: Ids, targets: Ids) -> CopyBatch:
        """The copies that bring blocks along it."""
        if self.fills_pool:
            return self.layout.store(sources, targets)
        return self.layout.load(sources, targets)


def gpu_lanes(layout: BlockLayout, copier: Copier) -> list[Lane]:
    """Those between the GPU and the pool."""
    return [Lane(STORE, layout, copier, is_awaited=False), Lane(LOAD, layout, copier, is_awaited=True)]
