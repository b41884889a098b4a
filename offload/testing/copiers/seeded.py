"""A copier that ends when the seed says so, and leaves its targets undefined until then."""

import ctypes
import random
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.messages import GPU_ROUTES, Route
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.testing.copiers.inline import InlineCopier
from offload.worker.copiers import CopyEnd, CpuCopier
from offload.worker.layout import CopyBatch

_JUNK = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySchedule:
    """When copies happen and how they fail.

    Attributes:
        longest_delay: polls, at most, from submission to the copy, and again from there to its report.
        burst_every: ends are reported at one poll in so many.
        fault_rate: share of copies that fail, evenly by kind.
        faults: kinds of faults.
        let_go_rate: share of polls at which what is stuck begins after all.
        threaded: copies are made by the real CPU copier's threads; handing over to them costs a step
            more than all the rest of it.
        bytes_per_poll: copied at most in each route, in order of submission. A copy is made, all at once,
            when the polls since its turn came suffice for it. 0 for no limit.
    """

    longest_delay: int = 0
    burst_every: int = 1
    fault_rate: float = 0.0
    faults: tuple[Fault, ...] = (Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT)
    let_go_rate: float = 0.0
    threaded: bool = False
    bytes_per_poll: int = 0


class _Task(NamedTuple):
    job_id: int
    route: Route
    batch: CopyBatch
    copy_at: int
    report_at: int


class _Done(NamedTuple):
    end: CopyEnd
    report_at: int


