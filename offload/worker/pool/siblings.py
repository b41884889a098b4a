"""Regions of siblings: looked into as they are, while their owners go on. Nothing is written or locked."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from offload.errors import TierError
from offload.files.reading import opened
from offload.files.superblock import read_superblock
from offload.messages import Ids
from offload.worker.pool.region import POOL_FILE, TABLE_FORMAT, RegionShape
from offload.worker.pool.region_index import RegionIndex
from offload.worker.pool.table import SlotTable

_REST = 10
"""After a look nobody looks again for so many times as long as it took."""


class Home(NamedTuple):
    """What there is to know of a rank's own region, to tell those of siblings.

    Attributes:
        path: its directory.
        identity: whose it is; theirs is the same.
        slot_bytes: of a slot.
    """

    path: Path
    identity: str
    slot_bytes: int


class Sibling(NamedTuple):
    """A region as it was when it was looked into.

    Attributes:
        path: its directory.
        inode: of its file, with the device. What has another one is another region.
        shape: where things lie in it.
        stamp: of generations and checksums of all rows: equal as long as nothing happens.
        contents: what it has.
    """

    path: Path
    inode: tuple[int, int]
    shape: RegionShape
    stamp: int
    contents: RegionIndex


class Siblings:
    """The regions beside one's own, of the same namespace and rank.

    They are read as files. One that is cut short or deleted gives fewer bytes, and no signal; one that is
    looked at is never held, so its memory is free when its owner gives it up.
    """

    def __init__(
        self,
        home: Home,
        columns: int,
        *,
        reads_home: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look at nothing yet.

        Args:
            home: this rank's own region.
            columns: slots of a position.
            reads_home: whether this is one of them: what earlier lives left there and nobody adopted.
            clock: in seconds.
        """
        self._home = home
        self._columns = columns
        self._reads_home = reads_home
        self._clock = clock
        self._rests_until = -np.inf
        self.found: tuple[Sibling, ...] = ()
        """As they were at the last look."""

    def look(self) -> tuple[Sibling, ...]:
        """Look at them, unless that was just done. One thread at a time. O(slots) of those that changed."""
        began = self._clock()
        if began >= self._rests_until:
            known = {each.path: each for each in self.found}
            looked = [self._look_at(path, known.get(path)) for path in self._paths()]
            self.found = tuple(each for each in looked if each is not None)
            ended = self._clock()
            self._rests_until = ended + _REST * (ended - began)
        return self.found

    def check_invariants(self) -> None:
        """Each is known once, and none of them is one's own without a reason."""
        paths = [each.path for each in self.found]
        assert len(set(paths)) == len(paths), f"regions are known twice: {paths}"
        assert self._reads_home or self._home.path not in paths, f"{self._home.path} is one's own"

    # Private

    def _paths(self) -> list[Path]:
        try:
            paths = [path for path in self._home.path.parent.iterdir() if path.is_dir()]
        except OSError:
            return []
        return sorted(path for path in paths if self._reads_home or path != self._home.path)

    def _look_at(self, path: Path, before: Sibling | None) -> Sibling | None:
        """One of them; None: it is none, or not to be read."""
        try:
            with opened(path) as directory:
                superblock = read_superblock(directory)
                if superblock is None or superblock.namespace != self._home.identity:
                    return None
                sizes = superblock.sizes
                if (sizes["table"], sizes["slot_bytes"]) != (TABLE_FORMAT, self._home.slot_bytes):
                    return None
                shape = RegionShape(int(sizes["num_slots"]), self._home.slot_bytes)
                fd = directory.open_file(POOL_FILE)
            try:
                return self._read(path, fd, shape, before)
            finally:
                os.close(fd)
        except (OSError, TierError, KeyError, TypeError, ValueError):
            return None

    def _read(self, path: Path, fd: int, shape: RegionShape, before: Sibling | None) -> Sibling:
        start, stop = SlotTable.stamped(shape.num_slots)
        inode = _inode(fd)
        if before is not None and before.inode == inode:
            changing = _bytes_of(fd, stop - start, shape.slots_bytes + start)
            if xxhash.xxh3_64_intdigest(changing) == before.stamp:
                return before
        content = _bytes_of(fd, shape.table_bytes, shape.slots_bytes)
        table = SlotTable(content, shape.num_slots, self._home.identity)
        kept = table.kept()
        contents = RegionIndex(kept, table.seals.sums[kept.slots], self._columns)
        stamp = xxhash.xxh3_64_intdigest(memoryview(content)[start:stop])
        return Sibling(path, inode, shape, stamp, contents)


class OpenSibling(NamedTuple):
    """A sibling's file, open for reading.

    Attributes:
        fd: its descriptor.
        shape: where things lie in it.
    """

    fd: int
    shape: RegionShape

    def read(self, slot: int, into: memoryview) -> bool:
        """Copy slots from that one on, as many as fit. Returns whether they were there. Raises OSError."""
        return os.preadv(self.fd, [into], slot * self.shape.slot_bytes) == len(into)

    def are_current(self, slot: int, generations: Ids) -> bool:
        """Whether slots from that one on have these generations. Raises OSError."""
        fills, _ = SlotTable.stamped(self.shape.num_slots)
        start = self.shape.slots_bytes + fills + 8 * slot
        return os.pread(self.fd, 8 * len(generations), start) == generations.tobytes()


@contextmanager
def reading(sibling: Sibling) -> Iterator[OpenSibling | None]:
    """Open its file; None: it is gone, or another one lies there. Raises OSError."""
    try:
        fd = os.open(sibling.path / POOL_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    try:
        yield OpenSibling(fd, sibling.shape) if _inode(fd) == sibling.inode else None
    finally:
        os.close(fd)


def _inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _bytes_of(fd: int, num_bytes: int, start: int) -> bytearray:
    """Raises ValueError: there are not so many."""
    content = bytearray(num_bytes)
    if os.preadv(fd, [content], start) != num_bytes:
        raise ValueError(f"its file has less than {start + num_bytes} bytes")
    return content
