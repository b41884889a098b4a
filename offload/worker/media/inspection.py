"""What a slab's directory has, and whether it is whole: looked at from outside, whoever owns it."""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload.errors import TierError
from offload.files.private import explained
from offload.files.reading import OpenDirectory, opened
from offload.files.records import Records
from offload.files.superblock import Superblock, read_superblock
from offload.worker.media.seal_log import SEALS, read_seals
from offload.worker.media.slab_file import SLAB, Bounce, SlabShape
from offload.worker.seals import checksums_of

_BATCH = 64
"""Extents that a thread reads before it takes others."""
_WRITE_SECONDS = 1.0
"""A write of an extent that was under way has ended after that time."""


class Contents(NamedTuple):
    """What a directory says about itself.

    Attributes:
        superblock: whose it is.
        shape: of its slab, by the size of that file.
        records: of the extents that it has, by place.
    """

    superblock: Superblock
    shape: SlabShape
    records: Records


class Verdict(NamedTuple):
    """What became of reading all extents.

    Attributes:
        num_extents: that the directory has.
        num_bytes: of their slots.
        num_rewritten: of them, places that were written again meanwhile.
        broken: places whose bytes are not those that were put there, or cannot be read.
    """

    num_extents: int
    num_bytes: int
    num_rewritten: int
    broken: list[int]

    @property
    def num_whole(self) -> int:
        """Extents that are as they were put."""
        return self.num_extents - self.num_rewritten - len(self.broken)


def look_into(path: Path) -> Contents | None:
    """What a directory has; None if no engine has finished making it.

    Raises:
        TierFormatError: it is damaged, or of a format that is not read.
        TierError: it cannot be read.
    """
    with opened(path) as directory:
        return _contents(directory)


def verify(path: Path, *, num_threads: int = 4) -> Verdict:
    """Read every extent and compare it with its checksums. Writes nothing, and keeps nobody out.

    A mismatch is looked at again after a second: its place may have been written meanwhile.

    Raises:
        TierError: as ``look_into``; or there is nothing that could be read.
    """
    with opened(path) as directory:
        contents = _contents(directory)
        if contents is None:
            raise TierError(f"{path}: no engine has finished making it; it holds nothing")
        with _slab_of(directory) as fd:
            broken = _broken(fd, contents.shape, contents.records, num_threads)
            num_rewritten = 0
            if len(broken):
                time.sleep(_WRITE_SECONDS)
                same = _still_there(broken, _contents(directory))
                again = _broken(fd, contents.shape, same, num_threads)
                num_rewritten, broken = len(broken) - len(same), _still_there(again, _contents(directory))
                num_rewritten += len(again) - len(broken)
    num_slots = int(contents.records["num_slots"].sum())
    return Verdict(
        len(contents.records),
        num_slots * contents.shape.slot_bytes,
        num_rewritten,
        broken["place"].tolist(),
    )


def _contents(directory: OpenDirectory) -> Contents | None:
    superblock = read_superblock(directory)
    if superblock is None:
        return None
    sizes = superblock.sizes
    shape = SlabShape(sizes["slot_bytes"], sizes["extent_slots"], 0)
    try:
        with explained(directory.path / SLAB, "look at this file"):
            size = os.stat(SLAB, dir_fd=directory.fd, follow_symlinks=False).st_size
        shape = shape._replace(num_places=max(0, size // shape.place_bytes - 1))  # one more is for trying
        return Contents(superblock, shape, read_seals(directory, shape, superblock.namespace))
    except TierError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise TierError(
            f"{directory.path}: it has no file {SLAB}, or none {SEALS}; delete it, it holds nothing"
        ) from error


def _still_there(records: Records, contents: Contents | None) -> Records:
    """Those that nothing newer has taken the place of."""
    if contents is None:
        return records[:0]
    keys = ["place", "generation"]
    now = set(contents.records[keys].tolist())
    return records[[key in now for key in records[keys].tolist()]]


def _broken(fd: int, shape: SlabShape, records: Records, num_threads: int) -> Records:
    """Those whose bytes are others."""

    def is_broken(start: int) -> list[bool]:
        bounce = Bounce(shape)
        return [not _is_whole(fd, shape, record, bounce) for record in records[start : start + _BATCH]]

    pool = ThreadPoolExecutor(num_threads)
    try:
        found = [each for some in pool.map(is_broken, range(0, len(records), _BATCH)) for each in some]
    finally:
        pool.shutdown(cancel_futures=True)  # so that an interrupt ends it soon
    broken: Records = records[np.array(found, dtype=np.bool_)]
    return broken


def _is_whole(fd: int, shape: SlabShape, record: np.void, bounce: Bounce) -> bool:
    place, num_slots = int(record["place"]), int(record["num_slots"])
    [view] = bounce.views(num_slots)
    start = offset = place * shape.place_bytes
    try:
        while view:
            num_read = os.preadv(fd, [view], offset)
            if not num_read:
                return False
            view, offset = view[num_read:], offset + num_read
        os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    found = checksums_of(bounce.addresses(num_slots)[:, None], [shape.slot_bytes])
    return np.array_equal(found, record["sums"][:num_slots])


@contextmanager
def _slab_of(directory: OpenDirectory) -> Iterator[int]:
    """A descriptor of the slab: from the disk, not from memory, where that is possible."""
    fd = directory.open_file(SLAB)
    try:
        direct = directory.open_file(SLAB, os.O_DIRECT)
    except TierError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EINVAL:
            os.close(fd)
            raise
        direct = -1
    if direct >= 0:
        try:
            os.preadv(direct, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
            fd, direct = direct, fd
        except OSError:
            pass  # some file systems open a file so, and refuse to read it
        os.close(direct)
    try:
        yield fd
    finally:
        os.close(fd)
