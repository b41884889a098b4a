"""Which NUMA node a GPU hangs on, which CPUs that node has, and how much of some memory lies elsewhere."""

import re
from pathlib import Path

_PAGES_ON_NODE = re.compile(r"\bN(\d+)=(\d+)")


def node_of_pci_device(pci_address: str, root: Path = Path("/")) -> int | None:
    """The node of the device at ``pci_address`` (``0000:3b:00.0``); None if the machine does not say.

    Machines with one node say nothing or -1, and so do many virtual ones.
    """
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of_node(node: int, root: Path = Path("/")) -> set[int]:
    """The node's CPUs; none if it has none or the machine does not say."""
    try:
        return parse_list((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return set()


def cpus_near(cpus: set[int], root: Path = Path("/")) -> set[int]:
    """All CPUs of the nodes that these belong to; these alone if the machine does not say."""
    near = set(cpus)
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        of_node = cpus_of_node(int(folder.name.removeprefix("node")), root)
        near |= of_node if of_node & cpus else set()
    return near


def share_elsewhere(address: int, node: int, root: Path = Path("/"), process: str = "self") -> float | None:
    """The part of the mapping at ``address`` that lies on other nodes, 0 to 1; None if it is not told.

    From ``numa_maps``, because containers are often refused the system calls that tell. The kernel looks
    at every page for it.
    """
    row = ""
    try:
        with (root / "proc" / process / "numa_maps").open() as rows:  # in the order of addresses
            for line in rows:
                if int(line.split(maxsplit=1)[0], 16) > address:
                    break
                row = line
    except (OSError, ValueError):
        return None
    pages = {int(each): int(number) for each, number in _PAGES_ON_NODE.findall(row)}
    total = sum(pages.values())
    return 1 - pages.get(node, 0) / total if total else None


def parse_list(text: str) -> set[int]:
    """Numbers as Linux lists them: ``0-3,8``. Raises ValueError for what is no such list."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
