"""Pools of peers without a connection: whoever is asked answers at once, out of regions below one path."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from offload.messages import PeerLife, Unused
from offload.testing.media.inline import InlineRunner
from offload.worker.media.base import MediumEnd, MediumJob, PoolSlots, Verb
from offload.worker.media.siblings import SiblingMedium
from offload.worker.pool.siblings import Siblings


class RegionPeers(SiblingMedium):
    """What peers do, but for finding each other: all regions are one peer's.

    Attributes:
        lives: which that peer has; empty: any.
        asked: names that were asked for, and how many leading ones there were.
        released: tips of leases that are not needed any more.
        counts: jobs by verb.
        disturb: called before each job; it may be stopped by what that returns.
    """

    def __init__(self, siblings: Siblings, pool: PoolSlots) -> None:
        super().__init__(siblings, pool, make_runner=InlineRunner)
        self.lives: set[PeerLife] = set()
        self.asked: list[tuple[int, int]] = []
        self.released: list[bytes] = []
        self.counts: Counter[Verb] = Counter()
        self.disturb: Callable[[MediumJob], str | None] = lambda job: None
        self._told: list[MediumEnd] = []

    def submit(self, job: MediumJob) -> None:
        self.counts[job.verb] += 1
        if job.is_release:
            assert job.names is not None
            self.released += [name.tobytes()[:16] for name in job.names]
            self._told.append(MediumEnd(job.job_id, job.num_extents))
            return
        reason = self.disturb(job) or self._reason(job)
        if reason:
            empty = np.empty(0, dtype=np.uint64)
            seals = empty if job.verb is Verb.GET else None
            error = None if job.verb is Verb.PROBE else reason
            self._told.append(MediumEnd(job.job_id, 0, error, seals=seals, is_absent=True, reason=reason))
            return
        super().submit(job)

    def poll(self) -> list[MediumEnd]:
        told, self._told = self._told, []
        return told + super().poll()

    def _reason(self, job: MediumJob) -> str | None:
        if job.life is None or not self.lives or job.life in self.lives:
            return None
        is_peer = any(each.peer == job.life.peer for each in self.lives)
        if is_peer and not job.life.epoch:
            return None
        return Unused.OLD_EPOCH if is_peer else Unused.UNKNOWN_PEER

    def _probe(self, number: int, job: MediumJob) -> int:
        self._siblings._rests_until = -np.inf
        found = super()._probe(number, job)
        self.asked.append((job.num_extents, found))
        return found