class SeededCopier:
    """A copier behind a clock of polls: bytes move late, ends come late and out of order.

    Reading late is what finds a source that was reused too early; junk in the target is what finds a
    reader that came too soon.
    """

    def __init__(
        self,
        schedule: CopySchedule,
        rng: random.Random,
        faults: Counter[str] | None = None,
        routes: Sequence[Route] = GPU_ROUTES,
    ) -> None:
        """``faults`` counts what was done wrong, by route and kind; ``routes`` are those that it serves."""
        self._routes = routes
        self._schedule = schedule
        self._rng = rng
        self._faults = Counter[str]() if faults is None else faults
        self._chosen: dict[int, Fault] = {}
        inner = CpuCopier(routes) if schedule.threaded else InlineCopier()
        self._inner = FaultyCopier(inner, lambda job_id, route: self._chosen.pop(job_id))
        self.held: set[Route] = set()
        """Copies of these routes do not happen until it is taken out again."""
        self.num_faults = 0
        """Copies that met a fault so far."""
        self.copied = Counter[Route]()
        """Bytes copied so far."""
        self.mirrors: list[tuple[SeededCopier, int]] = []
        """Copiers of those that see the same memory, so many bytes further on."""
        self._credit = Counter[Route]()
        self._forced: dict[Route, deque[Fault]] = {way: deque() for way in routes}
        self._now = 0
        self._tasks: list[_Task] = []
        self._made: dict[int, _Task] = {}  # handed on, and not known to have ended
        self._done: list[_Done] = []

    def force(self, route: Route, *faults: Fault) -> None:
        """The next copies of that route meet these faults, whatever the seed says."""
        self._forced[route].extend(faults)

    def relent(self) -> None:
        """No fault is forced any longer."""
        for faults in self._forced.values():
            faults.clear()

    def fence(self, route: Route) -> None:
        self._inner.fence(route)

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        if self._inner.is_dead:
            raise RuntimeError("the copier is dead")
        fault = self._chosen[job_id] = self._choose_fault(route)
        if fault is Fault.REFUSE:
            self._inner.submit(job_id, route, batch)
        for target, size in zip(batch.targets.tolist(), batch.sizes.tolist(), strict=True):
            ctypes.memset(target, _JUNK, size)
        copy_at = self._now + 1 + self._draw_delay()
        self._tasks.append(_Task(job_id, route, batch, copy_at, copy_at + self._draw_delay()))

    def poll(self) -> list[CopyEnd]:
        self._now += 1
        if self._inner.is_stuck and self._rng.random() < self._schedule.let_go_rate:
            self.let_go()
        due = [task for task in self._tasks if task.copy_at <= self._now and task.route not in self.held]
        affordable = self._affordable(due)
        if affordable and not self._inner.is_dead:
            self._run(affordable)
        if self._now % self._schedule.burst_every:
            return []
        ready = [done for done in self._done if done.report_at <= self._now]
        self._done = [done for done in self._done if done.report_at > self._now]
        self._rng.shuffle(ready)
        return [done.end for done in ready]

    def hurry(self, job_ids: Container[int]) -> None:
        """Make these copies now, for a caller that waits for them; later polls pay for their bytes."""
        tasks = [task for task in self._tasks if task.job_id in job_ids]
        for task in tasks:
            self._credit[task.route] -= int(task.batch.sizes.sum())
        self._run(tasks)

    def drain(self) -> None:
        self._run(list(self._tasks))
        self._done = [done._replace(report_at=self._now) for done in self._done]

    def close(self, seconds: float) -> bool:
        self.let_go()
        self._run(list(self._tasks))
        return self._inner.close(seconds)

    def let_go(self) -> None:
        """What is stuck ends after all."""
        self._inner.let_go()
        self._collect()

    @property
    def corrupted(self) -> list[int]:
        """Addresses of bytes made wrong and not written since."""
        return self._inner.corrupted

    def _affordable(self, due: list[_Task]) -> list[_Task]:
        """Those of ``due`` that the bytes of the polls so far suffice for. An idle poll saves nothing up."""
        if not self._schedule.bytes_per_poll:
            return due
        affordable: list[_Task] = []
        for way in self._routes:
            self._credit[way] += self._schedule.bytes_per_poll
            for task in (task for task in due if task.route == way):
                size = int(task.batch.sizes.sum())
                if size > self._credit[way]:
                    break
                self._credit[way] -= size
                affordable.append(task)
            else:
                self._credit[way] = min(0, self._credit[way])
        return affordable

    def _run(self, tasks: list[_Task]) -> None:
        """Make these copies, one route after the other so that a seed always gives the same bytes."""
        self._rng.shuffle(tasks)
        for way in self._rng.sample(self._routes, len(self._routes)):
            for task in [task for task in tasks if task.route == way]:
                if self._inner.is_dead:
                    break
                self._tasks.remove(task)
                self._forget_corrupted(task.batch)
                self._made[task.job_id] = task
                self._inner.submit(task.job_id, way, task.batch)
            self._collect()

    def _collect(self) -> None:
        """Take in what has been copied, to be reported when it is time."""
        self._inner.drain()
        for end in self._inner.poll():
            task = self._made.pop(end.job_id)
            self.copied[task.route] += int(task.batch.sizes[: end.num_copied].sum())
            self._done.append(_Done(end, task.report_at))

    def _forget_corrupted(self, batch: CopyBatch) -> None:
        """Bytes that are written again are no longer wrong."""
        for copier, shift in [(self, 0), *self.mirrors]:
            if copier.corrupted:
                for target, size in zip((batch.targets + shift).tolist(), batch.sizes.tolist(), strict=True):
                    kept = [at for at in copier.corrupted if not target <= at < target + size]
                    copier.corrupted[:] = kept

    def _draw_delay(self) -> int:
        return self._rng.randint(0, self._schedule.longest_delay)

    def _choose_fault(self, route: Route) -> Fault:
        if self._forced[route]:
            fault = self._forced[route].popleft()
        elif self._rng.random() < self._schedule.fault_rate:
            fault = self._rng.choice(self._schedule.faults)
        else:
            fault = Fault.NONE
        if fault is Fault.NONE:
            return fault
        self.num_faults += 1
        self._faults[f"{route.verb} {fault.name.lower()}"] += 1
        return fault
