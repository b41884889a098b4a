"""A pool that outlives its engine, on a worker: what its slots hold is written beside them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from offload.messages import Kept, PoolFacts
from offload.worker.pool.region import Region
from offload.worker.pool.segment import Segment
from offload.worker.pool.siblings import Home
from offload.worker.pool.table import SlotTable


class Lasting:
    """One rank's part of it, where it is the first of those that share it, or the view that another has."""

    def __init__(
        self, table: SlotTable, facts: PoolFacts, segment: Segment, region: Region | None, home: Home
    ) -> None:
        """As it was opened.

        Args:
            table: what its slots hold.
            facts: what they held when it was opened.
            segment: its memory. As long as it is open here nobody adopts it, whatever became of its owner.
            region: owned as long as this is open; None: another rank owns it, and writes the table.
            home: where it lies, and whose it is.
        """
        self.facts = facts
        self.home = home
        self._table = table
        self._segment = segment
        self._region = region
        self._executor: Executor | None = None

    def __str__(self) -> str:
        where = "another rank's" if self._region is None else str(self._region.path)
        return f"{where}, with {len(self.facts.kept.slots)} blocks from before"

    def unproven(self, num_slots: int) -> npt.NDArray[np.bool_]:
        """Slots that earlier engines have filled."""
        found = np.zeros(num_slots, dtype=np.bool_)
        found[self.facts.kept.slots] = True
        return found

    def begin(self, make_executor: Callable[[], Executor]) -> None:
        """From now on ``keep`` writes, on a thread of its own."""
        if self._region is not None:
            self._executor = make_executor()

    def keep(self, news: Sequence[Kept]) -> None:
        """Slots hold that, also for later lives. Waits for nothing; one that owns no region does nothing."""
        if self._executor is None:
            return
        for kept in news:
            with suppress(RuntimeError):  # no more threads: later lives do without it
                self._executor.submit(self._table.keep, kept)

    def rest(self) -> None:
        """Wait until all is written."""
        if self._executor is not None:
            self._executor.shutdown()

    def close(self) -> None:
        """Give it up: this rank writes to its slots no more."""
        self._segment.close()
        if self._region is not None:
            self._region.close()
