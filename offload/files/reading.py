"""A directory that is read and left as it is, also while another process owns it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offload.errors import TierError
from offload.files.private import explained


class OpenDirectory(NamedTuple):
    """A directory, for as long as it is open, whatever takes its name meanwhile. Nothing in it changes.

    Attributes:
        path: the directory.
        fd: its descriptor.
    """

    path: Path
    fd: int

    def open_file(self, name: str, flags: int = 0) -> int:
        """A descriptor of a regular file in it, for reading. Raises TierError."""
        path = self.path / name
        with explained(path, "open this file"):
            flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(name, flags, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise TierError(f"{path}: it is no regular file; delete it")
        return fd

    def read(self, name: str) -> bytes | None:
        """All of a file; None if it is not there. Raises TierError."""
        try:
            fd = self.open_file(name)
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with explained(self.path / name, "read this file"), os.fdopen(fd, "rb") as file:
            return file.read()


@contextmanager
def opened(path: Path) -> Iterator[OpenDirectory]:
    """Open a directory for reading, and close it at the end. Raises TierError."""
    with explained(path, "open this directory"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield OpenDirectory(path, fd)
    finally:
        os.close(fd)
