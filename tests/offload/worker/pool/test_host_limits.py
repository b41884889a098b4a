"""What memory may be taken, read from directories that stand in for /proc and /sys."""

from pathlib import Path

import pytest

from offload import HostMemoryError
from offload.worker.pool.host_limits import (
    check_room,
    free_memory_bytes,
    host_memory_bytes,
    memory_limits,
)

MIB = 1 << 20
GIB = 1 << 30
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


class Machine:
    """Files below ``root``: 8 GiB of memory, 6 of them available, and no control group."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable: 6291456 kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def group_v2(self, path: str, limit: object, used: int, *, high: object = "max", cache: int = 0) -> None:
        folder = f"{V2}{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(
            f"{folder}/memory.stat", f"anon 7\ninactive_file {cache}\nactive_file {cache}\nslab 9 9\nodd\n"
        )

    def group_v1(self, path: str, limit: int, used: int, *, cache: int = 0) -> None:
        folder = f"{V1}{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(
            f"{folder}/memory.stat",
            f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file {cache}\n",
        )

    def refusal(self, nbytes: int) -> str:
        with pytest.raises(HostMemoryError) as refused:
            check_room(nbytes, self.root)
        return str(refused.value)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_machine_alone(machine: Machine) -> None:
    check_room(6 * GIB, machine.root)
    message = machine.refusal(6 * GIB + 1)
    assert message == (
        f"cannot take 6.01 GiB for the CPU pool: of the 8.00 GiB that {machine.root}/proc/meminfo allows, "
        f"6.00 are free; lower cpu_gib, or stop what else uses this machine's memory"
    )
    assert host_memory_bytes(machine.root) == 8 * GIB
    assert free_memory_bytes(machine.root) == 6 * GIB


def test_who_asks_while_the_engine_runs_is_told_what_it_can_do(machine: Machine) -> None:
    with pytest.raises(HostMemoryError, match=r"6\.00 are free; ask for less, or stop what else"):
        check_room(7 * GIB, machine.root, "ask for less")


def test_free_swap_counts_as_available(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapFree: 1048576 kB\n")
    check_room(7 * GIB, machine.root)
    assert "7.00 are free" in machine.refusal(7 * GIB + 1)


def test_where_nothing_can_be_read_nothing_is_refused_for_room(tmp_path: Path) -> None:
    check_room(1 << 60, tmp_path)
    with pytest.raises(HostMemoryError, match="mount /proc"):
        host_memory_bytes(tmp_path)
    with pytest.raises(HostMemoryError, match="mount /proc"):
        free_memory_bytes(tmp_path)


def test_a_kernel_that_does_not_tell_what_is_available(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 8388608 kB\n")
    check_room(8 * GIB, machine.root)
    machine.refusal(8 * GIB + 1)


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/../other/pod"], ids=str)
def test_a_container_whose_mount_is_its_own_group(machine: Machine, path: str) -> None:
    """Its path may be that of the host, which does not exist in the container."""
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.group_v2("", GIB, 300 * MIB, cache=50 * MIB)
    check_room(GIB - 200 * MIB, machine.root)
    message = machine.refusal(GIB - 200 * MIB + 1)
    assert f"of the 1.00 GiB that {machine.root}/{V2}/memory.max allows, 0.80 are free" in message
    assert "lower cpu_gib" in message
    assert "docker run --memory" in message
    assert "resources.limits.memory" in message
    assert host_memory_bytes(machine.root) == GIB


@pytest.mark.parametrize("tightest", ["/a/b", "/a", ""], ids=["own", "parent", "root"])
def test_parents_bind_too(machine: Machine, tightest: str) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    for path in ("/a/b", "/a", ""):
        machine.group_v2(path, GIB if path == tightest else "max", 10 * MIB)
    check_room(GIB - 10 * MIB, machine.root)
    assert f"{V2}{tightest}/memory.max" in machine.refusal(GIB)


def test_memory_high_binds(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.group_v2("/a", 2 * GIB, 0, high=GIB)
    check_room(GIB, machine.root)
    assert f"{V2}/a/memory.high" in machine.refusal(GIB + 1)


def test_the_tightest_is_the_one_with_the_least_room(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.group_v2("/a/b", GIB, 0)
    machine.group_v2("/a", 3 * GIB, 3 * GIB - MIB)
    assert f"{V2}/a/memory.max" in machine.refusal(GIB)
    assert host_memory_bytes(machine.root) == GIB


def test_groups_without_a_limit_bind_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.group_v2("/a", "max", 5 * GIB)
    check_room(6 * GIB, machine.root)
    assert len(memory_limits(machine.root)) == 1


@pytest.mark.parametrize("path", ["/docker/abc", "/"], ids=str)
def test_version_one(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"5:cpu,cpuacct:/x\n4:memory:{path}\n0::/elsewhere\n")
    machine.group_v1(path.rstrip("/"), GIB, 300 * MIB, cache=50 * MIB)
    machine.group_v1("/x", MIB, 0)
    check_room(GIB - 200 * MIB, machine.root)
    message = machine.refusal(GIB - 200 * MIB + 1)
    assert f"{V1}{path.rstrip('/')}/memory.limit_in_bytes allows, 0.80 are free" in message


def test_version_one_without_a_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:hugetlb,memory:/\n")
    machine.group_v1("", 9223372036854771712, 0)
    assert host_memory_bytes(machine.root) == 8 * GIB
    check_room(6 * GIB, machine.root)


def test_more_in_use_than_allowed_leaves_no_room(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.group_v2("/a", MIB, GIB)
    check_room(0, machine.root)
    machine.refusal(1)


class TestNodes:
    @pytest.fixture(autouse=True)
    def _two_nodes(self, machine: Machine) -> None:
        machine.write("sys/devices/system/node/has_memory", "0-1\n")
        for node in (0, 1):
            figures = {"MemTotal": 4 << 20, "MemFree": 1 << 20, "Active(file)": 1 << 20, "AnonPages": 1 << 20}
            text = "".join(f"Node {node} {name}:   {kib} kB\n" for name, kib in figures.items())
            machine.write(f"sys/devices/system/node/node{node}/meminfo", text)

    def test_a_process_held_to_one_has_only_its_memory(self, machine: Machine) -> None:
        machine.write("proc/self/status", "Name:\tpython\nMems_allowed:\t2\nMems_allowed_list:\t1\n")
        check_room(2 * GIB, machine.root)
        message = machine.refusal(2 * GIB + 1)
        assert "of the 4.00 GiB that" in message and "NUMA nodes 1) allows, 2.00 are free" in message
        assert "--cpuset-mems" in message

    def test_a_process_that_may_use_all_has_the_machine(self, machine: Machine) -> None:
        machine.write("proc/self/status", "Mems_allowed_list:\t0-63\n")
        assert len(memory_limits(machine.root)) == 1


def test_this_machine() -> None:
    limits = memory_limits()
    assert limits[0].source == "/proc/meminfo"
    assert 0 < limits[0].room <= limits[0].limit
    check_room(1)
    with pytest.raises(HostMemoryError):
        check_room(limits[0].limit + 1)
