"""What comes into the pool from tiers: how much of it is under way, and which slots came from where."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.messages import Ids
from offload.scheduler.flow import Job

_MOST_PLACES = 255
_OTHERS = "others"
"""How places are called once there have been so many."""


class Fetched:
    """Shared by the fetches and the spills of all tiers. Without any nothing is noted of slots.

    Attributes:
        num_filling: slots that fetches fill which were not given up.
        num_ahead: slots fetched for requests that are yet to ask.
    """

    def __init__(self, num_slots: int) -> None:
        """Nothing has come. ``num_slots``: of the pool."""
        self._num_slots = num_slots
        self._tiers: list[str] = []
        self._places: dict[str, int] = {}  # that something was fetched from, and the numbers of these
        self._jobs: Ids = np.empty(0, dtype=np.int64)  # by slot: the fetch that filled it last
        self._came_from: Ids = np.empty(0, dtype=np.int64)  # and the place, by its number
        self.num_filling = 0
        self.num_ahead = 0

    def prepare(self) -> None:
        """Something is to be fetched: from now on there is room for a note of each slot."""
        if not len(self._jobs):
            self._jobs = np.full(self._num_slots, -1, dtype=np.int64)
            self._came_from = np.full(self._num_slots, -1, dtype=np.int64)

    def add_tier(self, name: str) -> None:
        """A tier that is written to. To be told before anything is fetched."""
        self._tiers.append(name)

    @property
    def has_several(self) -> bool:
        """Whether what comes from one tier might be written to another."""
        return len(self._tiers) > 1

    def begin(self, slots: Ids, job_id: int, place: str) -> None:
        """That job fills these slots from that place: a tier, or another engine. After ``prepare``."""
        if place not in self._places and len(self._places) >= _MOST_PLACES:
            place = _OTHERS
        self._jobs[slots] = job_id
        self._came_from[slots] = self._places.setdefault(place, len(self._places))

    def from_others(self, slots: Ids, filled_by: Ids, tier: str) -> npt.NDArray[np.bool_]:
        """Which of these slots, filled by these jobs, came from another tier than that one."""
        others = [number for place, number in self._places.items() if place in self._tiers and place != tier]
        found: npt.NDArray[np.bool_] = np.isin(self._places_of(slots, filled_by), others)
        return found

    def count(self, slots: Ids, filled_by: Ids, since: int) -> dict[str, int]:
        """How many of these slots, filled by these jobs, came from which place by jobs from ``since`` on."""
        if not len(self._jobs):
            return {}
        came_from = self._places_of(slots, filled_by)
        counts = np.bincount(came_from[(came_from >= 0) & (filled_by >= since)], minlength=len(self._places))
        return {place: int(counts[number]) for place, number in self._places.items() if counts[number]}

    def check(self, jobs: Iterable[Job[Any]]) -> None:
        """Slots are counted that fetches fill, which have these jobs. For tests."""
        num_filling = sum(job.num_blocks for job in jobs if not job.given_up)
        assert num_filling == self.num_filling, f"{num_filling} slots fill, {self.num_filling} counted"

    def _places_of(self, slots: Ids, filled_by: Ids) -> Ids:
        """Numbers of the places that these slots came from, -1 where a store has filled them."""
        if not len(self._jobs):
            return np.full(len(slots), -1, dtype=np.int64)
        is_fetched = (self._jobs[slots] == filled_by) & (filled_by >= 0)
        found: Ids = np.where(is_fetched, self._came_from[slots], -1)
        return found
