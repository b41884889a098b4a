"""Registering the pool's memory with CUDA, and giving it back."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import HostMemoryError
from offload.messages import Resize, Resized
from offload.worker.copiers.cuda import pci_address, register_host_memory, unregister_host_memory
from offload.worker.pool.memory import HostMemory
from offload.worker.pool.numa import node_of_pci_device, share_elsewhere
from offload.worker.pool.pin_probe import check_pinning
from offload.worker.resizing import PageThread, WorkerResizing
from tests.offload.mappings import mapping_at, placement_at
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

MIB = 1 << 20


def is_pinned(address: int, nbytes: int) -> bool:
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()


def pinned(num_slots: int, slot_bytes: int, bound: int = 1 << 30, **options: Any) -> HostMemory:
    return HostMemory(
        num_slots,
        slot_bytes,
        register=register_host_memory,
        unregister=unregister_host_memory,
        max_registration_bytes=bound,
        **options,
    )


@contextmanager
def expected_cuda_error() -> Iterator[None]:
    """CUDA keeps an error until it is asked for it; ask, so that the next test does not get it."""
    yield
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
    torch.ones(1, device="cuda").add_(1)


@pytest.mark.parametrize("bound", [1 << 30, 2 * MIB, 1])
def test_memory_is_pinned_while_it_is_open(bound: int) -> None:
    memory = pinned(8, MIB, bound)
    last = memory.address + memory.nbytes - 4096
    assert is_pinned(memory.address, 4096)
    assert is_pinned(last, 4096)
    memory.close()
    memory.close()


@pytest.mark.parametrize("gpu", ["first", "last"])
def test_a_resize_pins_and_unpins_on_its_own_thread(gpu: str) -> None:
    """That thread asks CUDA for the GPU of its rank. Others would get a context that nobody needs."""
    if gpu == "last" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU; a thread has the first one anyway")
    device = torch.device("cuda", torch.cuda.device_count() - 1 if gpu == "last" else 0)
    asked: set[int] = set()

    def register(address: int, nbytes: int) -> None:
        asked.add(torch.cuda.current_device())
        register_host_memory(address, nbytes)

    memory = HostMemory(
        4, MIB, register=register, unregister=unregister_host_memory, most_slots=8, unit_slots=2
    )
    asked.clear()
    resizing = WorkerResizing(memory, PageThread, device)
    for number, (start, takes) in enumerate([(2, False), (4, True)]):
        resizing.begin([Resize(number, np.array([start]), np.array([start + 2]), takes)])
    wait(resizing._under_way.values(), 60)
    assert resizing.take_ended() == {0: Resized(1), 1: Resized(1)}
    assert asked == {device.index}
    at = [memory.address + slot * MIB for slot in range(0, 8, 2)]
    assert [is_pinned(address, MIB) for address in at] == [True, False, True, False]
    assert resizing.close(60)
    memory.close()


def test_memory_is_pageable_after_it_was_unregistered() -> None:
    memory = HostMemory(1, MIB)
    register_host_memory(memory.address, MIB)
    assert is_pinned(memory.address, MIB)
    unregister_host_memory(memory.address)
    assert not is_pinned(memory.address, MIB)
    memory.close()


def test_sizes_that_are_no_whole_pages() -> None:
    memory = pinned(7, 1000)
    assert is_pinned(memory.address, memory.nbytes)
    memory.close()


def test_registering_twice_tells_cudas_reason() -> None:
    memory = pinned(1, MIB)
    with (
        expected_cuda_error(),
        pytest.raises(OSError, match=r"cudaHostRegister returned CUDA error \d+ \(.+\)"),
    ):
        register_host_memory(memory.address, MIB)
    assert is_pinned(memory.address, MIB), "the first registration is gone"
    memory.close()


def test_unregistering_what_is_not_registered_tells_cudas_reason() -> None:
    memory = HostMemory(1, MIB)
    with (
        expected_cuda_error(),
        pytest.raises(OSError, match=r"cudaHostUnregister returned CUDA error \d+ \("),
    ):
        unregister_host_memory(memory.address)
    memory.close()


def test_a_refusal_in_the_middle_unregisters_what_was_pinned() -> None:
    calls: list[int] = []

    def register(address: int, nbytes: int) -> None:
        if len(calls) == 2:
            address = calls[0]  # pinned already: CUDA refuses it
        calls.append(address)
        register_host_memory(address, nbytes)

    with expected_cuda_error(), pytest.raises(HostMemoryError, match="cannot pin"):
        HostMemory(4, MIB, register=register, unregister=unregister_host_memory, max_registration_bytes=MIB)
    memory = pinned(4, MIB)  # may get the very same addresses
    memory.close()


def test_the_probe_says_yes_here() -> None:
    check_pinning()
    probe = [sys.executable, "-m", "offload.worker.pool.pin_probe"]
    assert subprocess.run(probe, check=False).returncode == 0


def test_linux_knows_the_gpu_by_its_address() -> None:
    address = pci_address(torch.device("cuda", torch.cuda.current_device()))
    assert address is not None, "this torch does not tell"
    device = Path("/sys/bus/pci/devices") / address
    if not device.is_dir():
        pytest.skip("this container does not show the machine's PCI devices")
    assert (device / "vendor").read_text().strip() == "0x10de"


@pytest.mark.parametrize("huge_pages", [False, True])
def test_pinned_pages_lie_on_the_node_of_the_gpu(huge_pages: bool) -> None:
    """Also where mbind is refused: they are touched by that node's CPUs."""
    address = pci_address(torch.device("cuda", torch.cuda.current_device()))
    node = None if address is None else node_of_pci_device(address)
    if node is None:
        pytest.skip("this machine does not tell the GPU's NUMA node")
    with closing(pinned(64, MIB, node=node, huge_pages=huge_pages)) as memory:
        assert is_pinned(memory.address, memory.nbytes)
        if (placement := placement_at(memory.address)) is None:
            pytest.skip("this kernel has no numa_maps")
        assert set(placement[1]) == {node}
        assert share_elsewhere(memory.address, node) == 0


def test_pinned_memory_may_be_of_huge_pages() -> None:
    with closing(pinned(64, MIB, huge_pages=True)) as memory:
        mapping = mapping_at(memory.address)
        assert mapping is not None
        assert "hg" in mapping.flags
        assert mapping.end - mapping.start == mapping.resident == 64 * MIB
        assert is_pinned(memory.address, memory.nbytes)
