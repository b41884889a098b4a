"""A fetch under way, and what a request wants of a tier."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator import StorePlan
from offload.messages import Ids
from offload.scheduler.arrivals import Arrival
from offload.scheduler.flow import Job
from offload.scheduler.tiers.contents import Reading

LEAST_TOKENS = 512
"""Fewer are computed sooner than they are asked for."""

POOL_SHARE = 0.25
"""Fetches under way, of all tiers together, fill at most that part of the pool."""


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs that were opened at once: how long they take together is what is measured.

    Attributes:
        since: when.
        num_left: that have not ended.
        num_blocks: that they move.
    """

    since: float
    num_left: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """A task of one job, or of several.

    Attributes:
        plan: the positions, and the bag, that it fills.
        reading: the extents that it reads.
        names: of all extents of their path.
        first: the first that it reads.
        edges: where these begin and end, in blocks of the order.
        batch: it is one of these.
        hashes: of what it brings; requests wait for them.
        arrival: what restores follow.
        starts: where its jobs begin, in blocks of the order.
        num_left: jobs that have not ended.
        is_over: it will not be whole.
        is_dropped: what it brings is not wanted any more.
    """

    plan: StorePlan
    reading: Reading
    names: Sequence[bytes]
    first: int
    edges: Ids
    batch: Batch
    hashes: Sequence[bytes]
    arrival: Arrival
    starts: dict[int, int] = field(default_factory=dict)
    num_left: int = 0
    is_over: bool = False
    is_dropped: bool = False

    def extent_of(self, index: int) -> int:
        """Which of those that it reads has that block of the order."""
        return int(np.searchsorted(self.edges, index, side="right")) - 1

    def check_invariants(self, num_jobs: int) -> None:
        """So many jobs of it are in flight, and what follows it is held, or told that it may not."""
        assert num_jobs == self.num_left, f"{num_jobs} jobs in flight, {self} says otherwise"
        is_over = self.is_over or self.is_dropped
        assert is_over == self.arrival.is_over, f"restores may follow {self}, or may not, and should"
        for restore in self.arrival.followers if self.is_over else ():
            is_wanted = restore.parts_left and not restore.is_cancelled
            assert restore.pin is not None or restore.is_lost or not is_wanted, (
                f"nothing holds what {restore} reads"
            )

    @staticmethod
    def check_all(jobs: Sequence[Job["Fetch"]], coming: Iterable["Fetch"], num_filling: int) -> None:
        """They have these jobs, all in flight; these are said to come, and so many slots fill. For tests."""
        num = sum(job.num_blocks for job in jobs)
        assert num == num_filling, f"{num} slots fill, {num_filling} counted"
        in_flight = Counter(id(job.task) for job in jobs)
        for job in jobs:
            job.task.check_invariants(in_flight[id(job.task)])
        for fetch in coming:
            assert in_flight[id(fetch)] and not fetch.is_over, f"{fetch} brings nothing"


class Wish(NamedTuple):
    """What a request wants of the tier.

    Attributes:
        stop: up to which position.
        behind: the positions that the pool could bring when jobs were opened for it last. There must be more
            before others are, or what the pool evicts meanwhile would be fetched for ever.
    """

    stop: int
    behind: int


NO_WISH = Wish(-1, -1)
"""Of a request that wants nothing of the tier, or nothing any more."""


def parts_of(edges: Ids, num_slots: int) -> Iterator[tuple[int, int]]:
    """Cuts an order into jobs of about so many slots each, which begin and end with extents."""
    start = 0
    for edge in edges[1:].tolist():
        if edge - start >= num_slots or edge == edges[-1]:
            if edge > start:
                yield start, edge
            start = edge
