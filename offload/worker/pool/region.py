"""A pool that outlives its engine: a file in memory, owned by one engine at a time."""

import errno
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offload.errors import TierError, TierFormatError
from offload.files.private import PrivateDirectory, explained
from offload.files.reading import opened
from offload.files.superblock import Superblock, check_same, read_superblock, write_superblock
from offload.files.tier_path import MAPPED, look_around, open_one
from offload.worker.pool.segment import Segment
from offload.worker.pool.table import SlotTable

POOL_FILE = MAPPED
TABLE_FORMAT = 1
"""Of rows and their order."""


class RegionShape(NamedTuple):
    """Where things lie in a region's file: slots first, then the table, each from a page on.

    Attributes:
        num_slots: slots.
        slot_bytes: of one.
    """

    num_slots: int
    slot_bytes: int

    @property
    def slots_bytes(self) -> int:
        """Of all slots, in whole pages."""
        return _in_pages(self.num_slots * self.slot_bytes)

    @property
    def table_bytes(self) -> int:
        """Of the table, in whole pages."""
        return _in_pages(SlotTable.num_bytes(self.num_slots))

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.slots_bytes + self.table_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """What a superblock says of it."""
        return {"num_slots": self.num_slots, "slot_bytes": self.slot_bytes, "table": TABLE_FORMAT}


@dataclass(slots=True)
class Region:
    """One that this process owns, until it is closed or the process ends.

    Attributes:
        segment: its memory.
        epoch: how often it was opened.
        path: its directory.
    """

    segment: Segment
    epoch: int
    path: Path
    _directory: PrivateDirectory

    def begin(self, epoch: int, namespace: str, shape: RegionShape) -> None:
        """This life has that epoch. Raises TierError."""
        self.epoch = epoch
        write_superblock(self._directory, Superblock(namespace, shape.sizes, epoch))

    def close(self) -> None:
        """Give it up. What is mapped must not be written any more. Calling it again does nothing."""
        self.segment.close()
        self._directory.close()


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Which region an engine wants.

    Attributes:
        root: the directory that all are in.
        namespace: all that must be equal for bytes to be usable, in clear, without the rank.
        rank: whose part it is.
        world_size: ranks of the engine.
        most_bytes: that all regions may take; None: no more than before, see ``SharedMemoryConfig``.
    """

    root: Path
    namespace: str
    rank: int
    world_size: int
    most_bytes: int | None = None

    def identity(self, num_sharing: int) -> str:
        """What must be equal, with the part of the pool that it is."""
        return f"{self.namespace}\nrank {self.rank} of {self.world_size}, shared by {num_sharing}"

    def open(self, shape: RegionShape, num_sharing: int) -> Region:
        """Adopt one that nobody owns, or make one.

        Raises:
            TierError: it cannot be had, or those of engines that run leave no room.
        """
        identity = self.identity(num_sharing)
        named = f"{identity}\n{sorted(shape.sizes.items())}"
        name = hashlib.sha256(named.encode()).hexdigest()[:16]
        return open_one(
            self.root, name, shape.num_bytes, self.most_bytes, lambda path: _open(path, identity, shape)
        )


class Contents(NamedTuple):
    """What a region has, seen from outside.

    Attributes:
        superblock: whose it is.
        num_slots: slots.
        num_kept: of them, those that a later engine would find something in.
    """

    superblock: Superblock
    num_slots: int
    num_kept: int


def look_into(path: Path) -> Contents | None:
    """What a region has, whoever owns it; None if no engine has finished making it.

    Raises:
        TierFormatError: it is damaged, or of a format that is not read.
        TierError: it cannot be read.
    """
    with opened(path) as directory:
        superblock = read_superblock(directory)
        if superblock is None:
            return None
        sizes = superblock.sizes
        if sizes.get("table") != TABLE_FORMAT:
            raise TierFormatError(f"{path}: its sizes are {dict(sizes)}, which this release does not read")
        shape = RegionShape(sizes["num_slots"], sizes["slot_bytes"])
        fd = directory.open_file(POOL_FILE)
        try:
            with explained(path / POOL_FILE, "map this file"):
                memory = mmap.mmap(fd, shape.table_bytes, prot=mmap.PROT_READ, offset=shape.slots_bytes)
        except ValueError as error:
            raise TierFormatError(f"{path}: its file is too short; delete it") from error
        finally:
            os.close(fd)
        table = SlotTable(memory, shape.num_slots, superblock.namespace)
        return Contents(superblock, shape.num_slots, len(table.kept().slots))


def _open(path: Path, identity: str, shape: RegionShape) -> Region:
    directory = PrivateDirectory.open(path)
    try:
        found = read_superblock(directory)
        if found is not None and dict(found.sizes) != shape.sizes:
            raise TierFormatError(f"{path}: its sizes are {dict(found.sizes)}, not {shape.sizes}; delete it")
        if found is not None:
            check_same(directory, found, identity, shape.sizes)
        else:
            directory.remove(POOL_FILE)  # nobody knows whose it is
        flags = os.O_RDWR if found is not None else os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = directory.open_file(POOL_FILE, flags)
        except TierError as error:
            if found is None or not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise TierFormatError(f"{path}: it has no file {POOL_FILE}; delete it") from error
        try:
            _make_room(path, fd, shape, is_new=found is None)
            segment = Segment.of_file(fd, path / POOL_FILE, shape.num_bytes)
        except BaseException:
            os.close(fd)
            raise
        return Region(segment, 0 if found is None else found.epoch, path, directory)
    except BaseException:
        directory.close()
        raise


def _make_room(path: Path, fd: int, shape: RegionShape, *, is_new: bool) -> None:
    """Give the file its size, where there is room for all of its pages.

    Raises:
        TierFormatError: it has another one.
        TierError: there is no room. Without asking, a page that cannot be had would end the process.
    """
    status = os.fstat(fd)
    if not is_new and status.st_size != shape.num_bytes:
        raise TierFormatError(f"{path}: its file has {status.st_size:,} bytes, not {shape.num_bytes:,}")
    with explained(path, "ask how much room there is"):
        system = os.fstatvfs(fd)
    free = system.f_bavail * system.f_frsize
    missing = shape.num_bytes - 512 * status.st_blocks
    if missing > free:
        live = [str(each.path) for each in look_around(path.parent) if each.is_owned and each.path != path]
        owners = f" beside those of engines that run ({', '.join(live)})" if live else ""
        raise TierError(
            f"{path}: a region of {shape.num_bytes:,} bytes has no room{owners}: {free:,} are free there; "
            f"lower cpu_gib, or enlarge it: mount -o remount,size=..., in a container --shm-size"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if is_new:
        with explained(path, "give a file its size"):
            os.ftruncate(fd, shape.num_bytes)


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
