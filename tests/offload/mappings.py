"""What the kernel says about a mapping of a process."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

_PROC = Path("/proc")


class Mapping(NamedTuple):
    """One entry of ``smaps``, sizes in bytes."""

    start: int
    end: int
    inode: int
    """0: there is no file behind it, in /dev/shm or elsewhere."""
    resident: int
    huge: int
    """Of ``resident``, in transparent huge pages."""
    flags: frozenset[str]
    """``hg``: huge pages are asked for; ``dc``: forked children do not get it."""


def mapping_at(address: int, process: int | str = "self") -> Mapping | None:
    """The mapping that holds ``address``; None if there is none. Skips where smaps tell too little."""
    text = (_PROC / str(process) / "smaps").read_text()
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)[1:]:
        head, *rows = entry.splitlines()
        span, _, _, _, inode, *_ = head.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            values = dict(row.split(":", 1) for row in rows)
            if not {"Rss", "AnonHugePages", "VmFlags"} <= values.keys():
                pytest.skip("this kernel's smaps do not tell flags and huge pages")
            flags = frozenset(values["VmFlags"].split())
            return Mapping(start, end, int(inode), _kib(values["Rss"]), _kib(values["AnonHugePages"]), flags)
    return None


def placement_at(address: int) -> tuple[str, dict[int, int]] | None:
    """Policy and pages by node of a mapping of this process that starts there; None without ``numa_maps``."""
    try:
        rows = [line.split() for line in (_PROC / "self/numa_maps").read_text().splitlines()]
    except OSError:
        return None
    [row] = [row for row in rows if int(row[0], 16) == address]
    pages = dict(re.findall(r"\bN(\d+)=(\d+)", " ".join(row)))
    return row[1], {int(node): int(number) for node, number in pages.items()}


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10
