"""The registry of places below the pool."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from offload.messages import TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.worker.media.lane import MakeLanes


class Place(NamedTuple):
    """A place below the pool.

    Attributes:
        make_flows: what decides about its routes, on the scheduler's side, when it knows what workers have
            kept.
        make_lanes: what moves their bytes, on each worker.
        about: what operators are told of it; its values are plain.
    """

    make_flows: Callable[[Common, Sequence[TierFacts]], Below]
    make_lanes: MakeLanes
    about: Mapping[str, object] = MappingProxyType({})

    def flows_of(self, kept: Iterable[TierFacts | None]) -> Callable[[Common], Below]:
        """Makes its flows, where each rank has kept that."""
        facts = [each for each in kept if each is not None]
        return lambda common: self.make_flows(common, facts)


PLACES: tuple[Place, ...] = ()
"""Those that every engine has."""
