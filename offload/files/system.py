"""What Linux does with files and Python does not offer."""

import ctypes
import errno
import os

_FALLOC_FL_KEEP_SIZE = 1

_libc = ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, nbytes: int, *, keep_size: bool = False) -> bool:
    """Take room for the first ``nbytes`` of a file. Bytes that are there stay.

    Unlike ``os.posix_fallocate`` it never writes the file full where the file system cannot reserve.

    Args:
        fd: of the file, open for writing.
        nbytes: from its beginning.
        keep_size: leave its size as it is; otherwise it is at least ``nbytes`` afterwards.

    Returns:
        Whether the room is reserved. False: this file system cannot, and nothing has changed.

    Raises:
        OSError: as for ENOSPC, EFBIG, EIO. Some of the room may have been taken.
    """
    while True:
        mode = _FALLOC_FL_KEEP_SIZE if keep_size else 0
        if _libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(nbytes)) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, f"fallocate: {os.strerror(code)}")


def write_all(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of it at that offset, in as many calls as it takes. Raises OSError."""
    view = memoryview(content).cast("B")
    while view:
        written = os.pwrite(fd, view[: 1 << 30], offset)
        if not written:
            raise OSError(errno.EIO, "a write wrote nothing")
        view, offset = view[written:], offset + written
