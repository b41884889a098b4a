"""The transfer engine: jobs in, blocks moved and checked, ends out."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.config import Verify
from offload.messages import Ids
from offload.worker.copiers.base import Copier, CopyEnd, Direction
from offload.worker.layout import BlockLayout, CopyBatch
from offload.worker.seals import Seals

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""The error of a job whose bytes were no longer wanted."""

STORE_BYTES_PER_SECOND = 4 << 30
"""What stores may take of memory and link while loads are under way: a sixth of PCIe 4.0 with 16 lanes."""

HOLD_SECONDS = 0.5
"""No store is held back for longer than that: it holds GPU blocks."""

_STORE_BURST_BYTES = 32 << 20
_PAUSE_SECONDS = 0.001

DEADLINE_SECONDS = 30.0
"""A copy takes milliseconds. One that has not ended by then has failed, whatever it does later."""

CHECK_SECONDS = 0.001
"""What ``poll`` waits at most for checks of loads that have been copied. The next one is a step later."""

LANDED_AT_ONCE = 64
"""Loads that ``poll`` tells as done at most. What they leave to do, and admit, makes the next step longer."""


class TransferEnd(NamedTuple):
    """A job has ended on this rank.

    Attributes:
        job_id: as submitted.
        direction: as submitted.
        num_blocks: leading blocks known to be copied, and checked; all of the job's on success.
        block_ids: the job's GPU blocks.
        error: what went wrong, None on success.
        is_over: False for a job that was given up while its copy may still run. Its memory must be left
            alone until the same job comes again with True.
    """

    job_id: int
    direction: Direction
    num_blocks: int
    block_ids: Ids
    error: str | None
    is_over: bool = True


@dataclass(slots=True, eq=False)
class _Job:
    direction: Direction
    block_ids: Ids
    slots: Ids
    batch: CopyBatch
    num_wanted: int  # leading blocks that the batch copies
    since: float  # when it was handed to the copier, and before that, when it began to wait for its turn
    fills: Ids | None  # of a load: the store jobs that must have filled its slots, and no other since
    is_cancelled: bool = False
    is_given_up: bool = False
    copied: CopyEnd | None = None
    num_current: int = 0  # leading slots that no store had begun to fill again when the copy had ended
    checked: Future[int] | None = None  # leading blocks that were sealed, or found intact


def seal_thread() -> Executor:
    """A thread that makes and checks seals, in order."""
    return ThreadPoolExecutor(1, "kv-offload-seal")


