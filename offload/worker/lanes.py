"""Lanes: how the bytes of each route move on this rank."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.messages import GPU, LOAD, POOL, STORE, Extents, Ids, Route
from offload.peer_messages import PeerFacts
from offload.worker.copiers.base import Copier
from offload.worker.layout import BlockLayout, CopyBatch
from offload.worker.media.runner import Runner
from offload.worker.replicas import Share


@dataclass(slots=True, eq=False)
class Lane(ABC):
    """What moves blocks along a route, one end of which is the pool.

    Attributes:
        route: the route.
        copier: moves them, in batches as the lane makes them; other lanes may have the same one.
        is_awaited: requests wait for its jobs. Those of other lanes give way to them.
    """

    route: Route
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

    @property
    def is_question(self) -> bool:
        """Whether its jobs move nothing, and end with how much of what they ask for is there."""
        return False

    @property
    def checks_slots(self) -> bool:
        """Whether its copier checks the slots that it reads, so that nobody else has to."""
        return False

    @property
    def is_followed(self) -> bool:
        """Whether loads may be told to wait for its jobs: those of what comes from below."""
        return self.fills_pool and not self.meets_gpu

    @property
    def runner(self) -> "Runner | None":
        """The threads that move its bytes, if these tell when something has ended."""
        return None

    def take_facts(self) -> list[PeerFacts]:
        """What there is to tell of engines at its other end, since the last call."""
        return []

    def own(self, share: Share, job_id: int, num_blocks: int, extents: Extents | None) -> Ids:
        """Which blocks of a job this rank moves: its share of what fills the pool, all of what reads it."""
        part = share.of(job_id, num_blocks) if self.fills_pool else range(num_blocks)
        return np.arange(part.start, part.stop)

    @abstractmethod
    def batch(self, sources: Ids, targets: Ids, extents: Extents | None) -> Any:
        """The copies that bring blocks along it; ``extents``: see ``Order``."""

    @abstractmethod
    def num_bytes(self, batch: Any, num_copies: int | None = None) -> int:
        """Of the first so many copies of a batch; None: of all."""

    @abstractmethod
    def whole_blocks(self, batch: Any, num_copies: int) -> int:
        """How many leading blocks they complete."""


@dataclass(slots=True, eq=False)
class CopyLane(Lane):
    """Copies from memory to memory.

    Attributes:
        layout: where bytes lie in the pool and in the place at the other end.
    """

    layout: BlockLayout

    def batch(self, sources: Ids, targets: Ids, extents: Extents | None) -> CopyBatch:
        if self.fills_pool:
            return self.layout.store(sources, targets)
        return self.layout.load(sources, targets)

    def num_bytes(self, batch: CopyBatch, num_copies: int | None = None) -> int:
        return int(batch.sizes[:num_copies].sum())

    def whole_blocks(self, batch: CopyBatch, num_copies: int) -> int:
        return self.layout.whole_blocks(batch, num_copies)


def gpu_lanes(layout: BlockLayout, copier: Copier) -> list[Lane]:
    """Those between the GPU and the pool."""
    return [
        CopyLane(STORE, copier, is_awaited=False, layout=layout),
        CopyLane(LOAD, copier, is_awaited=True, layout=layout),
    ]
