"""Memory that several processes of one machine map: nameless, or a file on a file system in memory."""

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LABEL = "kv-offload-"
_ITS_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Of a nameless one: it stays what it is, so whoever maps it never meets a page that is gone."""


class SegmentName(NamedTuple):
    """How other processes find a segment while its maker has it open.

    Attributes:
        machine: the machine since its last boot, and the processes there that can see each other.
        pid: its maker.
        fd: the maker's descriptor.
        label: what the kernel calls it, or its path; nothing else is called so.
        nbytes: its size.
    """

    machine: str
    pid: int
    fd: int
    label: str
    nbytes: int


class Segment:
    """An open one.

    Without a name it lives as long as a process has it open or mapped, however processes end. A file's
    outlives them.
    """

    def __init__(self, fd: int, name: SegmentName) -> None:
        """As ``create`` and ``open`` make it."""
        self._fd = fd
        self._lock_fd = -1
        self.name = name

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        """A new one of zeros, of which no page is taken yet. Raises OSError."""
        label = f"{_LABEL}{secrets.token_hex(8)}"
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        segment = cls(fd, SegmentName(machine(), os.getpid(), fd, label, nbytes))
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ITS_SIZE)
        except OSError:
            segment.close()
            raise
        return segment

    @classmethod
    def of_file(cls, fd: int, path: Path, nbytes: int) -> "Segment":
        """A file's, which has that size. ``fd`` belongs to the segment from now on. Raises OSError."""
        return cls(fd, SegmentName(machine(), os.getpid(), fd, str(path), nbytes))

    @classmethod
    def open(cls, name: SegmentName) -> "Segment":
        """Another process's. Raises OSError if this one cannot have it, or finds another file there."""
        if name.machine != machine():
            raise OSError("it is on another machine, or in a container of its own")
        path = f"/proc/{name.pid}/fd/{name.fd}"
        found = os.readlink(path)
        if name.label not in found:
            raise OSError(f"{path} is {found}, not {name.label}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, name)

    @classmethod
    def look_into(cls, name: SegmentName) -> "Segment":
        """The same, for reading alone, of a process that is not trusted with what it calls its own.

        Raises OSError also if it is a file: whoever shortens one would end all that have it mapped.
        """
        if name.machine != machine():
            raise OSError("it is on another machine, or in a container of its own")
        path = f"/proc/{name.pid}/fd/{name.fd}"
        found = os.readlink(path)
        if not name.label.startswith(_LABEL) or not found.startswith(f"/memfd:{name.label} "):
            raise OSError(f"{path} is {found}, not {name.label}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _ITS_SIZE != _ITS_SIZE:
                raise OSError(f"{path} may be shortened")
            if os.fstat(fd).st_size != name.nbytes:
                raise OSError(f"{path} has {os.fstat(fd).st_size:,} bytes, not {name.nbytes:,}")
        except OSError:
            os.close(fd)
            raise
        return cls(fd, name)

    @property
    def here(self) -> SegmentName:
        """How others find it as long as it is open in this process."""
        return self.name._replace(pid=os.getpid(), fd=self._fd)

    @property
    def is_taken(self) -> bool:
        """Whether all of its pages are in memory already. Raises OSError."""
        return 512 * os.fstat(self._fd).st_blocks >= self.name.nbytes

    def lock(self) -> None:
        """Nobody else may have it for itself as long as this is open. Raises OSError.

        By a description of its own: that of a mapping is open until it is unmapped.
        """
        self._lock_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)

    def map(self, start: int, nbytes: int, *, is_read_only: bool = False) -> mmap.mmap:
        """Map bytes from ``start`` on, where a page begins; not for forked children. Raises OSError."""
        access = mmap.PROT_READ if is_read_only else mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED, prot=access, offset=start)
        with suppress(OSError):  # a child that outlives this process would keep it
            mapping.madvise(mmap.MADV_DONTFORK)
        return mapping

    def close(self) -> None:
        """What is mapped stays mapped; nobody can open it here any more. Calling it again does nothing."""
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def machine(root: Path = Path("/")) -> str:
    """Equal for processes that see each other in ``/proc``. Raises OSError."""
    boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(root / 'proc/self/ns/pid')}"
