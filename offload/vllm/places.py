"""The registry of places below the pool."""

from collections.abc import Callable
from typing import NamedTuple

from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.worker.side import MakeLanes


class Place(NamedTuple):
    """A place below the pool.

    Attributes:
        make_flows: what decides about its routes, on the scheduler's side.
        make_lanes: what moves their bytes, on each worker.
    """

    make_flows: Callable[[Common], Below]
    make_lanes: MakeLanes


PLACES: tuple[Place, ...] = ()
"""Those that every engine has."""
