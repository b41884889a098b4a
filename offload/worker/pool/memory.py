"""The pool's memory: one mapping of exactly the size asked for."""

import ctypes
import logging
import mmap
import os
import platform
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import gcd

import numpy as np

from offload.errors import HostMemoryError
from offload.messages import MemoryFacts
from offload.worker.pool.host_limits import ASK_FOR_LESS, LOWER
from offload.worker.pool.pages import prefer, take_more_pages, take_pages
from offload.worker.pool.segment import machine
from offload.worker.pool.syscalls import madvise

logger = logging.getLogger(__name__)

_MAP_NORESERVE = 0x4000  # not in Python's mmap module before 3.13

MAX_REGISTRATION_BYTES = 64 << 30
"""CUDA refuses single registrations of 512 GiB and more, so memory is registered in smaller pieces."""


class HostMemory:
    """A mapping of ``num_slots * slot_bytes`` bytes, all in memory, optionally pinned.

    torch's pinned allocator rounds up to powers of two; a mapping that is registered piece by piece
    does not. Pieces hold whole slots and whole pages, so that no slot spans two.

    The mapping has no name, and is private to this process unless others share it. It ends with the last of
    them, however that ends, and forked children do not get it.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
        max_registration_bytes: int = MAX_REGISTRATION_BYTES,
        node: int | None = None,
        huge_pages: bool = False,
        shared: mmap.mmap | None = None,
        most_slots: int = 0,
        unit_slots: int = 0,
    ) -> None:
        """Map the memory, take its pages and pin it.

        Args:
            num_slots: slots, at least 1.
            slot_bytes: bytes of one slot.
            register: pins ``(address, nbytes)``, raising OSError if it cannot; None leaves it pageable.
            unregister: undoes ``register`` for one address.
            max_registration_bytes: bound on one registration; raised to the least whole unit.
            node: the NUMA node the pages should lie on, as far as they fit; None for the kernel's choice.
            huge_pages: ask for transparent huge pages. The size stays what it is: at both ends, where no
                whole huge page fits, the pages are ordinary ones.
            shared: a mapping that begins with it, whose pages are taken; None to make one.
            most_slots: map so many, of which only ``num_slots`` have memory at first.
            unit_slots: of which the memory may be given back and taken together; 0: it stays as it is.
                Of ``unit_of``.

        Raises:
            HostMemoryError: the memory cannot be mapped, exceeds a limit, or cannot be pinned.
        """
        num_taken, num_slots = num_slots, max(num_slots, most_slots)
        self.nbytes = num_slots * slot_bytes
        self._slot_bytes = slot_bytes
        self._register_one = register
        self._unregister = unregister
        self._node = node
        self._huge_pages = huge_pages
        self._registered: list[int] = []
        self._pid = os.getpid()
        self._map = _map(self.nbytes, num_slots > num_taken) if shared is None else shared
        self._bytes: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes)
        self.address = self._bytes.ctypes.data
        pages_unit = mmap.PAGESIZE // gcd(slot_bytes, mmap.PAGESIZE)
        units = max(1, max_registration_bytes // (pages_unit * slot_bytes))
        per_unit = unit_slots if register is not None else 0
        self.slots_per_registration = min(per_unit or units * pages_unit, num_slots)
        try:
            if shared is None:
                take_pages(self.address, num_taken * slot_bytes, node=node, huge_pages=huge_pages)
            self._register(0, num_taken)
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> MemoryFacts:
        """Where it lies."""
        try:
            where = machine()
        except OSError:  # no /proc
            where = ""
        return MemoryFacts(where, self._pid, self.address, self.nbytes, self._node, bool(self._registered))

    def close(self) -> None:
        """Unpin and unmap. No copy may be in flight. Calling it again does nothing.

        What cannot be unpinned, because the device is gone, is warned of and keeps nothing else back. In a
        child of the process that mapped it there is nothing to undo: what lies there is the child's own.
        """
        if os.getpid() != self._pid:
            return
        while self._registered:
            address = self._registered.pop()
            try:
                if self._unregister is not None:
                    self._unregister(address)
            except OSError as error:
                logger.warning("a part of the CPU pool stays pinned: %s", error)
        self._bytes = None
        self._map.close()

    def take(self, runs: Sequence[tuple[int, int]]) -> None:
        """Slots of runs ``start <= s < stop``, of whole units, have memory again, pinned if the others are.

        They are of zeros. May take long: it is not for a thread that the engine waits for.

        Raises:
            HostMemoryError: there is not so much memory. Then they have none.
        """
        pages = []
        for run in runs:
            address, nbytes = self._extent(*run)
            first = address // mmap.PAGESIZE * mmap.PAGESIZE
            pages.append((first, address + nbytes - first))
        try:
            for first, nbytes in pages:
                prefer(first, nbytes, node=self._node, huge_pages=self._huge_pages)
            take_more_pages(pages)
            for run in runs:
                self._register(*run, ASK_FOR_LESS)
        except BaseException:
            self.give_back(runs)
            raise

    def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
        """Slots of runs ``start <= s < stop``, of whole units, have no memory any more. Nobody may use them.

        A page that others are on, too, stays, and what is there of these is zeros.
        What cannot be unpinned keeps its memory: the device may still write to it.
        """
        for start, stop in runs:
            step = self.slots_per_registration if self._registered else stop - start
            for slot in range(start, stop, step):
                address, nbytes = self._extent(slot, min(slot + step, stop))
                if self._is_unpinned(address):
                    _let_go(address, address + nbytes)

    def _is_unpinned(self, address: int) -> bool:
        """Whether the piece there is not pinned any more."""
        if address in self._registered:
            try:
                assert self._unregister is not None
                self._unregister(address)
            except OSError as error:
                logger.warning("a part of the CPU pool stays pinned: %s", error)
                return False
            self._registered.remove(address)
        return True

    def _extent(self, start: int, stop: int) -> tuple[int, int]:
        return self.address + start * self._slot_bytes, (stop - start) * self._slot_bytes

    def _register(self, start: int, stop: int, instead: str = LOWER) -> None:
        """Pin piece by piece. A control group cannot be what refuses: the pages are counted there already."""
        if self._register_one is None:
            return
        for slot in range(start, stop, self.slots_per_registration):
            address, nbytes = self._extent(slot, min(slot + self.slots_per_registration, stop))
            if address in self._registered:
                continue
            try:
                self._register_one(address, nbytes)
            except OSError as error:
                raise HostMemoryError(
                    f"cannot pin {self.nbytes:,} bytes for the CPU pool ({error}; the limit on locked memory "
                    f"is {_memlock_limit()}); {instead}, or allow the process to lock more: "
                    f"ulimit -l unlimited, in a container --ulimit memlock=-1, in a systemd unit "
                    f"LimitMEMLOCK=infinity"
                ) from error
            self._registered.append(address)


def _let_go(start: int, stop: int) -> None:
    """Whole pages between these addresses go; what is beside them is zeros."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        ctypes.memset(start, 0, stop - start)
        return
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    madvise(first, last - first, mmap.MADV_DONTNEED)


def unit_of(slot_bytes: int, least_bytes: int) -> int:
    """Slots that make whole pages and so many bytes at least: a power of two, the fewest that there are."""
    num_slots = mmap.PAGESIZE // gcd(slot_bytes, mmap.PAGESIZE)
    while num_slots * slot_bytes < least_bytes:
        num_slots *= 2
    return num_slots


def _map(nbytes: int, may_grow: bool) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if may_grow and platform.machine() in ("x86_64", "aarch64"):
        flags |= _MAP_NORESERVE  # what is not taken yet is no promise of the kernel's
    try:
        mapping = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"cannot map {nbytes:,} bytes for the CPU pool ({error}); lower "
            f"{'cpu_gib_max' if may_grow else 'cpu_gib'}, or raise the limit on virtual memory (ulimit -v)"
        ) from error
    with suppress(OSError):  # a child that outlives this process would keep the pool
        mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
