"""Whether a tier's path can be had, has room, and keeps what is written: asked before an engine starts."""

import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offload.errors import TierError
from offload.files.private import explained
from offload.files.system import write_all
from offload.files.tier_path import held, look_around
from offload.settings import GIB

_TRIED_BYTES = 1 << 20
_WAIT_SECONDS = 60.0
"""A disk that takes longer for a MiB hangs."""


class Probe(NamedTuple):
    """What a directory for tiers has to offer.

    Attributes:
        free_bytes: of its file system, for users without privileges.
        kept_bytes: that tiers take there now, and have again or give back.
        is_direct: whether O_DIRECT works there.
    """

    free_bytes: int
    kept_bytes: int
    is_direct: bool


def probe(root: Path, num_bytes: int, *, wait_seconds: float = _WAIT_SECONDS) -> Probe:
    """Look whether tiers of so many bytes can be in ``root``. Writes a MiB there, and deletes it.

    Args:
        root: the directory that all engines' are in. It need not be there, and is not made.
        num_bytes: that all of them may take.
        wait_seconds: how long a disk may take to answer.

    Raises:
        TierError: it cannot be made, belongs to another user, lacks room, hangs, or does not give back what
            is written.
    """
    found: list[Probe | BaseException] = []

    def look() -> None:
        try:
            found.append(_probe(root, num_bytes))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=look, name="kv-offload-probe", daemon=True)
    thread.start()
    thread.join(wait_seconds)
    if not found:
        raise TierError(
            f"{root.parent}: it has not answered for {wait_seconds:g} s; see to its disk or mount, "
            f"or choose another path"
        )
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _probe(root: Path, num_bytes: int) -> Probe:
    with held(root):
        kept_bytes = sum(each.disk_bytes for each in look_around(root))
    with a_place(root) as place:
        with explained(root.parent, "ask how much room it has"):
            file_system = os.statvfs(place)
        free_bytes = file_system.f_bavail * file_system.f_frsize
        if num_bytes > free_bytes + kept_bytes:
            raise TierError(
                f"{root.parent}: tiers there may take {num_bytes / GIB:.2f} GiB, and there are "
                f"{free_bytes / GIB:.2f} free and {kept_bytes / GIB:.2f} that earlier ones have; lower gib, "
                f"free space there, or choose another path"
            )
        return Probe(free_bytes, kept_bytes, _works(root, place))


@contextmanager
def a_place(root: Path) -> Iterator[Path]:
    """A directory on the disk in question that this user may write to: ``root``, or one where it would be."""
    if os.path.lexists(root):
        with explained(root, "open this directory"):
            fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        owner = os.fstat(fd).st_uid
        os.close(fd)
        if owner != os.geteuid():
            raise TierError(
                f"{root}: it belongs to user {owner}, and this process is of user {os.geteuid()}; "
                f"run this as the engine's user, or choose another path"
            )
        yield root
        return
    with explained(root, "look for this directory"):
        parent = next(each for each in root.parents if os.path.lexists(each))
    with explained(parent, "make a directory in this one"):
        made = Path(tempfile.mkdtemp(prefix=".kv-offload-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _works(root: Path, place: Path) -> bool:
    """Write and read a file; returns whether that goes with O_DIRECT. Raises TierError."""
    path = place / f"probe-{os.getpid()}-{threading.get_native_id()}"
    with explained(root.parent, "write a file there and read it back"):
        fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)]
        try:
            try:
                fds.append(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
            except OSError:
                pass  # without it, then
            finally:
                os.unlink(path)  # nothing stays, however this ends
            try:
                _try_out(fds[-1])
                return len(fds) > 1
            except OSError:
                if len(fds) == 1:
                    raise
            _try_out(fds[0])  # some file systems open a file so, and refuse to read or write it
            return False
        finally:
            for fd in fds:
                os.close(fd)


def _try_out(fd: int) -> None:
    written, found = mmap.mmap(-1, _TRIED_BYTES), mmap.mmap(-1, _TRIED_BYTES)  # aligned, as O_DIRECT wants it
    written[:] = os.urandom(_TRIED_BYTES)
    write_all(fd, memoryview(written), 0)
    os.fdatasync(fd)
    num_read = os.preadv(fd, [found], 0)
    if num_read != _TRIED_BYTES or found[:] != written[:]:
        raise OSError(errno.EIO, "what was read is not what was written")
