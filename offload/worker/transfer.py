"""The transfer engine: jobs in, blocks moved and checked along their lanes, ends out."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from offload.messages import Extents, Ids, Route
from offload.peer_messages import PeerFacts
from offload.worker.allowance import Allowance
from offload.worker.checker import Checker, seal_thread
from offload.worker.copiers.base import Copier, CopyEnd, close_copier, describe
from offload.worker.elsewhere import Elsewhere
from offload.worker.following import Following
from offload.worker.jobs import CANCELLED, TransferEnd, TransferJob
from offload.worker.lanes import CopyLane, Lane
from offload.worker.layout import BlockLayout
from offload.worker.locked import locked
from offload.worker.pump import Pump
from offload.worker.replicas import Share
from offload.worker.seals import Seals

_PAUSE_SECONDS = 0.001

DEADLINE_SECONDS = 30.0
"""A copy takes milliseconds. One that has not ended by then has failed, whatever it does later."""

LANDED_AT_ONCE = 64
"""Loads that ``poll`` tells as done at most. What they leave to do, and admit, makes the next step longer."""


class TransferEngine:
    """Turns jobs over blocks and slots into copies, and their ends back into blocks.

    Nothing raised below passes through: whatever a copier throws is the failed end of the jobs concerned.
    Every job submitted ends exactly once. One whose copy has not ended by its deadline, or was in flight when
    its device broke, is first reported as given up. Seals are made and checked on threads of their own, one
    for each lane; a job ends when that is done too.

    The slots that a job reads are promised to it. Should the promise be broken, the job fails: the
    generations of its slots are asked before its copy begins and once it has ended. A job that fills slots
    takes their generations away when it is submitted, on this same thread and before it copies, also if it is
    held back. So slots that have theirs when the copy has ended were written by nobody while it ran.

    A job that reads slots which another one under way is to fill begins when that one has ended.

    Its ways: it may wait for jobs that fill what it reads (``_following``, ``_elsewhere``), then for its turn
    (``_held``). It copies, and is looked at (``_checking``). It is over until told (``_landed``, ``_ended``).
    What is below the pool moves on threads. Once something has ended there, one of them calls ``go_on``.

    Where ranks share the pool, each copies and seals its part of what fills it, and nothing else of it.

    Requests wait for jobs of some lanes, loads above all, and for others only where these hold GPU blocks. So
    while awaited jobs are under way the others are held back, as long as they would take more than
    ``STORE_BYTES_PER_SECOND``, but none for more than ``HOLD_SECONDS``.

    Hundreds of loads may land from one step to the next. The oldest of them are told, the rest a step later.
    Bad news is told at once, for nobody may be offered a slot that is known to be bad.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        seals: Seals,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_executor: Callable[[], Executor] = seal_thread,
        landed_at_once: int = LANDED_AT_ONCE,
        share: Share = Share(),  # noqa: B008 (immutable)
    ) -> None:
        """A lane for each route. ``clock`` in seconds; an executor runs what it is given in order.

        ``share``: this rank's part of the jobs that fill the pool.
        """
        self._lanes = {lane.route: lane for lane in lanes}
        assert len(self._lanes) == len(lanes), f"two lanes have one route: {[lane.route for lane in lanes]}"
        self._copiers = list({id(lane.copier): lane.copier for lane in lanes}.values())
        self._seals = seals
        self._share = share
        self._clock = clock
        self._checker = Checker(seals, [lane.route for lane in lanes], make_executor)
        self._jobs: dict[int, TransferJob] = {}
        self._held: dict[int, None] = {}  # jobs that wait for their turn, in order
        self._awaited: set[int] = set()  # jobs of awaited lanes that are copying, and not given up
        self._allowance = Allowance(clock())  # of the others
        self._following = Following()
        self._elsewhere = Elsewhere(seals, DEADLINE_SECONDS)
        self._checking: list[int] = []
        self._fence_errors: dict[Route, str] = {}
        self._ended: list[TransferEnd] = []
        self.lock = threading.RLock()
        self.landed_at_once = landed_at_once
        self._landed: dict[int, TransferEnd] = {}  # awaited jobs that ended well, until they are told
        self._pump = Pump.of(lanes, self.go_on)

    @locked
    def __len__(self) -> int:
        """Jobs submitted and not yet reported to be over."""
        return len(self._jobs) + len(self._landed) + sum(end.is_over for end in self._ended)

    @locked
    def fence(self, route: Route) -> None:
        """Jobs of that route submitted from now on see all work the engine has enqueued so far."""
        try:
            self._lanes[route].copier.fence(route)
            self._fence_errors.pop(route, None)
        except Exception as error:
            self._fence_errors[route] = describe(error)

    @locked
    def submit(
        self,
        job_id: int,
        route: Route,
        sources: Ids,
        targets: Ids,
        fills: Ids | None = None,
        extents: Extents | None = None,
        is_urgent: bool = False,
    ) -> None:
        """Copy blocks along a route.

        Args:
            job_id, route: name the job, and one of the lanes.
            sources, targets: ids of the blocks to copy, in chain order, and of where they go, ``int64[n]``.
            fills: where slots are read, the jobs that must have filled them, ``int64[n]``.
            extents, is_urgent: where a tier keeps them; whether it is not held back.
        """
        lane, num_blocks = self._lanes[route], len(targets)
        own = lane.own(self._share, job_id, num_blocks, extents)
        if lane.is_followed and len(own) < num_blocks:
            self._elsewhere.began(job_id, self._clock())
        if num_blocks and not len(own):
            self._ended.append(TransferEnd(job_id, route, num_blocks, targets[:0], None))
            return
        if len(own) < num_blocks:
            sources, targets = sources[own], targets[own]
            fills = None if fills is None else fills[own]
        if lane.fills_pool:
            self._seals.unseal(targets)
        job = TransferJob(lane, sources, targets, self._clock(), fills, extents, own, num_blocks, is_urgent)
        self._jobs[job_id] = job
        if fillers := self._fillers(job):
            job.follows = True
            self._following.wait(job_id, fillers)
        else:
            self._start_or_wait(job_id, job)

    @locked
    def refuse(self, job_id: int, route: Route, targets: Ids, error: str) -> None:
        """That job ends as failed, with nothing copied."""
        self._ended.append(TransferEnd(job_id, route, 0, targets, error))

    @locked
    def cancel(self, job_id: int) -> None:
        """The bytes of that job are no longer wanted: it will end as failed, with no block copied."""
        if job_id in self._jobs:
            self._jobs[job_id].is_cancelled = True
            if self._has_not_begun(job_id):
                self._end(job_id, 0, CANCELLED)
        elif job_id in self._landed:
            self._ended.append(self._landed.pop(job_id).void())
        else:  # ``rest`` may have found it to be done
            self._ended = [end.void() if end.job_id == job_id else end for end in self._ended]

    @locked
    def go_on(self) -> bool:
        """Begin what has waited for copies that have ended. Also called between steps, on another thread.

        Returns whether something waits for other ranks, which wake nobody here.
        """
        for copied in (each for copier in self._copiers for each in self._poll(copier)):
            self._after_copy(copied)
        for job_id in self._elsewhere.over():
            self._start(job_id, self._jobs[job_id], self._jobs[job_id].num_filled(self._seals))
        self._begin_held()
        return len(self._elsewhere) > 0

    @locked
    def poll(self) -> list[TransferEnd]:
        """Jobs that have ended, or were given up, since the last call; loads that landed bit by bit."""
        if not (self._jobs or self._ended or self._landed):
            return []  # as in most steps
        self.go_on()
        self._checker.wait(self._jobs[job_id] for job_id in self._checking if job_id in self._jobs)
        checking, self._checking = self._checking, []
        for job_id in checking:
            self._end_if_checked(job_id)
        self._give_up_overdue()
        ended, self._ended = self._ended, []
        return ended + [self._landed.pop(each) for each in sorted(self._landed)[: self.landed_at_once]]

    def take_facts(self) -> list[PeerFacts]:
        """What there is to tell of other engines, since the last call."""
        return [each for lane in self._lanes.values() for each in lane.take_facts()]

    def rest(self, seconds: float) -> int:
        """Wait until no copy and no checksum is under way, so long at most; ``poll`` still reports the ends.

        Returns how many jobs may still be copying, those that were given up included.
        """
        until = time.monotonic() + seconds
        ended = self.poll()
        while self._jobs and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            ended += self.poll()
        with self.lock:
            self._ended = [*ended, *self._ended]
            return len(self._jobs)

    @locked
    def relocate(self, layout: BlockLayout) -> None:
        """The engine's cache lies elsewhere now. Slots hold what they held."""
        assert not self._jobs, f"{len(self._jobs)} copies are under way"
        for lane in self._lanes.values():
            if isinstance(lane, CopyLane) and lane.meets_gpu:
                lane.layout = layout
        self._seals.relocate(layout)

    def close(self, seconds: float) -> bool:
        """Wait for a checksum that is being made, and for copies in flight, these so long at most.

        Returns False if something may still be copying: then the memory it uses must stay.
        """
        if self._pump is not None:
            self._pump.close()
        self._checker.close()
        until = time.monotonic() + seconds
        closed = [close_copier(copier, max(0.0, until - time.monotonic())) for copier in self._copiers]
        return all(closed)

    @locked
    def check_invariants(self) -> None:
        """Every job stands in one place, and a job whose end is told is not known any more."""
        self._seals.check_invariants()
        ends = [end.job_id for end in self._ended if end.is_over]
        places = [*self._jobs, *self._landed, *ends]
        assert len(set(places)) == len(places), f"jobs have ended twice, or are under way and over: {places}"
        for job_id in self._held:
            job = self._jobs.get(job_id)
            assert job is not None and not job.lane.is_awaited, f"{job_id} waits, and is awaited: {job}"
            assert job.is_copying, f"{job_id} waits, and was begun: {job}"
        self._following.check_invariants(self._jobs.keys())
        self._elsewhere.check_invariants()
        waiting = {each for each in self._jobs if each in self._following or each in self._elsewhere}
        cancelled = [job_id for job_id in waiting if self._jobs[job_id].is_cancelled]
        assert not cancelled, f"{cancelled} wait, and nobody wants them"
        begun = {job_id: job for job_id, job in self._jobs.items() if job_id not in waiting}
        copying = {job_id for job_id, job in begun.items() if job.is_copying and job.lane.is_awaited}
        assert copying == self._awaited, f"{copying} are awaited, known are {self._awaited}"
        copied = {job_id for job_id, job in self._jobs.items() if job.copied is not None}
        assert copied <= set(self._checking), f"{copied} are copied, {self._checking} are being checked"
        given_up = {end.job_id for end in self._ended if not end.is_over}
        for job_id in given_up.difference(ends):
            assert self._jobs[job_id].is_given_up, f"{job_id} was given up, and will never be over"
        self._allowance.check_invariants()

    # Private

    def _poll(self, copier: Copier) -> list[CopyEnd]:
        try:
            return copier.poll()
        except Exception as error:  # a broken device: who knows what it still does
            for job_id, job in list(self._jobs.items()):
                if job.lane.copier is copier and job_id in self._jobs:
                    self._give_up(job_id, job, describe(error))
            return []

    def _has_not_begun(self, job_id: int) -> bool:
        """Whether nothing of that job, which is known, is under way."""
        return job_id in self._held or job_id in self._following or job_id in self._elsewhere

    def _fillers(self, job: TransferJob) -> list[int]:
        """Jobs of this rank under way that fill slots which it reads."""
        if job.fills is None or (num_filled := job.num_filled(self._seals)) == len(job.sources):
            return []
        return [each for each in np.unique(job.fills[num_filled:]).tolist() if each in self._jobs]

    def _start(self, job_id: int, job: TransferJob, num_wanted: int) -> None:
        """What it reads is there, or will never be: copy what can be copied, so many leading blocks."""
        lane = job.lane
        if job.extents is not None and num_wanted < len(job.sources):
            num_wanted = 0  # extents move as a whole
        job.batch = lane.batch(job.sources[:num_wanted], job.targets[:num_wanted], job.extents)
        job.num_wanted, job.since = num_wanted, self._clock()
        if job.was_to_come(self._seals, num_wanted):
            job.missing = f"the slot of block {num_wanted} was not filled by the job that it follows"
        filled = "its slots were filled by other stores" if num_wanted == 0 < len(job.sources) else None
        error = self._fence_errors.get(lane.route) or (filled and (job.missing or filled))
        if error is not None:
            self._end(job_id, 0, error)
        elif lane.is_awaited or job.is_urgent:
            self._awaited |= {job_id} if lane.is_awaited else set()
            self._begin_copy(job_id, job)
        else:
            self._held[job_id] = None
            self._begin_held()
        if not (lane.fills_pool or lane.checks_slots or self._seals.of_blocks) and job_id in self._jobs:
            self._checker.check(job, num_wanted)  # beside the copy

    def _filled(self, job_id: int, job: TransferJob) -> None:
        """That job is over, or given up: it fills nothing any more that anybody could wait for."""
        if job.lane.is_followed:
            self._seals.fail(job_id, job.slots)
        for follower in self._following.over(job_id):
            self._start_or_wait(follower, self._jobs[follower])

    def _start_or_wait(self, job_id: int, job: TransferJob) -> None:
        """This rank has filled what it reads, or will not. Other ranks may be about to."""
        if self._elsewhere.must_wait(job):
            job.follows = True
            self._elsewhere.wait(job_id, job)
            if self._pump is not None:
                self._pump.wake()
        else:
            self._start(job_id, job, job.num_filled(self._seals))

    def _begin_held(self) -> None:
        """Begin those that are held back whose turn has come."""
        if not self._held:
            return
        self._allowance.refresh(self._clock())
        for job_id in list(self._held):
            job = self._jobs[job_id]
            if self._awaited:
                if not self._allowance.has_turn(job.since):
                    return
                self._allowance.take(job.lane.num_bytes(job.batch))
            del self._held[job_id]
            self._begin_copy(job_id, job)

    def _begin_copy(self, job_id: int, job: TransferJob) -> None:
        job.since = self._clock()
        try:
            job.lane.copier.submit(job_id, job.lane.route, job.batch)
        except Exception as failure:
            self._end(job_id, 0, describe(failure))

    def _after_copy(self, copied: CopyEnd) -> None:
        job = self._jobs.get(copied.job_id)
        if job is None:
            return
        job.copied = copied
        self._awaited.discard(copied.job_id)
        if job.is_given_up or job.is_cancelled:
            self._end(copied.job_id, 0, copied.error)
            return
        num_blocks = job.lane.whole_blocks(job.batch, copied.num_copied)
        job.num_current = len(job.slots)
        if job.fills is not None:
            job.num_current = self._seals.num_current(job.slots, job.fills)
        if not job.lane.fills_pool:
            if self._seals.of_blocks and not job.lane.checks_slots:
                self._checker.check(job, num_blocks)
        elif copied.sums is not None:
            self._seals.adopt(copied.job_id, job.slots[: len(copied.sums)], copied.sums)
        elif num_blocks == len(job.slots):
            self._checker.seal(copied.job_id, job)
        self._end_if_checked(copied.job_id)

    def _end_if_checked(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.copied is None:
            return
        if job.checked is not None and not job.checked.done():
            self._checking.append(job_id)
            return
        self._end(job_id, *job.outcome())

    def _end(self, job_id: int, num_good: int, error: str | None) -> None:
        job = self._jobs.pop(job_id)
        self._held.pop(job_id, None)
        self._awaited.discard(job_id)
        self._following.leave(job_id)
        self._elsewhere.leave(job_id)
        end = job.end(job_id, num_good, error)
        if job.lane.is_awaited and end.error is None:
            self._landed[job_id] = end
        else:
            self._ended.append(end)
        self._filled(job_id, job)

    def _give_up_overdue(self) -> None:
        """A checksum that is late is no reason."""
        late = self._clock() - DEADLINE_SECONDS
        for job_id, job in list(self._jobs.items()):
            is_begun = job_id in self._jobs and job_id not in self._held
            if is_begun and job.since <= late and job.copied is None:
                self._give_up(job_id, job, f"the copy has not ended after {DEADLINE_SECONDS:g} s")

    def _give_up(self, job_id: int, job: TransferJob, error: str) -> None:
        if self._has_not_begun(job_id):
            self._end(job_id, 0, error)
        elif not job.is_given_up:
            job.is_given_up = True
            self._awaited.discard(job_id)
            self._ended.append(TransferEnd(job_id, job.lane.route, 0, job.targets, error, is_over=False))
            self._filled(job_id, job)
