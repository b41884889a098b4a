"""Registering the pool's memory with CUDA, and giving it back."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from offload import HostMemoryError
from offload.copiers.cuda import register_host_memory, unregister_host_memory
from offload.memory import HostMemory
from offload.pin_probe import check_pinning
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(120)]

MIB = 1 << 20


def is_pinned(address: int, nbytes: int) -> bool:
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()


def pinned(num_slots: int, slot_bytes: int, bound: int = 1 << 30) -> HostMemory:
    return HostMemory(
        num_slots,
        slot_bytes,
        register=register_host_memory,
        unregister=unregister_host_memory,
        max_registration_bytes=bound,
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
    assert subprocess.run([sys.executable, "-m", "offload.pin_probe"], check=False).returncode == 0
