"""NUMA nodes: what /sys tells of them, and what the kernel makes of our wishes."""

import ctypes
import mmap
import platform
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offload.worker.pool import syscalls
from offload.worker.pool.numa import cpus_near, cpus_of_node, node_of_pci_device, parse_list, share_elsewhere
from offload.worker.pool.syscalls import prefer_node

PAGE = mmap.PAGESIZE


@contextmanager
def mapping(num_pages: int) -> Iterator[int]:
    """The address of fresh memory."""
    with closing(mmap.mmap(-1, num_pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as memory:
        bytes_ = np.frombuffer(memory, dtype=np.uint8)
        yield bytes_.ctypes.data
        del bytes_


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)])
def test_the_node_of_a_gpu(text: str, node: int | None, tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)
    assert node_of_pci_device("0000:3B:00.0", tmp_path) == node


def test_a_gpu_that_linux_does_not_know(tmp_path: Path) -> None:
    assert node_of_pci_device("0000:3b:00.0", tmp_path) is None


def test_cpus_of_a_node(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text("0-2,8\n")
    assert cpus_of_node(1, tmp_path) == {0, 1, 2, 8}
    assert cpus_of_node(0, tmp_path) == set()


def test_cpus_near_others(tmp_path: Path) -> None:
    for node, text in enumerate(("0-1,4", "2-3,5", "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert cpus_near({1}, tmp_path) == {0, 1, 4}
    assert cpus_near({4, 5}, tmp_path) == {0, 1, 2, 3, 4, 5}
    assert cpus_near({7}, tmp_path) == {7}
    assert cpus_near({0}, tmp_path / "elsewhere") == {0}


@pytest.mark.parametrize(
    ("text", "numbers"), [("", set()), ("\n", set()), ("3", {3}), ("0-1,4-5,9\n", {0, 1, 4, 5, 9})]
)
def test_lists(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


_NUMA_MAPS = """\
55d0c8a0e000 default file=/usr/bin/python3.11 mapped=7 N0=3 N1=4 kernelpagesize_kB=4
7f06ebbfc000 prefer:1 anon=8 dirty=8 active=0 N0=2 N1=6 kernelpagesize_kB=4
7f06ec000000 default
7f06ec200000 default anon=5 N0=5 kernelpagesize_kB=4
"""


@pytest.mark.parametrize(
    ("address", "node", "share"),
    [
        (0x7F06EBBFC000, 1, 0.25),
        (0x7F06EBBFC000, 0, 0.75),
        (0x7F06EBBFD000, 1, 0.25),  # inside of it
        (0x7F06EBBFC000, 2, 1.0),
        (0x7F06EC200000, 0, 0.0),
        (0x7F06EC000000, 0, None),  # no page yet
        (0x1000, 0, None),
    ],
)
def test_the_share_on_other_nodes(address: int, node: int, share: float | None, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text(_NUMA_MAPS)
    assert share_elsewhere(address, node, tmp_path) == share


def test_a_kernel_without_nodes_does_not_tell(tmp_path: Path) -> None:
    assert share_elsewhere(0x1000, 0, tmp_path) is None


def test_this_kernel_tells() -> None:
    with mapping(2) as address:
        ctypes.memset(address, 1, 2 * PAGE)
        if (share := share_elsewhere(address, 0)) is None:
            pytest.skip("this kernel has no numa_maps")
        assert 0 <= share <= 1
        assert share_elsewhere(address, 1000) == 1


@pytest.mark.parametrize("node", [60, 64, 200])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    with mapping(1) as address, pytest.raises(OSError, match="mbind"):
        prefer_node(address, PAGE, node)


@pytest.mark.parametrize(("node", "words"), [(0, [1]), (5, [32]), (63, [1 << 63]), (65, [0, 2])])
def test_the_kernel_is_told_the_node(node: int, words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    kernel = SimpleNamespace(syscall=lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setattr(syscalls, "_libc", kernel)
    prefer_node(8 * PAGE, 3 * PAGE, node)
    [(_, address, nbytes, policy, mask, num_bits, flags)] = calls
    assert (address.value, nbytes.value, policy.value, flags.value) == (8 * PAGE, 3 * PAGE, 1, 0)
    assert list(mask) == words
    assert num_bits.value == 64 * len(words) + 1


def test_on_other_processors_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="mbind: its number is not known for riscv64"):
        prefer_node(0, PAGE, 0)
