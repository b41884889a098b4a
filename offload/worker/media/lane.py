"""Lanes of tiers: a medium moves their bytes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offload.messages import NAME_BYTES, POOL, SCHEDULER, Extents, Ids, Route, TierFacts
from offload.peer_messages import REMOVED, PeerFacts
from offload.worker.copiers.base import CopyEnd
from offload.worker.lanes import Lane
from offload.worker.media.base import Medium, MediumJob, PoolSlots, Verb
from offload.worker.media.peers import PeerMedium
from offload.worker.media.runner import Runner
from offload.worker.media.seal_log import Kept
from offload.worker.pool.siblings import Home
from offload.worker.replicas import Share
from offload.worker.seals import Checksums, Seals

_FACTS_SECONDS = 0.5
_VERBS = {POOL: Verb.GET, SCHEDULER: Verb.PROBE}
"""By the target of a route."""


class PoolParts(NamedTuple):
    """This rank's part of the pool, for what lies below it.

    Attributes:
        slots: where they lie.
        seals: of them.
        share: which part of what fills the pool is this rank's.
        home: where it lies if it outlives the engine.
    """

    slots: PoolSlots
    seals: Seals
    share: Share
    home: Home | None = None


class LanesBelow(NamedTuple):
    """The lanes between the pool and a place below it.

    Attributes:
        lanes: one for each route.
        facts: what the place has kept from before; None: nothing, and it is no tier.
    """

    lanes: list[Lane]
    facts: TierFacts | None = None


MakeLanes = Callable[[PoolParts], LanesBelow]
"""Makes the lanes of a place below the pool on this rank."""


class ExtentBatch(NamedTuple):
    """Extents to move.

    Attributes:
        extents: where they lie.
        slots: of the pool, ``int64[n]``.
        sums: PUT: checksums of what they hold.
    """

    extents: Extents
    slots: Ids
    sums: Checksums | None


@dataclass(slots=True, eq=False)
class MediumLane(Lane):
    """What moves extents between the pool and a medium.

    Attributes:
        pool: this rank's part of it.
    """

    pool: PoolParts

    @property
    def checks_slots(self) -> bool:
        return True

    @property
    def runner(self) -> Runner | None:
        medium = self.copier.medium if isinstance(self.copier, MediumCopier) else None
        return getattr(medium, "runner", None)

    def own(self, share: Share, job_id: int, num_blocks: int, extents: Extents | None) -> Ids:
        """Those of its places. A replica set's bytes go to a tier once, and come from it once."""
        assert extents is not None, f"blocks without extents along {self.route}"
        return share.blocks_of(extents)

    def batch(self, sources: Ids, targets: Ids, extents: Extents | None) -> ExtentBatch:
        assert extents is not None, f"blocks without extents along {self.route}"
        extents = self.pool.share.extents(extents)
        if self.fills_pool:
            return ExtentBatch(extents, targets, None)
        return ExtentBatch(extents, sources, self.pool.seals.sums(sources))

    def num_bytes(self, batch: ExtentBatch, num_copies: int | None = None) -> int:
        return len(batch.slots[:num_copies]) * self.pool.slots.slot_bytes

    def whole_blocks(self, batch: ExtentBatch, num_copies: int) -> int:
        return num_copies


@dataclass(slots=True, eq=False)
class ProbeLane(MediumLane):
    """What asks a medium for names. Its blocks are names, and it touches no slot."""

    @property
    def is_question(self) -> bool:
        return True

    def batch(self, sources: Ids, targets: Ids, extents: Extents | None) -> ExtentBatch:
        assert extents is not None, f"names without extents along {self.route}"
        return ExtentBatch(self.pool.share.extents(extents), np.empty(0, dtype=np.int64), None)

    def num_bytes(self, batch: ExtentBatch, num_copies: int | None = None) -> int:
        return 0


@dataclass(slots=True, eq=False)
class PeerLane(ProbeLane):
    """What asks peers. It tells how they stand, twice a second at most.

    Attributes:
        rank: this one.
        medium: that peers are.
        clock: in seconds.
    """

    rank: int
    medium: PeerMedium
    clock: Callable[[], float]
    _told_at: float = -math.inf
    _told: list[PeerFacts] = field(default_factory=list)

    def take_facts(self) -> list[PeerFacts]:
        if self.clock() < self._told_at + _FACTS_SECONDS:
            return []
        before, self._told_at = {each.address: each for each in self._told}, self.clock()
        self._told = [PeerFacts(self.rank, *each) for each in self.medium.statuses()]
        changed = [each for each in self._told if before.pop(each.address, None) != each]
        gone = [each._replace(state=REMOVED, reason="it is no peer any more") for each in before.values()]
        return gone + changed