class TransferEngine:
    """Turns jobs over blocks and slots into copies, and their ends back into blocks.

    Nothing raised below it passes through: whatever a copier throws is the failed end of the jobs concerned.
    Every job submitted ends exactly once. One whose copy has not ended by its deadline, or was in flight when
    the device broke, is first reported as given up. Seals are made and checked on threads of their own, one
    for each direction; a job ends when that is done too.

    The slots of a load are promised to it. Should the promise be broken, the load fails: the generations of
    its slots are asked before its copy begins and once it has ended. A store takes its slots' generations
    away when it is submitted, on this same thread and before it copies, also if it is held back. So slots
    that have theirs when the copy has ended were written by nobody while it ran.

    Requests wait for loads, and for stores only where these hold GPU blocks. So while loads are under way
    stores are held back, as long as they would take more than ``STORE_BYTES_PER_SECOND``, but none for more
    than ``HOLD_SECONDS``.

    Hundreds of loads may land from one step to the next. The oldest of them are told, the rest a step later.
    Bad news is told at once, for nobody may be offered a slot that is known to be bad.
    """

    def __init__(
        self,
        layout: BlockLayout,
        copier: Copier,
        seals: Seals,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_executor: Callable[[], Executor] = seal_thread,
        landed_at_once: int = LANDED_AT_ONCE,
    ) -> None:
        """``clock`` in seconds; an executor runs what it is given in order."""
        self._layout = layout
        self._copier = copier
        self._seals = seals
        self._clock = clock
        self._executors = {way: make_executor() for way in Direction}
        self._jobs: dict[int, _Job] = {}
        self._held: dict[int, None] = {}  # stores that wait for their turn, in order
        self._loads: set[int] = set()  # under way, and not given up
        self._allowance = float(_STORE_BURST_BYTES)  # what stores may take now
        self._allowed_at = clock()
        self._checking: list[int] = []
        self._fence_errors: dict[Direction, str] = {}
        self._ended: list[TransferEnd] = []
        self.landed_at_once = landed_at_once
        self._landed: dict[int, TransferEnd] = {}  # loads that ended well, until they are told

    def __len__(self) -> int:
        """Jobs submitted and not yet reported to be over."""
        return len(self._jobs) + len(self._landed) + sum(end.is_over for end in self._ended)

    def fence(self, direction: Direction) -> None:
        """Jobs of that direction submitted from now on see all work the engine has enqueued so far."""
        try:
            self._copier.fence(direction)
            self._fence_errors.pop(direction, None)
        except Exception as error:
            self._fence_errors[direction] = _describe(error)

    def store(self, job_id: int, block_ids: Ids, slots: Ids) -> None:
        """Copy GPU blocks down into slots; ``int64[n]`` each, in chain order."""
        self._seals.unseal(slots)
        self._submit(job_id, Direction.STORE, block_ids, slots, None)

    def load(self, job_id: int, slots: Ids, fills: Ids, block_ids: Ids) -> None:
        """Copy slots, as store jobs ``fills`` left them, up into GPU blocks; ``int64[n]`` each."""
        self._submit(job_id, Direction.LOAD, block_ids, slots, fills)
        job = self._jobs.get(job_id)
        if job is not None and not self._seals.of_blocks:
            self._check(job, job.num_wanted)  # beside the copy

    def refuse(self, job_id: int, direction: Direction, block_ids: Ids, error: str) -> None:
        """That job ends as failed, with nothing copied."""
        self._ended.append(TransferEnd(job_id, direction, 0, block_ids, error))

    def cancel(self, job_id: int) -> None:
        """The bytes of that job are no longer wanted: it will end as failed, with no block copied."""
        if job_id in self._jobs:
            self._jobs[job_id].is_cancelled = True
            if job_id in self._held:
                self._end(job_id, 0, CANCELLED)
        elif job_id in self._landed:
            self._ended.append(_void(self._landed.pop(job_id)))
        else:  # ``rest`` may have found it to be done
            self._ended = [_void(end) if end.job_id == job_id else end for end in self._ended]

    def poll(self) -> list[TransferEnd]:
        """Jobs that have ended, or were given up, since the last call; loads that landed bit by bit."""
        try:
            copies = self._copier.poll()
        except Exception as error:  # a broken device: who knows what it still does
            copies = []
            for job_id, job in list(self._jobs.items()):
                self._give_up(job_id, job, _describe(error))
        for copied in copies:
            self._after_copy(copied)
        self._begin_stores()
        self._await_checks()
        checking, self._checking = self._checking, []
        for job_id in checking:
            self._end_if_checked(job_id)
        self._give_up_overdue()
        ended, self._ended = self._ended, []
        oldest = sorted(self._landed)[: self.landed_at_once]
        return ended + [self._landed.pop(job_id) for job_id in oldest]

    def rest(self, seconds: float) -> int:
        """Wait until no copy and no checksum is under way, so long at most; ``poll`` still reports the ends.

        Returns how many jobs may still be copying, those that were given up included.
        """
        until = time.monotonic() + seconds
        ended = self.poll()
        while self._jobs and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            ended += self.poll()
        self._ended = ended
        return len(self._jobs)

    def relocate(self, layout: BlockLayout) -> None:
        """The engine's cache lies elsewhere now. Slots hold what they held."""
        assert not self._jobs, f"{len(self._jobs)} copies are under way"
        self._layout = layout
        self._seals.relocate(layout)

    def close(self, seconds: float) -> bool:
        """Wait for a checksum that is being made, and for copies in flight, these so long at most.

        Returns False if something may still be copying: then the memory it uses must stay.
        """
        for executor in self._executors.values():
            executor.shutdown(cancel_futures=True)
        try:
            return self._copier.close(seconds)
        except Exception as error:  # a broken device: nothing moves there any more
            logger.warning("copies in flight were given up: %s", _describe(error))
            return True

    def check_invariants(self) -> None:
        """Every job stands in one place, and a job whose end is told is not known any more."""
        self._seals.check_invariants()
        ends = [end.job_id for end in self._ended if end.is_over]
        places = [*self._jobs, *self._landed, *ends]
        assert len(set(places)) == len(places), f"jobs have ended twice, or are under way and over: {places}"
        for job_id in self._held:
            job = self._jobs.get(job_id)
            assert job is not None and job.direction is Direction.STORE, f"{job_id} waits, and is no store"
            assert job.copied is None and not job.is_given_up, f"{job_id} waits, and was begun: {job}"
        copying = {job_id: job for job_id, job in self._jobs.items() if not (job.copied or job.is_given_up)}
        begun = {job_id for job_id, job in copying.items() if job.direction is Direction.LOAD}
        assert begun == self._loads, f"loads {begun} are under way, known are {self._loads}"
        copied = {job_id for job_id, job in self._jobs.items() if job.copied is not None}
        assert copied <= set(self._checking), f"{copied} are copied, {self._checking} are being checked"
        given_up = {end.job_id for end in self._ended if not end.is_over}
        for job_id in given_up.difference(ends):
            assert self._jobs[job_id].is_given_up, f"{job_id} was given up, and will never be over"
        assert self._allowance <= _STORE_BURST_BYTES, f"stores may take {self._allowance} bytes now"

    # Private

    def _submit(
        self, job_id: int, direction: Direction, block_ids: Ids, slots: Ids, fills: Ids | None
    ) -> None:
        num_wanted = len(slots) if fills is None else self._seals.num_current(slots, fills)
        wanted = slice(num_wanted)
        if direction is Direction.STORE:
            batch = self._layout.store(block_ids[wanted], slots[wanted])
        else:
            batch = self._layout.load(slots[wanted], block_ids[wanted])
        job = self._jobs[job_id] = _Job(direction, block_ids, slots, batch, num_wanted, self._clock(), fills)
        error = self._fence_errors.get(direction)
        if error is None and num_wanted == 0 < len(slots):
            error = "its slots were filled by other stores"
        if error is not None:
            self._end(job_id, 0, error)
        elif direction is Direction.LOAD:
            self._loads.add(job_id)
            self._begin_copy(job_id, job)
        else:
            self._held[job_id] = None
            self._begin_stores()

    def _begin_stores(self) -> None:
        """Begin those that are held back whose turn has come."""
        if not self._held:
            return
        now = self._clock()
        gained = (now - self._allowed_at) * STORE_BYTES_PER_SECOND
        self._allowance = min(self._allowance + gained, float(_STORE_BURST_BYTES))
        self._allowed_at = now
        for job_id in list(self._held):
            job = self._jobs[job_id]
            if self._loads:
                if self._allowance <= 0 and now < job.since + HOLD_SECONDS:
                    return
                self._allowance -= float(job.batch.sizes.sum())
            del self._held[job_id]
            self._begin_copy(job_id, job)

    def _begin_copy(self, job_id: int, job: _Job) -> None:
        job.since = self._clock()
        try:
            self._copier.submit(job_id, job.direction, job.batch)
        except Exception as failure:
            self._end(job_id, 0, _describe(failure))

    def _after_copy(self, copied: CopyEnd) -> None:
        job = self._jobs.get(copied.job_id)
        if job is None:
            return
        job.copied = copied
        self._loads.discard(copied.job_id)
        if job.is_given_up or job.is_cancelled:
            self._end(copied.job_id, 0, copied.error)
            return
        num_blocks = self._layout.whole_blocks(job.batch, copied.num_copied)
        job.num_current = len(job.slots)
        if job.fills is not None:
            job.num_current = self._seals.num_current(job.slots, job.fills)
        if job.direction is Direction.LOAD and self._seals.of_blocks:
            self._check(job, num_blocks)
        elif job.direction is Direction.STORE and num_blocks == len(job.slots):
            self._seal(copied.job_id, job)
        self._end_if_checked(copied.job_id)

    def _seal(self, job_id: int, job: _Job) -> None:
        if self._seals.verify is Verify.NEVER:
            self._seals.seal(job_id, job.block_ids, job.slots)
        else:
            job.checked = self._begin(job.direction, self._seals.seal, job_id, job.block_ids, job.slots)

    def _check(self, job: _Job, num_blocks: int) -> None:
        if self._seals.verify is not Verify.NEVER:
            blocks = slice(num_blocks)
            job.checked = self._begin(
                job.direction, self._seals.num_intact, job.block_ids[blocks], job.slots[blocks]
            )

    def _begin(self, direction: Direction, work: Callable[..., int], *arguments: Any) -> Future[int]:
        try:
            return self._executors[direction].submit(work, *arguments)
        except RuntimeError as error:  # no more threads: the job fails, and none but it
            failed = Future[int]()
            failed.set_exception(error)
            return failed

    def _await_checks(self) -> None:
        """Checks of loaded blocks begin when the copy has ended, and a sample takes much less than a step."""
        if self._checking and self._seals.of_blocks:
            jobs = [self._jobs[job_id] for job_id in self._checking if job_id in self._jobs]
            checks = [job.checked for job in jobs if job.checked and job.direction is Direction.LOAD]
            if checks:
                wait(checks, CHECK_SECONDS)

    def _end_if_checked(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.copied is None:
            return
        if job.checked is not None and not job.checked.done():
            self._checking.append(job_id)
            return
        _, num_copied, error = job.copied
        num_blocks = self._layout.whole_blocks(job.batch, num_copied)
        if error is None and num_blocks < job.num_wanted:
            error = f"the copy ended after {num_blocks} of {job.num_wanted} blocks"
        if job.num_current < len(job.slots):
            num_blocks = min(num_blocks, job.num_current)
            error = error or f"the slot of block {job.num_current} was filled by another store"
        if job.checked is not None:
            try:
                num_intact = job.checked.result()
            except Exception as failure:
                num_intact, error = 0, _describe(failure)
            if num_intact < num_blocks:
                num_blocks = num_intact
                error = error or f"block {num_intact} is not what was stored: its checksum differs"
        self._end(job_id, num_blocks, error)

    def _end(self, job_id: int, num_blocks: int, error: str | None) -> None:
        job = self._jobs.pop(job_id)
        self._held.pop(job_id, None)
        self._loads.discard(job_id)
        if job.is_cancelled:
            num_blocks, error = 0, CANCELLED
        elif job.is_given_up:
            num_blocks, error = 0, "the copy ended after it was given up"
        end = TransferEnd(job_id, job.direction, num_blocks, job.block_ids, error)
        if job.direction is Direction.LOAD and error is None:
            self._landed[job_id] = end
        else:
            self._ended.append(end)

    def _give_up_overdue(self) -> None:
        """A checksum that is late is no reason."""
        late = self._clock() - DEADLINE_SECONDS
        for job_id, job in self._jobs.items():
            if job.since <= late and job.copied is None and job_id not in self._held:
                self._give_up(job_id, job, f"the copy has not ended after {DEADLINE_SECONDS:g} s")

    def _give_up(self, job_id: int, job: _Job, error: str) -> None:
        if job_id in self._held:  # nothing of it is under way
            self._end(job_id, 0, error)
        elif not job.is_given_up:
            job.is_given_up = True
            self._loads.discard(job_id)
            self._ended.append(TransferEnd(job_id, job.direction, 0, job.block_ids, error, is_over=False))


def _void(end: TransferEnd) -> TransferEnd:
    """That of a job whose bytes are not wanted after all."""
    return end._replace(num_blocks=0, error=CANCELLED)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
