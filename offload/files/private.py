"""A directory of one owner: 0700, its files 0600, no symbolic links, one process at a time."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload.errors import TierError
from offload.files.system import write_all

LOCK = "lock"
"""The file whose lock is the ownership. It is never deleted: others may be waiting at it."""
NEW = ".new"
"""How names end of files that are yet to take the place of others."""

_REMEDIES = {
    errno.ENOSPC: "free space there, or give the tier fewer gib",
    errno.EDQUOT: "raise this user's quota there, or give the tier fewer gib",
    errno.EFBIG: "files may not be that large there: give the tier fewer gib, or another path",
    errno.EROFS: "mount it for writing, or choose another path",
    errno.EACCES: "give it to the user of this process, or choose another path",
    errno.EPERM: "give it to the user of this process, or choose another path",
    errno.EIO: "the device fails, the kernel's log says how; choose another path",
    errno.ELOOP: "it is a symbolic link, and these are not followed; name what it leads to",
    errno.ENOTDIR: "a part of the path is no directory; choose another path",
    errno.EMFILE: "this process may open no more files: raise ulimit -n",
}


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a TierError that names path and remedy, with the OSError as its cause."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose another path")
        raise TierError(f"{path}: cannot {doing}: {error.strerror or error}; {remedy}") from error


class PrivateDirectory:
    """A directory that this process owns from ``open`` to ``close``, or to its end, however it ends.

    Ownership is a ``flock``. The kernel drops it with the last descriptor; programs that are started do not
    inherit that one. A process forked while a directory is open keeps it from others until it has ended.
    """

    def __init__(self, path: Path, fd: int, lock_fd: int) -> None:
        """As ``open`` makes it."""
        self.path = path
        self._fd = fd
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path) -> "PrivateDirectory":
        """Make it if it is not there, and become its owner.

        Raises:
            TierError: it cannot be had, belongs to another user, or another process owns it.
        """
        with explained(path, "make this directory"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        with explained(path, "open this directory"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _make_private(path, fd, 0o700)
            lock_fd = _open_private(path, fd, LOCK, os.O_RDWR | os.O_CREAT)
        except BaseException:
            os.close(fd)
            raise
        directory = cls(path, fd, lock_fd)
        try:
            with explained(path / LOCK, "lock this file"):
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except TierError as error:
            directory.close()
            if isinstance(error.__cause__, BlockingIOError):
                raise TierError(
                    f"{path}: another process owns this directory; end that one, or choose another path"
                ) from error.__cause__
            raise
        return directory

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a regular file in it, 0600. Raises TierError."""
        return _open_private(self.path, self._fd, name, flags)

    def read(self, name: str) -> bytes | None:
        """All of a file; None if it is not there. Raises TierError."""
        try:
            fd = self.open_file(name, os.O_RDONLY)
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with explained(self.path / name, "read this file"), os.fdopen(fd, "rb") as file:
            return file.read()

    def replace(self, name: str, content: bytes) -> None:
        """Let a file hold this: after a crash it holds this or what it held before. Raises TierError."""
        self.remove(name + NEW)
        fd = self.open_file(name + NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with explained(self.path / name, "write this file"):
                write_all(fd, content, 0)
                os.fsync(fd)
        finally:
            os.close(fd)
        self.rename(name + NEW, name)
        self.sync()

    def rename(self, name: str, new_name: str) -> None:
        """A file takes the place of another. Raises TierError."""
        with explained(self.path / new_name, "rename a file to this"):
            os.rename(name, new_name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there. Raises TierError."""
        with explained(self.path / name, "delete this file"), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Bring names to the device. Raises TierError."""
        with explained(self.path, "sync this directory"):
            os.fsync(self._fd)

    def close(self) -> None:
        """Give it up. Calling it again does nothing."""
        fds, self._fd, self._lock_fd = (self._lock_fd, self._fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _open_private(path: Path, directory_fd: int, name: str, flags: int) -> int:
    with explained(path / name, "open this file"):
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TierError(f"{path / name}: it is no regular file; delete it, or choose another path")
        _make_private(path / name, fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_private(path: Path, fd: int, mode: int) -> None:
    with explained(path, "look at its owner"):
        found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise TierError(
            f"{path}: it belongs to user {found.st_uid}, and this process is of user {os.geteuid()}; "
            f"choose another path"
        )
    if stat.S_IMODE(found.st_mode) != mode:
        with explained(path, "make it private"):
            os.fchmod(fd, mode)
