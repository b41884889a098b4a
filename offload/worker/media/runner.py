"""Threads that move extents, and jobs that end exactly once, whatever becomes of a thread."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.messages import BROKEN
from offload.worker.media.base import AbsentError, BrokenExtentError, MediumEnd, MediumJob, Verb
from offload.worker.seals import Checksums

Move = Callable[[Verb, int, MediumJob, range], Sequence[Checksums | Exception]]
"""Moves these extents of a job on a thread of that number for that verb.

Returns the seals of the slots of each, or what went wrong with it. Then it is bad, and the job ends with
those before it. What it raises went wrong with the first.
"""

MoveOne = Callable[[Verb, int, MediumJob, int], Checksums]
"""The same of one extent; it raises what went wrong."""

Probe = Callable[[int, MediumJob], int]
"""Answers a PROBE on a thread of that number: see ``MediumEnd.num_good``. It raises what went wrong."""


def one_by_one(move: MoveOne) -> Move:
    """For a ``Runner`` whose threads take one extent at a time."""
    return lambda verb, number, job, indices: [move(verb, number, job, index) for index in indices]


@dataclass(slots=True, eq=False)
class _Task:
    """A job under way.

    Attributes:
        job: as submitted.
        stop: extents from here on are not begun, or do not count.
        next: the first that is not begun.
        num_moving: threads that are at it.
        error: of the first extent that is not good, or of the job.
        seals: found so far, of all slots.
        began: when its first extent was.
        is_absent: the error is that an extent was not there.
        reason: that was given for that.
    """

    job: MediumJob
    stop: int
    seals: Checksums
    next: int = 0
    num_moving: int = 0
    error: str | None = None
    began: float | None = None
    is_absent: bool = False
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Mover:
    """A thread. ``since``: when it began the extent that it is at; None while it waits."""

    verb: Verb
    number: int
    since: float | None = None


class Runner:
    """Moves extents on daemon threads, a few for each verb.

    The unit of work is the extent, or a few: threads that are free share a job. Extents are begun in order,
    and none behind a bad one. What is to be got goes first: no extent is put while one waits to be got. A
    PROBE is one question.

    A thread that hangs in the kernel holds no lock and is never waited for. It keeps its job from ending, and
    no other: once all threads of a verb hang, the jobs that wait for them end as failed, and so does what is
    submitted then. When one comes back all is as before.
    """

    def __init__(
        self,
        name: str,
        move: Move,
        num_threads: dict[Verb, int],
        *,
        slot_bytes: int,
        hang_seconds: float,
        probe: Probe | None = None,
        most_extents: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            name: of what they move to and from, for names of threads and errors.
            move: moves extents.
            num_threads: for each verb that it does, at least 1.
            slot_bytes: of one slot.
            hang_seconds: a thread that is at an extent for longer hangs.
            probe: answers questions.
            most_extents: that a thread takes at once.
            clock: in seconds.
        """
        self._name = name
        self._move = move
        self._probe = probe
        self._most_extents = most_extents
        self._slot_bytes = slot_bytes
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[Verb, deque[_Task]] = {verb: deque() for verb in Verb}
        self._ended: queue.SimpleQueue[MediumEnd] = queue.SimpleQueue()
        self._is_closing = False
        self.on_end: Callable[[], None] = _nothing
        """Called on a thread when a job has ended there."""
        self._movers = [_Mover(verb, number) for verb in num_threads for number in range(num_threads[verb])]
        self._num_running = len(self._movers)
        self.is_over = threading.Event()
        """All threads have ended."""
        for mover in self._movers:
            title = f"kv-offload-{name}-{mover.verb.value}-{mover.number}"
            threading.Thread(target=self._run, args=(mover,), name=title, daemon=True).start()

    def submit(self, job: MediumJob) -> None:
        """Begin a job as soon as a thread is free. Never waits."""
        if self._is_closing:
            self.refuse(job, f"{self._name} is closed")
        elif self.hangs(job.verb):
            self.refuse(job, self._hang_error(job.verb))
        elif not job.num_extents:
            self._ended.put(MediumEnd(job.job_id, 0, seals=_found(job, 0, np.empty(0, dtype=np.uint64))))
        else:
            task = _Task(job, job.num_extents, np.zeros(len(job.slots), dtype=np.uint64))
            with self._changed:
                self._waiting[job.verb].append(task)
                self._changed.notify_all()

    def refuse(self, job: MediumJob, error: str) -> None:
        """Let a job end that was never begun."""
        self._ended.put(MediumEnd(job.job_id, 0, error))

    def hangs(self, verb: Verb) -> bool:
        """Whether all threads for that verb hang."""
        late = self._clock() - self._hang_seconds
        movers = [mover for mover in self._movers if mover.verb is verb]
        return bool(movers) and all(mover.since is not None and mover.since < late for mover in movers)

    def poll(self) -> list[MediumEnd]:
        """Jobs that have ended since the last call. Never waits."""
        for verb in Verb:
            if self._waiting[verb] and self.hangs(verb):
                self._cancel(verb, self._hang_error(verb))
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def stop(self) -> None:
        """Take no more jobs, and let the threads end once what was submitted has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Let end what has not begun."""
        for verb in Verb:
            self._cancel(verb, f"{self._name} was closed before its turn came")

    def check_invariants(self) -> None:
        """Whoever waits has something left to begin, and nothing is counted below zero."""
        with self._changed:
            for verb, tasks in self._waiting.items():
                for task in tasks:
                    assert task.job.verb is verb, f"job {task.job.job_id} waits for the wrong threads: {task}"
                    assert 0 <= task.next < task.stop, f"{task} waits, and has nothing left to begin"
                    assert task.num_moving <= task.next, f"{task} has more under way than were begun"

    # On the threads

    def _run(self, mover: _Mover) -> None:
        while (taken := self._take(mover)) is not None:
            self._work(mover, *taken)
        with self._changed:
            self._num_running -= 1
            if not self._num_running:
                self.is_over.set()

    def _work(self, mover: _Mover, indices: range, task: _Task) -> None:
        found: Sequence[Checksums | Exception] = []
        try:
            if self._probe is not None and task.job.verb is Verb.PROBE:
                task.stop = self._probe(mover.number, task.job)
            else:
                found = self._move(mover.verb, mover.number, task.job, indices)
        except Exception as failure:  # whatever it is, the thread goes on
            found = [failure]
        mover.since = None
        self._after(task, indices, found)

    def _take(self, mover: _Mover) -> "tuple[range, _Task] | None":
        """The next extents for this thread; waits for one. None when there will be none."""
        mine, first = self._waiting[mover.verb], self._waiting[Verb.GET]
        with self._changed:
            while True:
                if mine and (mover.verb is Verb.GET or not first):
                    break
                if self._is_closing and not mine:
                    return None
                self._changed.wait()
            task = mine[0]
            index = task.next
            if not index:
                task.began = self._clock()
            is_one = mover.verb is Verb.PROBE
            task.next = task.stop if is_one else min(index + self._most_extents, task.stop)
            task.num_moving += 1
            if task.next == task.stop:
                mine.popleft()
                if not first:
                    self._changed.notify_all()
            mover.since = self._clock()
            return range(index, task.next), task

    def _after(self, task: _Task, indices: range, found: Sequence[Checksums | Exception]) -> None:
        starts = task.job.starts
        for index, seals in zip(indices, found, strict=False):
            if not isinstance(seals, Exception):
                task.seals[starts[index] : starts[index + 1]] = seals
        with self._changed:
            task.num_moving -= 1
            for index, error in zip(indices, found, strict=False):
                if isinstance(error, Exception) and index < task.stop:
                    self._cut(task, index, f"extent {index}: {str(error) or type(error).__name__}")
                    if isinstance(error, AbsentError):
                        task.is_absent, task.reason = True, error.reason
                    elif isinstance(error, BrokenExtentError):
                        task.reason = BROKEN
            if task.num_moving or task.next < task.stop:
                return
        self._end(task)

    def _cut(self, task: _Task, stop: int, error: str) -> None:
        """Extents from ``stop`` on do not count, and none is begun any more. The lock is held."""
        if task.next < task.stop:
            self._waiting[task.job.verb].remove(task)
            self._changed.notify_all()
        task.stop, task.error, task.is_absent, task.reason = stop, error, False, ""
        task.next = max(task.next, stop)

    def _cancel(self, verb: Verb, error: str) -> None:
        with self._changed:
            tasks = list(self._waiting[verb])
            for task in tasks:
                self._cut(task, task.next, error)
            over = [task for task in tasks if not task.num_moving]
        for task in over:
            self._end(task)

    def _end(self, task: _Task) -> None:
        """Nothing of it is under way, and nothing will be: called once for each."""
        job, num_good = task.job, task.stop
        num_slots = int(job.starts[num_good])
        seconds = 0.0 if task.began is None else self._clock() - task.began
        seals = _found(job, num_slots, task.seals)
        nbytes = num_slots * self._slot_bytes
        end = MediumEnd(job.job_id, num_good, task.error, seconds, nbytes, seals, task.is_absent, task.reason)
        self._ended.put(end)
        self.on_end()

    def _hang_error(self, verb: Verb) -> str:
        return f"{self._name} hangs: no {verb.value} has ended for {self._hang_seconds:g} s"


def _nothing() -> None:
    """Nobody wants to know."""


def _found(job: MediumJob, num_slots: int, seals: Checksums) -> Checksums | None:
    return seals[:num_slots] if job.verb is Verb.GET else None


class MakeRunner(Protocol):
    """Makes what moves extents; ``Runner``, but in tests."""

    def __call__(
        self,
        name: str,
        move: Move,
        num_threads: dict[Verb, int],
        *,
        slot_bytes: int,
        hang_seconds: float,
        probe: Probe,
        most_extents: int,
    ) -> Runner:
        """As ``Runner`` has it."""
