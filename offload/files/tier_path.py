"""A path that several engines keep tiers in, with a bound on all of them together."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

from offload.errors import TierError, TierFormatError
from offload.files.private import LOCK, PrivateDirectory, explained
from offload.files.superblock import SUPERBLOCK

T = TypeVar("T")
_WAIT_SECONDS = 120.0
"""Others open theirs one after the other; each takes seconds at most."""


class Found(NamedTuple):
    """A tier's directory.

    Attributes:
        path: the directory.
        num_bytes: that its files take.
        used_at: when it was opened last, in seconds since 1970.
        is_owned: by a process that runs.
    """

    path: Path
    num_bytes: int
    used_at: float
    is_owned: bool


def open_one(root: Path, name: str, num_bytes: int, most_bytes: int, make: Callable[[Path], T]) -> T:
    """Make something in a directory of that name which nobody owns, the first of ``NAME.1``, ``NAME.2``, ...

    Directories that nobody owns are deleted, the one unused for longest first, until all together take no
    more than ``most_bytes``.

    Args:
        root: where they all are; made if it is not there.
        name: what must be equal for what lies there to be usable, in short.
        num_bytes: that this one takes.
        most_bytes: that all of them may take.
        make: opens the directory and becomes its owner. One that is damaged, or of a format that is not read,
            is deleted and made anew.

    Raises:
        TierError: others that run leave no room, or the directory cannot be had.
    """
    if num_bytes > most_bytes:
        raise TierError(f"{root}: a tier of {num_bytes:,} bytes, and all may take {most_bytes:,}; raise gib")
    with _locked(root):
        for number in count(1):
            path = root / f"{name}.{number}"
            if path.exists() and _look_at(path).is_owned:
                continue
            _make_room(root, path, num_bytes, most_bytes)
            try:
                return make(path)
            except TierFormatError:
                shutil.rmtree(path)
                return make(path)
    raise AssertionError("unreachable")


def look_around(root: Path) -> list[Found]:
    """All tiers' directories in it, the one unused for longest first; none if it is not there."""
    if not root.is_dir():
        return []
    found = [_look_at(path) for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda each: each.used_at)


def _make_room(root: Path, own: Path, num_bytes: int, most_bytes: int) -> None:
    others = [each for each in look_around(root) if each.path != own]
    total = num_bytes + sum(each.num_bytes for each in others)
    for each in others:
        if total > most_bytes and not each.is_owned:
            with explained(each.path, "delete this directory"):
                shutil.rmtree(each.path)
            total -= each.num_bytes
    if total > most_bytes:
        live = ", ".join(f"{each.path} ({each.num_bytes:,} bytes)" for each in others if each.is_owned)
        raise TierError(
            f"{root}: all tiers there may take {most_bytes:,} bytes, this one takes {num_bytes:,}, and those "
            f"of engines that run are {live}; raise gib, lower it for each, or name another path"
        )


def _look_at(path: Path) -> Found:
    num_bytes, used_at = 0, 0.0
    with suppress(FileNotFoundError):
        for entry in os.scandir(path):
            found = entry.stat(follow_symlinks=False)
            num_bytes += max(found.st_size, 512 * found.st_blocks)
            if entry.name == SUPERBLOCK:
                used_at = found.st_mtime
    return Found(path, num_bytes, used_at, _is_owned(path))


def _is_owned(path: Path) -> bool:
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Nobody else opens or deletes a directory in it meanwhile."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            directory = PrivateDirectory.open(root)
            break
        except TierError as error:
            if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() >= until:
                raise
            time.sleep(0.05)
    try:
        yield
    finally:
        directory.close()
