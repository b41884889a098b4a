"""A path that several engines keep tiers in, with a bound on all of them together."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

from offload.errors import TierError, TierFormatError
from offload.files.private import LOCK, PrivateDirectory, explained
from offload.files.superblock import SUPERBLOCK

T = TypeVar("T")
MAPPED = "pool"
"""A file that several processes map, and lock for as long."""
_WAIT_SECONDS = 120.0
"""Others open theirs one after the other; each takes seconds at most."""


class Found(NamedTuple):
    """A tier's directory.

    Attributes:
        path: the directory.
        num_bytes: that its files take, or may grow to.
        disk_bytes: that deleting them gives back.
        used_at: when it was opened last, in seconds since 1970.
        is_owned: by a process that runs.
    """

    path: Path
    num_bytes: int
    disk_bytes: int
    used_at: float
    is_owned: bool


def open_one(root: Path, name: str, num_bytes: int, most_bytes: int | None, make: Callable[[Path], T]) -> T:
    """Make something in a directory of that name which nobody owns, the first of ``NAME.1``, ``NAME.2``, ...

    Directories that nobody owns are deleted, the one unused for longest first, until all together take no
    more than ``most_bytes``.

    Args:
        root: where they all are; made if it is not there.
        name: what must be equal for what lies there to be usable, in short.
        num_bytes: that this one takes.
        most_bytes: that all of them may take. None: no bound, but a new one takes the place of all that
            nobody owns.
        make: opens the directory and becomes its owner. One that is damaged, or of a format that is not read,
            is deleted and made anew.

    Raises:
        TierError: others that run leave no room, or the directory cannot be had.
    """
    if most_bytes is not None and num_bytes > most_bytes:
        raise TierError(f"{root}: a tier of {num_bytes:,} bytes, and all may take {most_bytes:,}; raise gib")
    with _locked(root):
        for number in count(1):
            path = root / f"{name}.{number}"
            if path.exists() and _look_at(path).is_owned:
                continue
            if most_bytes is not None:
                _make_room(root, path, num_bytes, most_bytes)
            elif not path.exists():
                for each in look_around(root):
                    if not each.is_owned:
                        _delete(each)
            try:
                return make(path)
            except TierFormatError:
                shutil.rmtree(path)
                return make(path)
    raise AssertionError("unreachable")


def kept_root(path: Path, root: Path) -> Path:
    """The directory that all engines' are in, below the path that the configuration has.

    Raises:
        TierError: there is none.
    """
    try:
        is_there = root.is_dir()
    except OSError as error:
        raise TierError(f"{root}: {error.strerror}; run this as the user that the engine has") from None
    if not is_there:
        raise TierError(f"{path}: no engine has kept anything there; give the path in the configuration")
    return root


def look_around(root: Path) -> list[Found]:
    """All tiers' directories in it, the one unused for longest first; none if it is not there."""
    with explained(root, "look at this directory"):
        paths = list(root.iterdir()) if root.is_dir() else []
    found = [_look_at(path) for path in paths if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda each: each.used_at)


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Keep engines from opening and deleting directories in it, which ``look_around`` could make fail.

    Makes nothing, and changes no owner or mode, so that another user may look.

    Raises:
        TierError: it may not be opened, or another process holds it for too long.
    """
    try:
        with explained(root / LOCK, "open this file"):
            fd = os.open(root / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except TierError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        yield  # no engine has been here
        return
    try:
        until = time.monotonic() + _WAIT_SECONDS
        while not _takes(fd):
            if time.monotonic() >= until:
                raise TierError(f"{root}: another process opens or deletes tiers there; try again later")
            time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def find_named(root: Path, names: Sequence[str]) -> list[Found]:
    """Directories of these names; no names: all there are. To be asked while ``root`` is held.

    Raises:
        TierError: one is not there.
    """
    there = {each.path.name: each for each in look_around(root)}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise TierError(f"{root}: there is no {', '.join(unknown)}; there are: {', '.join(there) or 'none'}")
    return [there[name] for name in dict.fromkeys(names or there)]


def delete_named(root: Path, names: Sequence[str]) -> list[Found]:
    """Delete directories that nobody owns; no names: all there are. If one is owned, nothing is deleted.

    Returns what they were.

    Raises:
        TierError: one is not there, or a process owns it; or it cannot be deleted.
    """
    with held(root):
        found = find_named(root, names)
        owned = [each.path.name for each in found if each.is_owned]
        if owned:
            raise TierError(
                f"{root}: an engine that runs owns {', '.join(owned)}; end it, or name others. "
                f"Nothing was deleted"
            )
        for each in found:
            _delete(each)
    return found


def delete_unused(root: Path, most_bytes: int) -> list[Found]:
    """Delete directories that nobody owns, the one unused for longest first, until all fit.

    Returns what they were. What engines own may take more than ``most_bytes`` all the same.

    Raises:
        TierError: one cannot be deleted.
    """
    deleted = []
    with held(root):
        found = look_around(root)
        total = sum(each.num_bytes for each in found)
        for each in found:
            if total > most_bytes and not each.is_owned:
                _delete(each)
                deleted.append(each)
                total -= each.num_bytes
    return deleted


def check_live(root: Path, num_bytes: int) -> None:
    """Refuse a tier of that size where engines that run leave it no room.

    Raises:
        TierError: they do, or it cannot be seen.
    """
    with held(root):
        live = [each for each in look_around(root) if each.is_owned]
    _check_room(root, live, num_bytes, num_bytes)


def _make_room(root: Path, own: Path, num_bytes: int, most_bytes: int) -> None:
    others = [each for each in look_around(root) if each.path != own]
    total = num_bytes + sum(each.num_bytes for each in others)
    for each in others:
        if total > most_bytes and not each.is_owned:
            _delete(each)
            total -= each.num_bytes
    _check_room(root, [each for each in others if each.is_owned], num_bytes, most_bytes)


def _check_room(root: Path, owned: Sequence[Found], num_bytes: int, most_bytes: int) -> None:
    if num_bytes + sum(each.num_bytes for each in owned) > most_bytes:
        live = ", ".join(f"{each.path} ({each.num_bytes:,} bytes)" for each in owned)
        raise TierError(
            f"{root}: all tiers there may take {most_bytes:,} bytes, this one takes {num_bytes:,}, and those "
            f"of engines that run are {live}; raise gib, lower it for each, or name another path"
        )


def _delete(found: Found) -> None:
    with explained(found.path, "delete this directory"):
        shutil.rmtree(found.path)


def _look_at(path: Path) -> Found:
    num_bytes, disk_bytes, used_at = 0, 0, 0.0
    with explained(path, "look at this directory"), suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            num_bytes += max(found.st_size, 512 * found.st_blocks)
            disk_bytes += 512 * found.st_blocks
            if entry.name == SUPERBLOCK:
                used_at = found.st_mtime
    return Found(path, num_bytes, disk_bytes, used_at, is_owned(path))


def is_owned(path: Path) -> bool:
    """Whether a process owns that directory, or still has its memory mapped. Its path is held meanwhile."""
    return _is_locked(path / LOCK) or _is_locked(path / MAPPED)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _takes(fd)
    finally:
        os.close(fd)


def _takes(lock_fd: int) -> bool:
    """Take a lock, unless another process has it."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
