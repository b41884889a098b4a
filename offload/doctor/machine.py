"""What is wrong on the machine: where the pool's memory lies, and what it may have."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.doctor.finding import Finding, Told
from offload.settings import GIB
from offload.worker.pool.host_limits import MemoryLimit, memory_limits
from offload.worker.pool.numa import share_elsewhere

_ELSEWHERE_SHARE = 0.01
_HUGE_SHARE = 0.5
_ROOM_SHARE = 0.02
_SWAP_SHARE = 0.1
_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


class Mapped(NamedTuple):
    """A mapping as the kernel counts it, in bytes."""

    resident: int
    swapped: int
    huge: int


def memory_wrong(told: Told, root: Path = Path("/")) -> Iterator[Finding]:
    """Of each rank's part of the pool, and of what its process may have.

    Raises:
        OSError: its process cannot be looked at.
    """
    swap_total, swap_used = _swap(root)
    for number, memory in enumerate(told["memory"]):
        who = f"rank {number} (process {memory['pid']})"
        mapped = mapped_at(memory["pid"], memory["address"], memory["nbytes"], root)
        if mapped.swapped:
            yield Finding(
                "pool-swapped",
                f"{mapped.swapped / GIB:.3g} GiB of the pool of {who} are swapped out",
                "make room: have kv-offload resize make the pool smaller, or stop what else uses this "
                "machine's memory; then swapoff",
            )
        elif not memory["is_pinned"] and swap_used > _SWAP_SHARE * swap_total:
            yield Finding(
                "pool-can-be-swapped",
                f"the machine uses {swap_used / GIB:.3g} of {swap_total / GIB:.3g} GiB of swap, and the "
                f"pool of {who} is not locked",
                "swapoff, or make room: the kernel may swap the pool out next",
            )
        elsewhere = (
            None
            if memory["node"] is None
            else share_elsewhere(memory["address"], memory["node"], root, str(memory["pid"]))
        )
        if elsewhere is not None and elsewhere > _ELSEWHERE_SHARE:
            yield Finding(
                "pool-on-other-node",
                f"{elsewhere:.0%} of the pool of {who} lie on other NUMA nodes than {memory['node']}, its "
                f"GPU's",
                "restart the engine when that node has room, lower cpu_gib, or give the container "
                "--cap-add SYS_NICE",
            )
        taken = min(memory["nbytes"], mapped.resident + mapped.swapped)  # less than is mapped may be
        if told["settings"]["huge_pages"] is True and mapped.huge < _HUGE_SHARE * taken:
            yield Finding(
                "no-huge-pages",
                f"huge_pages is true, and {mapped.huge / GIB:.3g} of the {taken / GIB:.3g} GiB "
                f"of the pool of {who} are huge pages",
                "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (for a pool in shared "
                "memory: echo advise > .../shmem_enabled), and restart the engine",
            )
        locked = _most_locked(memory["pid"], root)
        if told["settings"]["uses_nixl"] and locked is not None and locked < memory["nbytes"]:
            yield Finding(
                "locked-memory-low",
                f"peer_transport is nixl, and {who} may lock {locked:,} bytes: less than its pool",
                "ulimit -l unlimited, in a container --ulimit memlock=-1, in a systemd unit "
                "LimitMEMLOCK=infinity",
            )
    yield from _limits_near(told["memory"], root)


def mapped_at(pid: int, address: int, nbytes: int, root: Path = Path("/")) -> Mapped:
    """What lies in these addresses. The kernel looks at every page for it.

    Raises:
        OSError: the process is gone, or another user's.
    """
    counts = {"Rss": 0, "Swap": 0, **dict.fromkeys(_HUGE, 0)}
    is_inside = False
    with (root / f"proc/{pid}/smaps").open() as lines:
        for line in lines:
            if found := _RANGE.match(line):
                is_inside = int(found[1], 16) < address + nbytes and int(found[2], 16) > address
            elif is_inside:
                name, _, value = line.partition(":")
                if name in counts:
                    counts[name] += int(value.split()[0]) << 10
    return Mapped(counts["Rss"], counts["Swap"], sum(counts[name] for name in _HUGE))


def _limits_near(memory: list[Mapping[str, Any]], root: Path) -> Iterator[Finding]:
    """Bounds on memory of which next to nothing is left, each once."""
    limits: dict[str, MemoryLimit] = {}
    for each in memory:
        limits |= {limit.source: limit for limit in memory_limits(root, str(each["pid"]))}
    for limit in limits.values():
        if limit.room < _ROOM_SHARE * limit.limit:
            yield Finding(
                "memory-short",
                f"of the {limit.limit / GIB:.3g} GiB that {limit.source} allows, {limit.room / GIB:.3g} "
                f"are free: the kernel kills, or slows down, what takes more",
                f"{limit.remedy}, or have kv-offload resize make the pool smaller, and lower cpu_gib",
            )


def _swap(root: Path) -> tuple[int, int]:
    """Bytes of swap, and of these in use."""
    found = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("SwapTotal", "SwapFree"):
            found[name] = int(value.split()[0]) << 10
    total = found.get("SwapTotal", 0)
    return total, total - found.get("SwapFree", total)


def _most_locked(pid: int, root: Path) -> int | None:
    """Bytes that the process may lock; None: as many as it likes."""
    for line in (root / f"proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return None if soft == "unlimited" else int(soft)
    return None
