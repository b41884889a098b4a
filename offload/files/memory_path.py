"""Whether a path is in memory and has room for regions of pools: asked before an engine starts."""

import os
from pathlib import Path
from typing import NamedTuple

from offload.errors import TierError
from offload.files.private import explained
from offload.files.probe import a_place
from offload.files.tier_path import Found, held, look_around
from offload.settings import GIB

_IN_MEMORY = ("tmpfs", "ramfs")


class MemoryRoom(NamedTuple):
    """What a directory for regions has to offer.

    Attributes:
        free_bytes: of its file system.
        kept_bytes: of regions that nobody owns: they are adopted, or deleted for others.
        live_bytes: of regions of engines that run.
    """

    free_bytes: int
    kept_bytes: int
    live_bytes: int


def look_for_room(root: Path, num_bytes: int, most_bytes: int | None) -> MemoryRoom:
    """Look whether regions of so many bytes can be in ``root``. Writes nothing that stays.

    Args:
        root: the directory that all regions are in. It need not be there, and is not made.
        num_bytes: of the regions to come, all ranks and replicas together.
        most_bytes: that all regions may take; None: no bound but the file system's.

    Raises:
        TierError: it is not in memory, cannot be made, belongs to another user, or lacks room.
    """
    with held(root):
        found = look_around(root)
    with a_place(root) as place:
        kind = _kind_of(place)
        if kind not in _IN_MEMORY:
            raise TierError(
                f"{root.parent}: it is on {kind}, and a pool must be in memory; name a directory on a tmpfs, "
                f"such as /dev/shm/kv"
            )
        with explained(root.parent, "ask how much room it has"):
            system = os.statvfs(place)
    room = MemoryRoom(
        system.f_bavail * system.f_frsize,
        sum(each.disk_bytes for each in found if not each.is_owned),
        sum(each.num_bytes for each in found if each.is_owned),
    )
    if num_bytes > room.free_bytes + room.kept_bytes:
        raise TierError(
            f"{root.parent}: the pool takes {num_bytes / GIB:.2f} GiB, and there are "
            f"{room.free_bytes / GIB:.2f} free and {room.kept_bytes / GIB:.2f} that earlier engines left"
            f"{_owners(found)}; lower cpu_gib, or enlarge it: mount -o remount,size=..., in a container "
            f"--shm-size, in Kubernetes an emptyDir with medium: Memory"
        )
    if most_bytes is not None and num_bytes + room.live_bytes > most_bytes:
        raise TierError(
            f"{root.parent}: the pool takes {num_bytes / GIB:.2f} GiB, and all may take "
            f"{most_bytes / GIB:.2f}{_owners(found)}; raise gib of pool, or lower cpu_gib"
        )
    return room


def _owners(found: list[Found]) -> str:
    live = [f"{each.path} ({each.num_bytes / GIB:.2f} GiB)" for each in found if each.is_owned]
    return f", beside those of engines that run: {', '.join(live)}" if live else ""


def _kind_of(path: Path) -> str:
    """The kind of file system that it is on. Raises TierError."""
    with explained(path, "look at it"):
        device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with explained(Path("/proc/self/mountinfo"), "read it"):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return "a file system that /proc/self/mountinfo does not list"