class MediumCopier:
    """A medium as a copier: of extents, and of ends by blocks."""

    def __init__(self, medium: Medium, share: Share) -> None:
        """``share``: of places, the numbers of those that are this rank's are divided by how many share."""
        self.medium = medium
        self._num_sharing = share.num_parts
        self._starts: dict[int, Ids] = {}

    def fence(self, route: Route) -> None:
        raise AssertionError(f"the engine touches no end of {route}")

    def submit(self, job_id: int, route: Route, batch: ExtentBatch) -> None:
        extents, verb = batch.extents, _VERBS.get(route.target, Verb.PUT)
        self._starts[job_id] = extents.starts
        self.medium.submit(
            MediumJob(
                job_id,
                verb,
                extents.places // self._num_sharing,
                extents.generations,
                extents.starts if verb is not Verb.PROBE else np.zeros_like(extents.starts),
                batch.slots,
                batch.sums,
                extents.skips,
                extents.names,
                extents.parents,
                extents.depths,
                extents.suffix,
                extents.is_last_wanted,
                extents.life,
                extents.is_release,
            )
        )

    def poll(self) -> list[CopyEnd]:
        found = []
        for end in self.medium.poll():
            num_blocks = int(self._starts.pop(end.job_id)[end.num_good])
            found.append(
                CopyEnd(end.job_id, num_blocks, end.error, end.seconds, end.seals, end.is_absent, end.reason)
            )
        return found

    def drain(self) -> None:
        raise NotImplementedError("a medium is waited for by closing it")

    def close(self, seconds: float) -> bool:
        return self.medium.close(seconds)


def medium_lanes(spill: Route, fetch: Route, medium: Medium, pool: PoolParts) -> list[Lane]:
    """Those of a tier. Requests wait for what is fetched."""
    copier = MediumCopier(medium, pool.share)
    return [
        MediumLane(spill, copier, is_awaited=False, pool=pool),
        MediumLane(fetch, copier, is_awaited=True, pool=pool),
    ]


def store_lanes(spill: Route, fetch: Route, probe: Route, medium: Medium, pool: PoolParts) -> list[Lane]:
    """Those of a tier that others write, too. Requests wait for what it is asked, for a while."""
    copier = MediumCopier(medium, pool.share)
    return [
        MediumLane(spill, copier, is_awaited=False, pool=pool),
        MediumLane(fetch, copier, is_awaited=True, pool=pool),
        ProbeLane(probe, copier, is_awaited=True, pool=pool),
    ]


def sibling_lanes(fetch: Route, probe: Route, medium: Medium, pool: PoolParts) -> list[Lane]:
    """Those of a tier that is never written to."""
    copier = MediumCopier(medium, pool.share)
    return [
        MediumLane(fetch, copier, is_awaited=True, pool=pool),
        ProbeLane(probe, copier, is_awaited=True, pool=pool),
    ]


def peer_lanes(
    fetch: Route,
    probe: Route,
    medium: PeerMedium,
    pool: PoolParts,
    rank: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Lane]:
    """Those of the pools of peers."""
    copier = MediumCopier(medium, pool.share)
    return [
        MediumLane(fetch, copier, is_awaited=True, pool=pool),
        PeerLane(probe, copier, is_awaited=True, pool=pool, rank=rank, medium=medium, clock=clock),
    ]


def store_facts(extent_slots: int, share: Share) -> TierFacts:
    """What this rank tells of a medium that others write, too: how large an extent is."""
    none: Ids = np.empty(0, dtype=np.int64)
    names = np.empty((0, NAME_BYTES), dtype=np.uint8)
    return TierFacts(0, 0, extent_slots, none, none, none, names, names, None, share.part, share.num_parts)


def tier_facts(
    kept: Kept, epoch: int, num_places: int, extent_slots: int, share: Share, seconds: float = 0.0
) -> TierFacts:
    """What this rank tells of a medium that has kept something; ``seconds``: since its last life began."""
    return TierFacts(
        epoch,
        num_places * share.num_parts,
        extent_slots,
        kept.places * share.num_parts + share.part,
        kept.generations,
        kept.num_slots,
        kept.names,
        kept.parents,
        kept.suffixes,
        share.part,
        share.num_parts,
        seconds,
    )
