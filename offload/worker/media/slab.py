"""A disk below the pool: a slab of places and a log of what lies in them."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.errors import OffloadError
from offload.files.private import PrivateDirectory
from offload.files.superblock import (
    Superblock,
    age_of,
    check_same,
    read_superblock,
    write_superblock,
)
from offload.messages import EPOCH_SHIFT, Ids
from offload.worker.media.base import (
    BadExtentError,
    BrokenExtentError,
    Extent,
    Label,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against,
)
from offload.worker.media.runner import Runner, one_by_one
from offload.worker.media.seal_log import SEALS, Kept, SealLog
from offload.worker.media.slab_file import Bounce, SlabFile, SlabShape
from offload.worker.seals import Checksums, checksums_of

logger = logging.getLogger(__name__)

_PASSING = {errno.EINTR, errno.EAGAIN, errno.ENOMEM}
"""Errors that say nothing about the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabOptions:
    """How a slab is worked with.

    Attributes:
        get_threads: read extents, at most.
        put_threads: write them.
        hang_seconds: a read or write that takes longer hangs.
        sync_seconds: what was written is brought to the device that often. A killed process loses nothing
            that was reported in any case; a machine without power loses what came after the last time.
        spare_records: of the log, beyond two for each place, before it is written anew.
        direct: try O_DIRECT. Without it, bytes go through the page cache, which is asked to drop them.
        verify: check what is written and read. Benchmarks alone turn it off.
    """

    get_threads: int = 4
    put_threads: int = 4
    hang_seconds: float = 10.0
    sync_seconds: float = 5.0
    spare_records: int = 1 << 14
    direct: bool = True
    verify: bool = True


