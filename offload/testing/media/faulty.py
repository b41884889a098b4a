"""A medium that misbehaves on request, for tests."""

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from offload.worker.media.base import Medium, MediumEnd, MediumJob, PoolSlots, Verb


class MediumFault(Enum):
    """What happens to one job."""

    NONE = auto()
    REFUSE = auto()
    """It ends at once, with an error and nothing good."""
    FAIL = auto()
    """All of it is done, and it ends with an error and nothing good."""
    TORN = auto()
    """The first half of its extents is done, and it ends with an error and nothing good."""
    SHORT = auto()
    """It ends with an error after the first half of its extents, which are good."""
    LATE = auto()
    """Its end is told at the poll after ``late_polls`` others."""
    STUCK = auto()
    """It does not begin before ``let_go``."""
    WRONG_BYTES = auto()
    """GET: it ends as if all were well, with one byte of its last good slot wrong."""
    LOSE = auto()
    """PUT: it ends as if all were well, and nothing was put."""
    LIE = auto()
    """PROBE: it ends as if all that was asked for were there."""


class FaultyMedium:
    """Wraps a medium; a function chooses each job's fault."""

    def __init__(
        self,
        inner: Medium,
        pool: PoolSlots,
        choose: Callable[[MediumJob], MediumFault] | None = None,
        *,
        late_polls: int = 3,
        stuck_polls: int | None = None,
    ) -> None:
        """``pool`` is the inner medium's; every ``stuck_polls`` polls, what is stuck is let go."""
        self.inner = inner
        self.pool = pool
        self._choose = choose or (lambda job: MediumFault.NONE)
        self._late_polls = late_polls
        self._stuck_polls = stuck_polls
        self._num_polls = 0
        self._faults: dict[int, MediumFault] = {}
        self._jobs: dict[int, MediumJob] = {}
        self._ended: list[MediumEnd] = []
        self._late: dict[int, tuple[int, MediumEnd]] = {}
        self._stuck: list[MediumJob] = []
        self.moved: Counter[Verb] = Counter()
        """Extents that were told as good."""
        self.num_jobs: Counter[Verb] = Counter()
        """Submitted."""
        self.is_gone = False
        """While it is, every job is refused and the medium is off."""
        self.corrupted: list[int] = []
        """Addresses of the bytes that were made wrong."""

    @property
    def is_off(self) -> bool:
        return self.is_gone or self.inner.is_off

    @property
    def is_stuck(self) -> bool:
        """Whether a job begins only after ``let_go``."""
        return bool(self._stuck)

    def let_go(self) -> None:
        """What is stuck begins now."""
        stuck, self._stuck = self._stuck, []
        for job in stuck:
            self.inner.submit(job)

    def submit(self, job: MediumJob) -> None:
        self.num_jobs[job.verb] += 1
        fault = MediumFault.REFUSE if self.is_gone else self._choose(job)
        if fault is MediumFault.REFUSE:
            self._ended.append(MediumEnd(job.job_id, 0, "refused on purpose"))
        elif fault is MediumFault.LOSE and job.verb is Verb.PUT:
            nbytes = len(job.slots) * self.pool.slot_bytes
            self._ended.append(MediumEnd(job.job_id, job.num_extents, None, 0.0, nbytes))
        else:
            self._faults[job.job_id], self._jobs[job.job_id] = fault, job
            if fault in (MediumFault.TORN, MediumFault.SHORT):
                job = _first_half(job)
            if fault is MediumFault.STUCK:
                self._stuck.append(job)
            else:
                self.inner.submit(job)

    def poll(self) -> list[MediumEnd]:
        self._num_polls += 1
        if self._stuck_polls is not None and self._num_polls % self._stuck_polls == 0:
            self.let_go()
        ready, self._ended = self._ended, []
        for job_id, (polls, end) in list(self._late.items()):
            self._late[job_id] = (polls - 1, end)
            if polls <= 1:
                ready.append(self._late.pop(job_id)[1])
        for end in self.inner.poll():
            fault, job = self._faults.pop(end.job_id), self._jobs.pop(end.job_id)
            self.moved[job.verb] += end.num_good
            if fault is MediumFault.LATE:
                self._late[end.job_id] = (self._late_polls, end)
            else:
                ready.append(self._spoiled(fault, job, end))
        return ready

    def close(self, seconds: float) -> bool:
        return self.inner.close(seconds) and not self.is_stuck

    def _spoiled(self, fault: MediumFault, job: MediumJob, end: MediumEnd) -> MediumEnd:
        if fault in (MediumFault.FAIL, MediumFault.TORN):
            seals = None if end.seals is None else end.seals[:0]
            return replace(end, num_good=0, error="failed on purpose", nbytes=0, seals=seals)
        if fault is MediumFault.LIE and job.verb is Verb.PROBE:
            return replace(end, num_good=job.num_extents, error=None)
        if fault is MediumFault.SHORT:
            return replace(end, error=end.error or "ended short on purpose")
        if fault is MediumFault.WRONG_BYTES and job.verb is Verb.GET and end.num_good:
            last = int(job.slots[job.starts[end.num_good] - 1])
            address = self.pool.address + last * self.pool.slot_bytes + self.pool.slot_bytes // 2
            byte = ctypes.c_uint8.from_address(address)
            byte.value ^= 1
            self.corrupted.append(address)
        return end


def _first_half(job: MediumJob) -> MediumJob:
    stop = job.num_extents // 2
    num_slots = int(job.starts[stop])
    return replace(
        job,
        places=job.places[:stop],
        generations=job.generations[:stop],
        starts=job.starts[: stop + 1],
        slots=job.slots[:num_slots],
        seals=None if job.seals is None else job.seals[:num_slots],
        skips=None if job.skips is None else job.skips[:stop],
        names=None if job.names is None else job.names[:stop],
        parents=None if job.parents is None else job.parents[:stop],
        depths=None if job.depths is None else job.depths[:stop],
    )
