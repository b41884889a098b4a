"""A tier of a virtual engine: the product's flows and lanes, over a medium in memory that may misbehave."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from offload.messages import POOL, Route, TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.spills import Spills
from offload.scheduler.tiers.tier import TierLimits, make_tier
from offload.testing.media.faulty import FaultyMedium, MediumFault
from offload.testing.media.memory import MemoryMedium
from offload.testing.virtual.meeting import registering
from offload.vllm.places import Place
from offload.worker.media.base import MediumJob, Verb
from offload.worker.media.lane import LanesBelow, PoolParts, medium_lanes, tier_facts

TIER = "memory"
SPILL, FETCH = Route("spill", POOL, TIER), Route("fetch", TIER, POOL)


class VirtualTier:
    """Makes the place, and remembers what is in it from one engine to the next.

    Attributes:
        choose: the fault of each job; None: none.
        num_lives: engines of a run that have it, one after the other.
        num_faults: that were chosen so far, whichever engine met them.
    """

    def __init__(
        self,
        num_places: int,
        *,
        positions: int = 4,
        limits: TierLimits = TierLimits(),  # noqa: B008 (immutable)
        choose: Callable[[MediumJob], MediumFault] | None = None,
        stuck_polls: int | None = None,
        num_lives: int = 1,
    ) -> None:
        """``num_places`` extents of so many positions; ``stuck_polls``: of ``FaultyMedium``."""
        self.num_places = num_places
        self.positions = positions
        self.limits = limits
        self.choose = choose
        self.stuck_polls = stuck_polls
        self.num_lives = num_lives
        self.num_faults = 0
        self._media: dict[int, FaultyMedium] = {}  # by rank
        self._kept: dict[int, MemoryMedium] = {}
        self._inner: dict[int, MemoryMedium] = {}
        self._epoch = 0

    def __repr__(self) -> str:
        return f"VirtualTier({self.num_places}, positions={self.positions}, limits={self.limits})"

    @property
    def place(self) -> Place:
        """To be put below the pool of one engine; of the next one, ask again."""
        self._epoch += 1
        self._kept, self._inner, self._media = self._inner, {}, {}
        return Place(self._make_flows, self._make_lanes)

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is put below the pool of one engine."""
        return (self.place,)

    @property
    def media(self) -> list[FaultyMedium]:
        """Of each rank, in their order."""
        return [self._media[rank] for rank in sorted(self._media)]

    def note_corrupted(self, corrupted: Mapping[int, list[int]]) -> None:
        """Bytes that media make wrong are to be noted there, by the pool's address on a rank."""
        for medium in self.media:
            medium.corrupted = corrupted[medium.pool.address]

    @property
    def moved(self) -> Counter[str]:
        """Extents that are good, by what was done to them for this engine: put or got."""
        return Counter(
            {f"extents {verb.value}": sum(medium.moved[verb] for medium in self.media) for verb in Verb}
        )

    def _make_flows(self, common: Common, facts: Sequence[TierFacts]) -> Below:
        below = make_tier(SPILL, FETCH, common, facts, self.limits)
        self.spills, self.fetches = below.flows
        assert isinstance(self.spills, Spills) and isinstance(self.fetches, Fetches)
        return below

    def _make_lanes(self, pool: PoolParts) -> LanesBelow:
        inner = MemoryMedium(pool.slots, extent_slots=self.positions, num_places=self.num_places)
        rank = registering.rank  # ranks register on threads, in any order
        if rank in self._kept:
            inner.reopen(self._kept[rank])
        medium = FaultyMedium(inner, pool.slots, self._choose, stuck_polls=self.stuck_polls)
        self._media[rank], self._inner[rank] = medium, inner
        facts = tier_facts(inner.recover(), self._epoch, self.num_places, self.positions, pool.share)
        return LanesBelow(medium_lanes(SPILL, FETCH, medium, pool), facts)

    def _choose(self, job: MediumJob) -> MediumFault:
        fault = MediumFault.NONE if self.choose is None else self.choose(job)
        self.num_faults += fault is not MediumFault.NONE
        return fault
