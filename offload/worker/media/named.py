"""What media over stores that engines share have in common: they find extents by name."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from offload.worker.media.base import (
    BadExtentError,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against_named,
)
from offload.worker.media.outage import Outage
from offload.worker.media.runner import Runner
from offload.worker.media.store_names import StoreNames, Whose
from offload.worker.media.store_value import ValueFormat
from offload.worker.seals import Checksums

logger = logging.getLogger(__name__)


class NamedMedium(ABC):
    """A ``Medium`` over a store. Threads do what its subclass says of their jobs."""

    def __init__(
        self,
        store: str,
        pool: PoolSlots,
        *,
        whose: Whose,
        extent_slots: int,
        name_key: bytes | None,
        num_threads: dict[Verb, int],
        hang_seconds: float,
        most_extents: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            store: for logs, without secrets.
            pool: whose slots are moved.
            whose: of whom the bytes are.
            extent_slots: slots of the largest extent.
            name_key: see ``StoreNames``.
            num_threads: see ``Runner``, as the rest.
            hang_seconds: a thread that is at something for longer hangs.
            most_extents: that a thread takes at once.
            clock: in seconds.
        """
        self._pool = pool
        self._names = StoreNames(whose.prefix, name_key)
        self._extent_slots = extent_slots
        self._format = ValueFormat(whose.digest, pool.slot_bytes, extent_slots)
        self._clock = clock
        self._outage = Outage(store, clock)
        self._refused: list[MediumEnd] = []
        self._is_closed = False
        self._store = store
        self._off: str | None = None
        self.runner = Runner(
            "store",
            self._move,
            num_threads,
            slot_bytes=pool.slot_bytes,
            hang_seconds=hang_seconds,
            probe=self._probe,
            most_extents=most_extents,
            clock=clock,
        )

    @property
    def is_off(self) -> bool:
        return self._is_closed or self._off is not None or any(self.runner.hangs(verb) for verb in Verb)

    def submit(self, job: MediumJob) -> None:
        error = self._off or reason_against_named(job, self._pool, self._extent_slots)
        if error is None:
            self.runner.submit(job)
        else:
            self._refused.append(MediumEnd(job.job_id, 0, error))

    def poll(self) -> list[MediumEnd]:
        refused, self._refused = self._refused, []
        return refused + self.runner.poll()

    def close(self, seconds: float) -> bool:
        self._is_closed = True
        self.runner.stop()
        if not self.runner.is_over.wait(seconds):
            self.runner.cancel()
        self._release()
        return self.runner.is_over.wait(0.1)

    def check_invariants(self) -> None:
        """Its parts agree with themselves, and nothing of what was refused is good."""
        self.runner.check_invariants()
        self._outage.check_invariants()
        assert not any(end.num_good for end in self._refused), f"{self._refused} were refused"

    @abstractmethod
    def _release(self) -> None:
        """Let go of the store. A thread may still be at something."""

    # On the threads

    def _turn_off(self, error: BadExtentError) -> None:
        """What it has cannot be used until it is opened again."""
        is_first, self._off = self._off is None, f"the store {self._store} is off: {error}"
        if is_first:
            logger.warning("%s. The engine goes on without it", self._off)

    @abstractmethod
    def _move(
        self, verb: Verb, number: int, job: MediumJob, indices: range
    ) -> Sequence[Checksums | Exception]:
        """See ``Move``."""

    @abstractmethod
    def _probe(self, number: int, job: MediumJob) -> int:
        """See ``Probe``."""
