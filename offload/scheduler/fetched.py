"""What comes into the pool from tiers: how much of it is under way, and which slots came from where."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.messages import Ids
from offload.scheduler.flow import Job


class Fetched:
    """Shared by the fetches and the spills of all tiers. With one tier nothing is noted of slots.

    Attributes:
        num_filling: slots that fetches fill which were not given up.
        num_ahead: slots fetched for requests that are yet to ask.
    """

    def __init__(self, num_slots: int) -> None:
        """Nothing has come. ``num_slots``: of the pool."""
        self._num_slots = num_slots
        self._tiers: list[str] = []
        self._jobs: Ids = np.empty(0, dtype=np.int64)  # by slot: the fetch that filled it last
        self._came_from: Ids = np.empty(0, dtype=np.int64)  # and the tier, by its place in the list
        self.num_filling = 0
        self.num_ahead = 0

    def add_tier(self, name: str) -> None:
        """A tier that is written to. To be told before anything is fetched."""
        self._tiers.append(name)
        if len(self._tiers) == 2:
            self._jobs = np.full(self._num_slots, -1, dtype=np.int64)
            self._came_from = np.full(self._num_slots, -1, dtype=np.int64)

    @property
    def has_several(self) -> bool:
        """Whether what comes from one tier might be written to another."""
        return len(self._tiers) > 1

    def begin(self, slots: Ids, job_id: int, tier: str) -> None:
        """That job of that tier fills these slots."""
        if self.has_several and tier in self._tiers:
            self._jobs[slots] = job_id
            self._came_from[slots] = self._tiers.index(tier)

    def from_others(self, slots: Ids, filled_by: Ids, tier: str) -> npt.NDArray[np.bool_]:
        """Which of these slots, filled by these jobs, came from another tier than that one."""
        is_fetched = (self._jobs[slots] == filled_by) & (filled_by >= 0)
        found: npt.NDArray[np.bool_] = is_fetched & (self._came_from[slots] != self._tiers.index(tier))
        return found

    def check(self, jobs: Iterable[Job[Any]]) -> None:
        """Slots are counted that fetches fill, which have these jobs. For tests."""
        num_filling = sum(job.num_blocks for job in jobs if not job.given_up)
        assert num_filling == self.num_filling, f"{num_filling} slots fill, {self.num_filling} counted"
