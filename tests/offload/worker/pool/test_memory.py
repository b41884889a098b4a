"""The pool's memory: its size, its registrations, and what happens when one is refused."""

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import gcd
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import HostMemoryError
from offload.worker.pool import memory as memory_module
from offload.worker.pool.memory import MAX_REGISTRATION_BYTES, HostMemory
from tests.offload.mappings import mapping_at
from tests.strategies import thorough

PAGE = mmap.PAGESIZE


class Pinning:
    """Stands in for CUDA: notes what is registered, and refuses registration number ``refuse_at``."""

    def __init__(self, refuse_at: int | None = None) -> None:
        self.pieces: dict[int, int] = {}
        self.num_calls = 0
        self._refuse_at = refuse_at

    def register(self, address: int, nbytes: int) -> None:
        self.num_calls += 1
        if self.num_calls - 1 == self._refuse_at:
            raise OSError("no more pinned memory")
        assert address not in self.pieces
        self.pieces[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pieces[address]

    def memory(self, num_slots: int, slot_bytes: int, bound: int = MAX_REGISTRATION_BYTES) -> HostMemory:
        return HostMemory(
            num_slots,
            slot_bytes,
            register=self.register,
            unregister=self.unregister,
            max_registration_bytes=bound,
        )


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(1, 1), (3, 4097), (1000, 12288)])
def test_exactly_the_size_asked_for_is_mapped(num_slots: int, slot_bytes: int) -> None:
    with mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as mapped:
        memory = HostMemory(num_slots, slot_bytes)
    assert memory.nbytes == num_slots * slot_bytes
    assert [call.args[1] for call in mapped.call_args_list] == [num_slots * slot_bytes]
    ctypes.memset(memory.address, 0xAB, memory.nbytes)
    assert ctypes.string_at(memory.address, memory.nbytes) == b"\xab" * memory.nbytes
    memory.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(1, 1), (3, 4097), (1000, 12288)])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_the_kernel_maps_just_that_and_all_of_it_is_in_memory(
    num_slots: int, slot_bytes: int, huge_pages: bool
) -> None:
    with closing(HostMemory(num_slots, slot_bytes, huge_pages=huge_pages)) as memory:
        mapping = mapping_at(memory.address)
        assert mapping is not None
        assert mapping.start == memory.address
        assert mapping.end - mapping.start == mapping.resident == -(-memory.nbytes // PAGE) * PAGE
        assert mapping.inode == 0, "there is a file that may be left behind"
        assert ("hg" in mapping.flags) == huge_pages
    assert mapping_at(memory.address) is None


def test_the_node_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        memory_module,
        "take_pages",
        lambda address, nbytes, *, node, huge_pages: taken.append((address, nbytes, node, huge_pages)),
    )
    with closing(HostMemory(2, PAGE, node=3)) as memory:
        assert taken == [(memory.address, 2 * PAGE, 3, False)]


def test_memory_starts_on_a_page() -> None:
    memory = HostMemory(1, 100)
    assert memory.address % PAGE == 0
    memory.close()


