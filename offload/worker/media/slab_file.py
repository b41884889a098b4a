"""The slab: one preallocated file of places, each as large as an extent."""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload.errors import TierError
from offload.files.private import PrivateDirectory, explained
from offload.files.system import reserve
from offload.messages import Ids
from offload.worker.media.base import PoolSlots

logger = logging.getLogger(__name__)

SLAB = "slab"
ALIGNMENT = 4096
"""Of addresses, offsets and sizes with O_DIRECT; less is enough for some devices, and not for others."""

_Call = Callable[[int, Sequence[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``."""

_MAX_PIECES = 1024  # IOV_MAX of Linux
_MAX_CALL_BYTES = 1 << 30  # one call moves less than 2 GiB


class SlabShape(NamedTuple):
    """Sizes of a slab.

    Attributes:
        slot_bytes: of one slot of the pool.
        extent_slots: slots of the largest extent.
        num_places: places.
    """

    slot_bytes: int
    extent_slots: int
    num_places: int

    @property
    def place_bytes(self) -> int:
        """Of one place: its slots one after the other, rounded up so that every place begins aligned."""
        return _rounded(self.slot_bytes * self.extent_slots)

    @property
    def is_aligned(self) -> bool:
        """Whether every slot is a whole number of aligned units; if not, O_DIRECT needs a bounce buffer."""
        return self.slot_bytes % ALIGNMENT == 0


class Bounce:
    """Aligned memory of one thread, as large as a place.

    For slots that O_DIRECT cannot move from or to the pool, since they do not begin and end where it wants
    it. Their bytes are copied once more, about 0.1 s of CPU per GB.
    """

    def __init__(self, shape: SlabShape) -> None:
        self._slot_bytes = shape.slot_bytes
        self._map = mmap.mmap(-1, shape.place_bytes)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def addresses(self, num_slots: int) -> Ids:
        """Of so many slots in it, one after the other."""
        return self._address + np.arange(num_slots) * self._slot_bytes

    def views(self, num_slots: int) -> list[memoryview]:
        """All that is written or read for so many slots."""
        return [memoryview(self._map)[: _rounded(num_slots * self._slot_bytes)]]

    def fill(self, sources: Ids) -> None:
        """Take slots in, from these addresses."""
        used = len(sources) * self._slot_bytes
        ctypes.memset(self._address + used, 0, _rounded(used) - used)  # not what was here before
        self._copy(sources, self.addresses(len(sources)))

    def empty(self, targets: Ids, skip: int = 0) -> None:
        """Give slots out, to these addresses, those behind the first ``skip``."""
        self._copy(self.addresses(skip + len(targets))[skip:], targets)

    def _copy(self, sources: Ids, targets: Ids) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, self._slot_bytes)


class SlabFile:
    """Reads and writes places. Any number of threads, each at places of its own.

    Behind the last place is one more, which no extent lies in: O_DIRECT is tried out there.
    """

    def __init__(
        self, directory: PrivateDirectory, shape: SlabShape, pool: PoolSlots, *, direct: bool = True
    ) -> None:
        """Open it, or make it; take its room, and find out how to move bytes.

        Args:
            directory: where it is; owned.
            shape: its sizes. It grows and shrinks to them; places keep what they hold.
            pool: whose bytes it moves. Slot 0 and those behind it are written to the spare place and read
                back, so nobody else may be using them.
            direct: whether to try O_DIRECT.

        Raises:
            TierError: it cannot be had, written or read.
        """
        self.path: Path = directory.path / SLAB
        self._shape = shape
        self._memory = _memory_of(pool)
        self._fd = directory.open_file(SLAB, os.O_RDWR | os.O_CREAT)
        self.is_direct = False
        self.is_reserved = False
        try:
            self._take_room()
            if direct and self._works_direct(directory, pool):
                fd = directory.open_file(SLAB, os.O_RDWR | os.O_DIRECT)
                os.close(self._fd)
                self._fd, self.is_direct = fd, True
            else:
                self._try_out(self._fd, pool)
        except BaseException:
            self.close()
            raise

    @property
    def needs_bounce(self) -> bool:
        """Whether slots go through a ``Bounce``."""
        return self.is_direct and not self._shape.is_aligned

    def views(self, slots: Ids) -> list[memoryview]:
        """Where these slots lie in the pool; neighbours are one piece."""
        size, found = self._shape.slot_bytes, []
        first = last = -1
        for slot in slots.tolist():
            if slot != last + 1 or first < 0:
                if first >= 0:
                    found.append(self._memory[first * size : (last + 1) * size])
                first = slot
            last = slot
        found.append(self._memory[first * size : (last + 1) * size])
        return found

    def write(self, place: int, views: Sequence[memoryview]) -> None:
        """Fill a place from its beginning. Raises OSError."""
        self._move(self._fd, os.pwritev, place, views)

    def read(self, place: int, views: Sequence[memoryview], skip: int = 0) -> None:
        """Read a place, behind its first ``skip`` slots. Raises OSError."""
        self._move(self._fd, os.preadv, place, views, skip * self._shape.slot_bytes)

    def sync(self) -> None:
        """Bring all that was written to the device. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """No thread may be at it. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _move(
        self, fd: int, call: _Call, place: int, views: Sequence[memoryview], skip_bytes: int = 0
    ) -> None:
        start = offset = place * self._shape.place_bytes + skip_bytes
        pieces: Sequence[memoryview] = _cut(views)
        while pieces:
            some = _one_call(pieces)
            moved = call(fd, some, offset)
            if moved <= 0:
                raise OSError(errno.EIO, f"{self.path}: it ends within place {place}, or takes no bytes")
            offset += moved
            pieces = _behind(pieces, moved)
        if not self.is_direct:  # the memory belongs to the pool, not to copies of what is on the disk
            with suppress(OSError):
                os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)

    def _take_room(self) -> None:
        size = self._shape.place_bytes * (self._shape.num_places + 1)
        with explained(self.path, f"have {size:,} bytes for this file"):
            before = os.fstat(self._fd).st_size
            if before > size:
                os.ftruncate(self._fd, size)
            try:
                self.is_reserved = reserve(self._fd, size)
            except OSError:
                os.ftruncate(self._fd, before)  # what was taken until the disk was full
                raise
            if self.is_reserved:
                return
            self._check_free(size)
            os.ftruncate(self._fd, size)
        logger.warning(
            "%s: this file system reserves no room; if others fill it up, the tier goes off", self.path
        )

    def _check_free(self, size: int) -> None:
        found, status = os.fstatvfs(self._fd), os.fstat(self._fd)
        if size - 512 * status.st_blocks > found.f_bavail * found.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _works_direct(self, directory: PrivateDirectory, pool: PoolSlots) -> bool:
        """Some file systems accept O_DIRECT and refuse what is read or written then."""
        try:
            fd = directory.open_file(SLAB, os.O_RDWR | os.O_DIRECT)
        except TierError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL:
                return False
            raise
        try:
            self.is_direct = True
            self._try_out(fd, pool)
            return True
        except TierError as error:
            logger.info("without O_DIRECT: %s", error)
            return False
        finally:
            self.is_direct = False
            os.close(fd)

    def _try_out(self, fd: int, pool: PoolSlots) -> None:
        """Write what the pool's first slots hold and read it back, elsewhere and there."""
        num_slots = min(self._shape.extent_slots, pool.num_slots)
        place, slots = self._shape.num_places, np.arange(num_slots)
        bounce, spare = Bounce(self._shape), Bounce(self._shape).views(num_slots)
        bounce.fill(pool.addresses(slots))
        pieces = bounce.views(num_slots) if self.needs_bounce else self.views(slots)
        with explained(self.path, "write and read this file"):
            self._move(fd, os.pwritev, place, pieces)
            self._move(fd, os.preadv, place, spare)
            if spare[0] != bounce.views(num_slots)[0]:
                raise OSError(errno.EIO, "what was read is not what was written")
            self._move(fd, os.preadv, place, pieces)


def _memory_of(pool: PoolSlots) -> memoryview:
    """The pool's bytes. They must stay mapped for as long as a view of them is in use."""
    memory = (ctypes.c_char * (pool.num_slots * pool.slot_bytes)).from_address(pool.address)
    return memoryview(memory).cast("B")


def _cut(views: Sequence[memoryview]) -> list[memoryview]:
    """Pieces of which each fits into a call."""
    return [
        view[start : start + _MAX_CALL_BYTES]
        for view in views
        for start in range(0, len(view), _MAX_CALL_BYTES)
    ]


def _one_call(pieces: Sequence[memoryview]) -> Sequence[memoryview]:
    """As many leading pieces as one call takes."""
    total = 0
    for count, piece in enumerate(pieces[:_MAX_PIECES]):
        total += len(piece)
        if total > _MAX_CALL_BYTES:
            return pieces[:count]
    return pieces[:_MAX_PIECES]


def _behind(pieces: Sequence[memoryview], moved: int) -> Sequence[memoryview]:
    """What is left of pieces when so many bytes have moved."""
    for index, piece in enumerate(pieces):
        if moved < len(piece):
            return [piece[moved:], *pieces[index + 1 :]]
        moved -= len(piece)
    return []


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
