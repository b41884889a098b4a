"""What the doctor sees on a machine: of memory that is really so, or of files as the kernel writes them."""

import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.doctor.below import disks_full
from offload.doctor.finding import Finding
from offload.doctor.machine import mapped_at, memory_wrong
from offload.worker.pool.memory import HostMemory
from tests.offload.worker.pool.test_host_limits import Machine

NUM_SLOTS, SLOT_BYTES = 8, 1 << 21
NBYTES = NUM_SLOTS * SLOT_BYTES


@pytest.fixture
def pool() -> Iterator[HostMemory]:
    memory = HostMemory(NUM_SLOTS, SLOT_BYTES)
    yield memory
    memory.close()


def told(memory: HostMemory, **facts: Any) -> dict[str, Any]:
    """What an engine with that pool says."""
    settings = {"huge_pages": False, "uses_nixl": False}
    about = memory.facts._replace(**{key: value for key, value in facts.items() if key not in settings})
    return {
        "memory": [about._asdict()],
        "settings": settings | {key: value for key, value in facts.items() if key in settings},
    }


def names(found: Iterator[Finding]) -> set[str]:
    """But for this machine's own want of memory, of which nothing is known here."""
    findings = list(found)
    assert all(finding.saw and finding.do for finding in findings)
    return {finding.name for finding in findings} - {"memory-short", "pool-can-be-swapped"}


def test_a_pool_as_it_should_be(pool: HostMemory) -> None:
    mapped = mapped_at(os.getpid(), pool.address, pool.nbytes)
    assert mapped.resident >= NBYTES and not mapped.swapped
    assert not names(memory_wrong(told(pool)))


def test_a_process_that_is_gone_cannot_be_looked_at(pool: HostMemory) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError, match="No such"):
        list(memory_wrong(told(pool, pid=gone.pid)))


def test_a_pool_on_another_node(pool: HostMemory) -> None:
    """Of a node that it is not on: on machines with one, all but that one."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel tells of no NUMA nodes")
    assert "pool-on-other-node" in names(memory_wrong(told(pool, node=63)))


def test_huge_pages_that_are_not_there(pool: HostMemory) -> None:
    """A mapping that asked the kernel for none."""
    mapping = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    plain = HostMemory(NUM_SLOTS, SLOT_BYTES, shared=mapping)
    plain._bytes[:] = 1  # type: ignore[index]
    assert names(memory_wrong(told(plain, huge_pages=True))) == {"no-huge-pages"}
    assert not names(memory_wrong(told(plain, huge_pages="auto")))
    plain.close()


def test_huge_pages_that_are_there() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    memory = HostMemory(NUM_SLOTS, SLOT_BYTES, huge_pages=True)
    mapped = mapped_at(os.getpid(), memory.address, NBYTES)
    if mapped.huge < NBYTES - 2 * SLOT_BYTES:
        pytest.skip(f"of {NBYTES} bytes the kernel gave {mapped.huge} in huge pages")
    assert not names(memory_wrong(told(memory, huge_pages=True)))
    memory.close()


def test_less_locked_memory_than_nixl_takes(pool: HostMemory) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, before[1]))
    try:
        assert names(memory_wrong(told(pool, uses_nixl=True))) == {"locked-memory-low"}
        assert not names(memory_wrong(told(pool)))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """This process's files, on a machine of which a test can say more."""
    machine = Machine(tmp_path)
    for name in ("smaps", "limits", "status"):
        machine.write(f"proc/{os.getpid()}/{name}", Path(f"/proc/self/{name}").read_text())
    return machine


@pytest.mark.parametrize("is_pinned", [False, True])
def test_swap_under_the_pool(pool: HostMemory, machine: Machine, is_pinned: bool) -> None:
    """The kernel's own words, with what it would say had it swapped."""
    pid = os.getpid()
    lines = Path("/proc/self/smaps").read_text().splitlines(keepends=True)
    machine.write(f"proc/{pid}/smaps", "".join(lines))
    machine.write(
        "proc/meminfo",
        "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapTotal: 1024 kB\nSwapFree: 1000 kB\n",
    )
    facts = told(pool, is_pinned=is_pinned)
    assert not list(memory_wrong(facts, machine.root)), "a little"
    machine.write(
        "proc/meminfo",
        "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapTotal: 1024 kB\nSwapFree: 512 kB\n",
    )
    found = [finding.name for finding in memory_wrong(facts, machine.root)]
    assert found == ([] if is_pinned else ["pool-can-be-swapped"])
    at = next(
        number
        for number, line in enumerate(lines)
        if "-" in line.split()[0]
        and int(line.partition("-")[0], 16) <= pool.address < int(line.split()[0].partition("-")[2], 16)
    )
    swap = next(number for number in range(at, len(lines)) if lines[number].startswith("Swap:"))
    lines[swap] = "Swap:               2048 kB\n"
    machine.write(f"proc/{pid}/smaps", "".join(lines))
    [finding] = memory_wrong(facts, machine.root)
    assert finding.name == "pool-swapped" and "0.00195 GiB" in finding.saw


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_of_which_nothing_is_left(pool: HostMemory, machine: Machine, version: int) -> None:
    pid, gib = os.getpid(), 1 << 30
    machine.write(f"proc/{pid}/cgroup", "0::/a\n" if version == 2 else "4:memory:/a\n")
    group = machine.group_v2 if version == 2 else machine.group_v1
    group("/a", gib, gib // 2)
    assert not list(memory_wrong(told(pool), machine.root))
    group("/a", gib, gib - 1)
    [finding] = memory_wrong(told(pool), machine.root)
    assert finding.name == "memory-short" and f"{machine.root}/sys/fs/cgroup" in finding.saw
    assert "kv-offload resize" in finding.do
    assert "resources.limits.memory" in finding.do


def test_a_directory_of_a_tier_that_is_gone(tmp_path: Path) -> None:
    tier = {"kind": "disk", "tier": "disk", "path": str(tmp_path / "gone")}
    [finding] = disks_full({"tiers": [tier, {"kind": "valkey", "url": "host"}]})
    assert finding.name == "tier-gone"


_FILL = """
import sys
from pathlib import Path
from offload.doctor.below import disks_full
path = Path(sys.argv[1])
told = {"tiers": [{"kind": "disk", "tier": "disk", "path": str(path)}]}
assert not list(disks_full(told)), "an empty one"
(path / "others").write_bytes(bytes((4 << 20) - (32 << 10)))
[finding] = disks_full(told)
assert finding.name == "tier-disk-full", finding
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A small file system of its own, which others fill."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("this user may make no mount namespace")
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec "$0" "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, sys.executable, "-c", _FILL, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
