"""The pool's memory: one mapping of exactly the size asked for."""

import logging
import mmap
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from math import gcd

import numpy as np

from offload.errors import HostMemoryError
from offload.messages import MemoryFacts
from offload.worker.pool.pages import take_pages
from offload.worker.pool.segment import machine

logger = logging.getLogger(__name__)

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

        Raises:
            HostMemoryError: the memory cannot be mapped, exceeds a limit, or cannot be pinned.
        """
        self.nbytes = num_slots * slot_bytes
        self._unregister = unregister
        self._registered: list[int] = []
        self._pid = os.getpid()
        self._node = node
        self._map = _map(self.nbytes) if shared is None else shared
        self._bytes: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes)
        self.address = self._bytes.ctypes.data
        pages_unit = mmap.PAGESIZE // gcd(slot_bytes, mmap.PAGESIZE)
        units = max(1, max_registration_bytes // (pages_unit * slot_bytes))
        self.slots_per_registration = min(units * pages_unit, num_slots)
        try:
            if shared is None:
                take_pages(self.address, self.nbytes, node=node, huge_pages=huge_pages)
            if register is not None:
                self._register(register, self.slots_per_registration * slot_bytes)
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

    def _register(self, register: Callable[[int, int], None], piece_bytes: int) -> None:
        """Pin piece by piece. A control group cannot be what refuses: the pages are counted there already."""
        for offset in range(0, self.nbytes, piece_bytes):
            address = self.address + offset
            try:
                register(address, min(piece_bytes, self.nbytes - offset))
            except OSError as error:
                raise HostMemoryError(
                    f"cannot pin {self.nbytes:,} bytes for the CPU pool ({error}; the limit on locked memory "
                    f"is {_memlock_limit()}); lower cpu_gib, or allow the process to lock more: "
                    f"ulimit -l unlimited, in a container --ulimit memlock=-1, in a systemd unit "
                    f"LimitMEMLOCK=infinity"
                ) from error
            self._registered.append(address)


def _map(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"cannot map {nbytes:,} bytes for the CPU pool ({error}); lower cpu_gib, or raise the limit on "
            f"virtual memory (ulimit -v)"
        ) from error
    with suppress(OSError):  # a child that outlives this process would keep the pool
        mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