@given(
    num_slots=st.integers(1, 40),
    slot_bytes=st.one_of(st.integers(1, 3 * PAGE), st.sampled_from([PAGE // 2, PAGE, 3 * PAGE // 4])),
    bound=st.integers(1, 64 * PAGE),
)
@thorough(200)
def test_registrations(num_slots: int, slot_bytes: int, bound: int) -> None:
    pinning = Pinning()
    memory = pinning.memory(num_slots, slot_bytes, bound)
    pieces = sorted(pinning.pieces.items())
    ends = [address + nbytes for address, nbytes in pieces]
    assert [address for address, _ in pieces] == [memory.address, *ends[:-1]], "gaps or overlaps"
    assert ends[-1] == memory.address + memory.nbytes

    least = slot_bytes * PAGE // gcd(slot_bytes, PAGE)  # of whole slots and whole pages
    for number, (address, nbytes) in enumerate(pieces):
        assert address % PAGE == 0
        assert nbytes % slot_bytes == 0
        assert nbytes <= max(bound, least)
        assert number * memory.slots_per_registration * slot_bytes == address - memory.address
    if len(pieces) > 1:
        assert pieces[0][1] + least > bound, "pieces could be larger"
    memory.close()
    assert pinning.pieces == {}


def test_pageable_memory_is_not_registered() -> None:
    memory = HostMemory(10, PAGE)
    assert memory.slots_per_registration == 10
    memory.close()


def test_an_interrupt_during_registration_leaves_nothing_pinned() -> None:
    pinning = Pinning()

    def register(address: int, nbytes: int) -> None:
        if pinning.num_calls == 2:
            raise KeyboardInterrupt
        pinning.register(address, nbytes)

    with pytest.raises(KeyboardInterrupt):
        HostMemory(5, PAGE, register=register, unregister=pinning.unregister, max_registration_bytes=PAGE)
    assert pinning.num_calls == 2
    assert pinning.pieces == {}


def test_registrations_stay_below_what_cuda_refuses() -> None:
    assert MAX_REGISTRATION_BYTES < 512 << 30


@pytest.mark.parametrize("refuse_at", [0, 1, 3])
def test_a_refused_registration_undoes_the_others(refuse_at: int) -> None:
    pinning = Pinning(refuse_at)
    with pytest.raises(HostMemoryError) as refused:
        pinning.memory(5, PAGE, PAGE)
    assert pinning.num_calls == refuse_at + 1
    assert pinning.pieces == {}
    message = str(refused.value)
    assert f"pin {5 * PAGE:,} bytes" in message
    assert "no more pinned memory" in message
    assert "limit on locked memory" in message
    for remedy in ("lower cpu_gib", "ulimit -l unlimited", "--ulimit memlock=-1", "LimitMEMLOCK=infinity"):
        assert remedy in message


@pytest.mark.parametrize(("limit", "shown"), [(resource.RLIM_INFINITY, "unlimited"), (65536, "65,536 bytes")])
def test_a_refusal_tells_the_limit_on_locked_memory(
    limit: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(HostMemoryError, match=f"limit on locked memory is {shown}"):
        Pinning(refuse_at=0).memory(1, PAGE)


@pytest.mark.parametrize("num_slots", [1 << 44, 1 << 80])
def test_memory_that_cannot_be_mapped_is_refused(num_slots: int) -> None:
    with pytest.raises(HostMemoryError) as refused:
        HostMemory(num_slots, PAGE)
    assert f"{num_slots * PAGE:,} bytes" in str(refused.value)
    assert "lower cpu_gib" in str(refused.value)
    assert "ulimit -v" in str(refused.value)


@contextmanager
def mappings_noted() -> Iterator[list[mmap.mmap]]:
    mappings: list[mmap.mmap] = []
    make = mmap.mmap

    def noted(*args: int, **kwargs: int) -> mmap.mmap:
        mappings.append(make(*args, **kwargs))
        return mappings[-1]

    with mock.patch.object(mmap, "mmap", noted):
        yield mappings


@pytest.mark.parametrize("error", [HostMemoryError("no room"), KeyboardInterrupt()], ids=["limit", "Ctrl-C"])
def test_memory_that_cannot_be_taken_is_given_back(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int, **__: object) -> None:
        raise error

    monkeypatch.setattr(memory_module, "take_pages", refuse)
    pinning = Pinning()
    with mappings_noted() as mappings, pytest.raises(type(error)):
        pinning.memory(4, PAGE)
    assert mappings[0].closed
    assert pinning.num_calls == 0


def test_memory_that_cannot_be_pinned_is_given_back() -> None:
    with mappings_noted() as mappings, pytest.raises(HostMemoryError):
        Pinning(refuse_at=1).memory(4, PAGE, PAGE)
    assert mappings[0].closed


_HOLDER = """
import mmap, os
from offload.worker.pool.memory import HostMemory

memory = HostMemory(1000, mmap.PAGESIZE)
child = os.fork()
if not child:
    os.read(0, 1)  # until the test closes the pipe
    os._exit(0)
print(memory.address, child, flush=True)
os.read(0, 1)
"""


def files_of(process: int) -> list[str]:
    """What a process has mapped or open."""
    folder = Path(f"/proc/{process}")
    return [
        *(folder / "maps").read_text().splitlines(),
        *(os.readlink(each) for each in (folder / "fd").iterdir()),
    ]


def test_nothing_is_left_of_a_process_that_was_killed() -> None:
    """Not in shared memory, of which it has none, and not in a child that outlives it."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    ) as holder:
        assert holder.stdout is not None
        address, child = map(int, holder.stdout.readline().split())
        mapping = mapping_at(address, holder.pid)
        assert mapping is not None
        assert mapping.resident == 1000 * PAGE
        assert not [path for path in files_of(holder.pid) if "/dev/shm" in path or "memfd" in path]
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert mapping_at(address, child) is None


def test_closing_again_does_nothing() -> None:
    pinning = Pinning()
    memory = pinning.memory(4, PAGE, PAGE)
    memory.close()
    memory.close()
    assert pinning.pieces == {}


def test_closing_gives_the_memory_back() -> None:
    with mappings_noted() as mappings:
        memory = HostMemory(1, PAGE)
    assert not mappings[0].closed
    memory.close()
    assert mappings[0].closed


def test_a_registration_that_cannot_be_undone_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning = Pinning()
    memory = pinning.memory(3, PAGE, PAGE)
    del pinning.pieces[memory.address + PAGE]
    undo = pinning.unregister

    def unregister(address: int) -> None:
        if address not in pinning.pieces:
            raise OSError("the device is gone")
        undo(address)

    with mock.patch.object(memory, "_unregister", unregister):
        memory.close()
    assert pinning.pieces == {}
    assert "stays pinned: the device is gone" in caplog.text