class SlabMedium:
    """A ``Medium`` on a directory of its own, which other processes are kept from.

    The directory has ``lock``, ``superblock``, ``slab`` and ``seals``. The slab has no metadata: a record of
    ``seals`` says which generation lies in a place, and the checksum of each of its slots. So it does not
    matter in which order a crash keeps bytes and records: what does not fit together is a miss.

    A PUT checks the pool's bytes against their seals right before it writes them, so rot is not passed down.
    A GET checks everything that it has read.

    What the disk refuses (full, read-only, broken, gone) turns the medium off until it is opened again: each
    job ends as failed, and one line is logged. A disk that hangs does the same until it is back.
    """

    def __init__(
        self,
        directory: Path,
        pool: PoolSlots,
        *,
        namespace: str,
        extent_slots: int,
        num_places: int,
        options: SlabOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open it, or make it, and start its threads. Reads the log, and no byte of the slab.

        Args:
            directory: for this rank alone; made if it is not there.
            pool: whose slots are moved. Its first slots are written to a spare place and read back, so
                nobody else may be using them yet.
            namespace: all that must be equal for bytes to be usable, in clear; with the rank.
            extent_slots: slots of the largest extent.
            num_places: extents that it holds; others than last time are allowed.
            options: how to work.
            clock: in seconds.

        Raises:
            TierError: the directory cannot be had, is another process's, or holds another namespace's bytes.
            TierFormatError: it is damaged, or of a format that is not read.
        """
        self._options = options or SlabOptions()
        self._pool = pool
        self._shape = SlabShape(pool.slot_bytes, extent_slots, num_places)
        self._directory = PrivateDirectory.open(directory)
        self._slab: SlabFile | None = None
        self._seals: SealLog | None = None
        try:
            self.epoch = self._open(namespace)
        except BaseException:
            self._close_files()
            raise
        self._off: str | None = None
        self._says_hanging = False
        self._needs_sync = False
        self._jobs: dict[int, MediumJob] = {}
        self._readers = np.zeros(num_places, dtype=np.int32)
        self._is_written = np.zeros(num_places, dtype=np.bool_)
        self._refused: list[MediumEnd] = []
        self._bounces: dict[tuple[Verb, int], Bounce] = {}
        self._is_closed = threading.Event()
        self.runner = Runner(
            "slab",
            one_by_one(self._move),
            {Verb.GET: self._options.get_threads, Verb.PUT: self._options.put_threads},
            slot_bytes=pool.slot_bytes,
            hang_seconds=self._options.hang_seconds,
            clock=clock,
        )
        threading.Thread(target=self._keep, name="kv-offload-slab-sync", daemon=True).start()

    @property
    def is_direct(self) -> bool:
        """Whether it works with O_DIRECT."""
        return self._slab is not None and self._slab.is_direct

    @property
    def is_off(self) -> bool:
        return self._off is not None or any(self.runner.hangs(verb) for verb in Verb)

    @property
    def num_places(self) -> int:
        """Extents that it holds."""
        return self._shape.num_places

    def recover(self) -> Kept:
        """What lies where, as its log says; whether it does is found out when it is got."""
        assert self._seals is not None
        return self._seals.kept()

    def submit(self, job: MediumJob) -> None:
        error = self._off or reason_against(job, self._pool, self.num_places, self._shape.extent_slots)
        error = error or self._conflict(job)
        if error is not None:
            self._refused.append(MediumEnd(job.job_id, 0, error))
            return
        self._jobs[job.job_id] = job
        self._count(job, 1)
        self.runner.submit(job)

    def poll(self) -> list[MediumEnd]:
        ended = self.runner.poll()
        for end in ended:
            self._count(self._jobs.pop(end.job_id), -1)
        refused, self._refused = self._refused, []
        self._say_if_it_hangs()
        return refused + ended

    def close(self, seconds: float) -> bool:
        self.runner.stop()
        if not self._is_closed.wait(seconds):
            self.runner.cancel()
        return self._is_closed.is_set()

    def check_invariants(self) -> None:
        """Places are taken by exactly the jobs that have not ended."""
        self.runner.check_invariants()
        readers, is_written = np.zeros_like(self._readers), np.zeros_like(self._is_written)
        for job in self._jobs.values():
            if job.verb is Verb.GET:
                np.add.at(readers, job.places, 1)
            else:
                is_written[job.places] = True
        assert np.array_equal(readers, self._readers), f"{self._readers} read, jobs are {self._jobs}"
        assert np.array_equal(is_written, self._is_written), f"{self._is_written}, jobs are {self._jobs}"
        assert not (self._is_written & (self._readers > 0)).any(), "places are read and written at once"
        if self._seals is not None and not self._is_closed.is_set():
            self._seals.check_invariants()

    # On the engine's thread

    def _conflict(self, job: MediumJob) -> str | None:
        """Why it cannot begin while those under way are."""
        if job.job_id in self._jobs:
            return f"a job {job.job_id} is under way"
        places: Ids = job.places
        if self._is_written[places].any():
            return f"a place is being written: {places[self._is_written[places]].tolist()}"
        if job.verb is Verb.PUT and self._readers[places].any():
            return f"a place is being read: {places[self._readers[places] > 0].tolist()}"
        if job.verb is Verb.PUT and len(np.unique(places)) != len(places):
            return "a place comes twice"
        return None

    def _count(self, job: MediumJob, step: int) -> None:
        if job.verb is Verb.GET:
            np.add.at(self._readers, job.places, step)
        else:
            self._is_written[job.places] = step > 0

    def _say_if_it_hangs(self) -> None:
        hangs = any(self.runner.hangs(verb) for verb in Verb)
        if hangs and not self._says_hanging:
            logger.warning(
                "%s hangs: no read, or no write, has ended for %g s; it is off until one does",
                self._directory.path,
                self._options.hang_seconds,
            )
        self._says_hanging = hangs

    # On its threads

    def _move(self, verb: Verb, number: int, job: MediumJob, index: int) -> Checksums:
        if self._off is not None:
            raise BadExtentError(self._off)
        extent = job.extent(index)
        bounce = self._bounce(verb, number)
        try:
            if verb is Verb.GET:
                return self._get(extent, bounce)
            return self._put(extent, job.label(index), bounce)
        except (OSError, OffloadError) as error:
            self._turn_off(error)
            raise

    def _put(self, extent: Extent, label: Label, bounce: Bounce | None) -> Checksums:
        place, generation, slots, seals, _ = extent
        assert self._slab is not None and self._seals is not None and seals is not None
        addresses = self._pool.addresses(slots)
        if bounce is not None:
            bounce.fill(addresses)
            addresses = bounce.addresses(len(slots))
        self._check(addresses, seals, "the pool's bytes have changed since they were sealed")
        self._seals.forget(place, generation)
        self._slab.write(place, self._slab.views(slots) if bounce is None else bounce.views(len(slots)))
        self._seals.add(place, generation, seals, label)
        self._needs_sync = True
        return seals

    def _get(self, extent: Extent, bounce: Bounce | None) -> Checksums:
        place, generation, slots, wanted, skip = extent
        assert self._slab is not None and self._seals is not None
        seals = self._seals.seals_of(place, generation, skip, len(slots))
        if wanted is not None and not np.array_equal(seals, wanted):
            raise BadExtentError(f"place {place} was filled with other bytes than those asked for")
        targets = self._pool.addresses(slots)
        if bounce is None:
            self._slab.read(place, self._slab.views(slots), skip)
            addresses = targets
        else:
            self._slab.read(place, bounce.views(skip + len(slots)))
            addresses = bounce.addresses(skip + len(slots))[skip:]
        self._check(addresses, seals, f"place {place} does not hold what was put there")
        if bounce is not None:
            bounce.empty(targets, skip)
        return seals

    def _check(self, addresses: Ids, seals: Checksums, error: str) -> None:
        if not self._options.verify:
            return
        found = checksums_of(addresses[:, None], [self._pool.slot_bytes])
        if not np.array_equal(found, seals):
            raise BrokenExtentError(
                f"{error}: the checksum of slot {np.argmax(found != seals)} of it differs"
            )

    def _bounce(self, verb: Verb, number: int) -> Bounce | None:
        """That thread's own."""
        if self._slab is None or not self._slab.needs_bounce:
            return None
        found = self._bounces.get((verb, number))
        if found is None:
            found = self._bounces[verb, number] = Bounce(self._shape)
        return found

    def _turn_off(self, error: Exception) -> None:
        cause = error if isinstance(error, OSError) else error.__cause__
        if self._off is None and isinstance(cause, OSError) and cause.errno not in _PASSING:
            self._off = f"{self._directory.path} is off: {error}"
            logger.warning("%s; the engine goes on without it", self._off)

    def _keep(self) -> None:
        """Bring what was written to the device from time to time; at the end close the files."""
        while not self.runner.is_over.wait(self._options.sync_seconds):
            self._sync()
        self._sync()
        self._close_files()
        self._is_closed.set()

    def _sync(self) -> None:
        if not self._needs_sync or self._off is not None:
            return
        assert self._slab is not None and self._seals is not None
        self._needs_sync = False
        try:
            self._slab.sync()
            self._seals.sync()
        except (OSError, OffloadError) as error:  # what was not brought there, the next one would not tell of
            self._turn_off(error)

    # Opening and closing

    def _open(self, namespace: str) -> int:
        """Open all files; returns the epoch."""
        sizes = {"slot_bytes": self._shape.slot_bytes, "extent_slots": self._shape.extent_slots}
        found = read_superblock(self._directory)
        self.seconds = 0.0 if found is None else age_of(self._directory)
        """Since it was opened before."""
        if found is None:
            self._directory.remove(SEALS)  # nobody knows whose they are
        else:
            check_same(self._directory, found, namespace, sizes)
        self._slab = SlabFile(self._directory, self._shape, self._pool, direct=self._options.direct)
        self._seals = SealLog(
            self._directory, self._shape, namespace, spare_records=self._options.spare_records
        )
        last = max(0 if found is None else found.epoch, self._seals.newest >> EPOCH_SHIFT)
        write_superblock(self._directory, Superblock(namespace, sizes, last + 1))
        return last + 1

    def _close_files(self) -> None:
        for each in (self._slab, self._seals, self._directory):
            if each is not None:
                each.close()
