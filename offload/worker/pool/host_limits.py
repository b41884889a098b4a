"""How much memory this process may take, and who says so: the machine, its nodes, or a control group.

A control group does not refuse memory, it kills: the pool is held against its limits before it is taken.
File systems are read below ``root``, so that a directory can stand in for them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offload.config import OffloadConfig
from offload.errors import ConfigError, HostMemoryError
from offload.settings import GIB
from offload.worker.pool.numa import parse_list

LOWER = "lower cpu_gib"
"""What can be done by whoever starts an engine."""
ASK_FOR_LESS = "ask for less"
"""The same by whoever asks for another size."""

_RAISE_GROUP = (
    "raise the control group's limit: docker run --memory, resources.limits.memory in Kubernetes, "
    "MemoryMax= (and MemoryHigh=) of a systemd unit"
)
_RAISE_MACHINE = "stop what else uses this machine's memory"
_RAISE_NODES = "allow the process more NUMA nodes: docker run --cpuset-mems"


_NO_LIMIT = 1 << 62
_AVAILABLE_ON_NODE = ("MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:")


class MemoryLimit(NamedTuple):
    """One bound on memory, in bytes."""

    source: str
    """The file that says so."""
    limit: int
    used: int
    """Of ``limit``, what cannot be had back by dropping file caches."""
    remedy: str

    @property
    def room(self) -> int:
        return max(self.limit - self.used, 0)


class _GroupFiles(NamedTuple):
    """Where a version of control groups keeps its figures."""

    mount: str
    limits: tuple[str, ...]
    used: str
    caches: tuple[str, ...]
    """Keys of ``memory.stat``."""


_VERSION_1 = _GroupFiles(
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),  # version 1 does not tell slabs apart
)
# Above memory.high nothing is killed, but slowed down without end: what is pinned cannot be reclaimed.
_VERSION_2 = _GroupFiles(
    "sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
)


def memory_limits(root: Path = Path("/"), process: str = "self") -> list[MemoryLimit]:
    """All bounds on a process that can be read, the machine's first; a control group's parents bind too."""
    return [*_machine(root), *_nodes(root, process), *_groups(root, process)]


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process may use at most, were nothing in use.

    Raises:
        HostMemoryError: not even the machine's memory can be read.
    """
    limits = memory_limits(root)
    if not limits:
        raise HostMemoryError(f"{root / 'proc/meminfo'} does not tell this machine's memory; mount /proc")
    return min(each.limit for each in limits)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still take beside what is in use.

    Raises:
        HostMemoryError: as ``host_memory_bytes``.
    """
    host_memory_bytes(root)
    return min(each.room for each in memory_limits(root))


def check_host_memory(config: OffloadConfig, available: int | None = None) -> None:
    """Refuse a pool larger than the machine's memory.

    Raises:
        ConfigError: ``config.cpu_gib`` exceeds ``available`` bytes (default: what this machine has).
    """
    available = host_memory_bytes() if available is None else available
    if config.cpu_gib > available / GIB:
        raise ConfigError(
            f"cpu_gib is {config.cpu_gib} but this machine has {available / GIB:.1f} GiB of memory; "
            f"lower cpu_gib to at most what the engine leaves free"
        )


def check_room(nbytes: int, root: Path = Path("/"), instead: str = LOWER) -> None:
    """Refuse ``nbytes`` more where they do not fit beside what is in use. Reads a few small files.

    ``instead``: what whoever asks can do about it, besides raising the limit.

    Raises:
        HostMemoryError: names what was asked for, the tightest limit and what is free of it, in GiB, and
            what raises it.
    """
    tightest = min(memory_limits(root), key=lambda each: each.room, default=None)
    if tightest is not None and nbytes > tightest.room:
        raise HostMemoryError(
            f"cannot take {_gib(-(-nbytes * 100 // GIB))} GiB for the CPU pool: of the "
            f"{_gib(tightest.limit * 100 // GIB)} GiB that {tightest.source} allows, "
            f"{_gib(tightest.room * 100 // GIB)} are free; {instead}, or {tightest.remedy}"
        )


def _gib(hundredths: int) -> str:
    return f"{hundredths // 100:,}.{hundredths % 100:02}"


def _machine(root: Path) -> Iterator[MemoryLimit]:
    path = root / "proc/meminfo"
    kib = _table(path)
    if "MemTotal:" in kib:
        total = kib["MemTotal:"] << 10
        available = kib.get("MemAvailable:", kib["MemTotal:"]) + kib.get("SwapFree:", 0) << 10
        yield MemoryLimit(str(path), total, max(total - available, 0), _RAISE_MACHINE)


def _nodes(root: Path, process: str) -> Iterator[MemoryLimit]:
    """The memory of the NUMA nodes this process may use, if these are not all."""
    status, folder = root / "proc" / process / "status", root / "sys/devices/system/node"
    try:
        lines = status.read_text().splitlines()
        (allowed,) = (line.partition(":")[2] for line in lines if line.startswith("Mems_allowed_list:"))
        nodes = parse_list(allowed)
        if nodes >= parse_list((folder / "has_memory").read_text()):
            return
    except (OSError, ValueError):
        return
    tables = [_table(folder / f"node{node}/meminfo", first_column=2) for node in sorted(nodes)]
    if all("MemTotal:" in table for table in tables):
        total = sum(table["MemTotal:"] for table in tables) << 10
        available = sum(table.get(key, 0) for table in tables for key in _AVAILABLE_ON_NODE) << 10
        yield MemoryLimit(f"{status} (NUMA nodes {allowed.strip()})", total, total - available, _RAISE_NODES)


def group_limits(root: Path = Path("/"), process: str = "self") -> list[MemoryLimit]:
    """Those of a process's control groups."""
    return list(_groups(root, process))


def group_directories(root: Path = Path("/"), process: str = "self") -> list[Path]:
    """Of a process's control group and those above it, where they can be seen."""
    return [group for group, _ in _directories(root, process)]


def _groups(root: Path, process: str) -> Iterator[MemoryLimit]:
    for group, files in _directories(root, process):
        yield from _group(group, files)


def _directories(root: Path, process: str) -> Iterator[tuple[Path, _GroupFiles]]:
    try:
        lines = (root / "proc" / process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        mount = root / files.mount
        # In a container the path may be the host's, and the mount already the container's own group:
        # what is not there is passed over on the way up to the mount.
        group = mount / path.lstrip("/")
        while group.is_relative_to(mount):
            yield group, files
            group = group.parent


def _group(group: Path, files: _GroupFiles) -> Iterator[MemoryLimit]:
    limits = {name: limit for name in files.limits if (limit := _number(group / name)) is not None}
    used = _number(group / files.used) if limits else None
    if used is None:
        return
    stat = _table(group / "memory.stat")
    used = max(used - sum(stat.get(key, 0) for key in files.caches), 0)
    for name, limit in limits.items():
        yield MemoryLimit(str(group / name), limit, used, _RAISE_GROUP)


def _number(path: Path) -> int | None:
    """None too for what stands for no limit: "max", or in version 1 the largest number there is."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _NO_LIMIT else None


def _table(path: Path, first_column: int = 0) -> dict[str, int]:
    """Two columns of a file, names and numbers; nothing if it cannot be read."""
    try:
        rows = [line.split()[first_column:] for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
