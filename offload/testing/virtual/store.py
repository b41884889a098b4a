"""A store below virtual engines: the product's flows and lanes over media that share memory."""

from collections.abc import Callable, Sequence

from offload.messages import POOL, SCHEDULER, Route, TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.probes import Probes
from offload.scheduler.tiers.spills import Spills
from offload.scheduler.tiers.tier import make_store
from offload.testing.copiers.paced import Link
from offload.testing.media.faulty import FaultyMedium, MediumFault
from offload.testing.media.paced import PacedMedium
from offload.testing.media.store import MemoryStore, StoreMedium
from offload.testing.virtual.meeting import registering
from offload.testing.virtual.tier import VirtualTier
from offload.vllm.places import Place
from offload.worker.media.base import Medium, MediumJob
from offload.worker.media.lane import LanesBelow, PoolParts, store_facts, store_lanes

STORE = "store"
SPILL, FETCH, PROBE = (
    Route("spill", POOL, STORE),
    Route("fetch", STORE, POOL),
    Route("probe", STORE, SCHEDULER),
)


class VirtualStore(VirtualTier):
    """Makes the place. What it has stays from one engine to the next, unless ``disturb`` takes it away.

    Attributes:
        store: what engines share.
        disturb: called before each job.
        link: to the store; None: it is here.
    """

    def __init__(
        self,
        *,
        store: MemoryStore | None = None,
        disturb: Callable[[MemoryStore], None] | None = None,
        link: Link | None = None,
        link_slot_bytes: float = 0.0,
        keeps: bool = True,
        **others: object,
    ) -> None:
        """``link_slot_bytes``: that a slot takes there; ``keeps``: of ``PacedMedium``.

        ``others``: of ``VirtualTier``.
        """
        super().__init__(0, **others)  # type: ignore[arg-type]
        self.store = MemoryStore() if store is None else store
        self.disturb = disturb
        self.link = link
        self._link_slot_bytes = link_slot_bytes
        self._keeps = keeps

    def __repr__(self) -> str:
        return f"VirtualStore(positions={self.positions}, limits={self.limits})"

    @property
    def place(self) -> Place:
        self._media = {}
        return Place(self._make_flows, self._make_lanes)

    def _make_flows(self, common: Common, facts: Sequence[TierFacts]) -> Below:
        below = make_store(SPILL, FETCH, PROBE, common, facts, self.limits)
        self.spills, self.fetches, self.probes = below.flows
        assert isinstance(self.spills, Spills) and isinstance(self.fetches, Fetches)
        assert isinstance(self.probes, Probes)
        return below

    def _make_lanes(self, pool: PoolParts) -> LanesBelow:
        rank = registering.rank
        inner: Medium = StoreMedium(self.store, pool.slots, extent_slots=self.positions, rank=rank)
        if self.link is not None:
            inner = PacedMedium(inner, self.link, self._link_slot_bytes, keeps=self._keeps)
        medium = FaultyMedium(inner, pool.slots, self._choose_and_disturb, stuck_polls=self.stuck_polls)
        self._media[rank] = medium
        facts = store_facts(self.positions, pool.share)
        return LanesBelow(store_lanes(SPILL, FETCH, PROBE, medium, pool), facts)

    def _choose_and_disturb(self, job: MediumJob) -> MediumFault:
        if self.disturb is not None:
            self.disturb(self.store)
        return self._choose(job)
