"""Takes the pages of a fresh mapping: of the kind, on the node and with the threads that suit the pool."""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from offload.errors import HostMemoryError
from offload.worker.cpus import stay_on
from offload.worker.pool.host_limits import ASK_FOR_LESS, LOWER, check_room
from offload.worker.pool.numa import cpus_of_node, share_elsewhere
from offload.worker.pool.syscalls import madvise, prefer_node

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module
_PIECE_BYTES = 64 << 20
_MOST_THREADS = 8
_TOLERATED_ELSEWHERE = 0.01
THP_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED_THP_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def take_pages(
    address: int,
    nbytes: int,
    *,
    node: int | None = None,
    huge_pages: bool = False,
    is_shared: bool = False,
    is_taken: bool = False,
) -> None:
    """Have every page of a mapping in memory when this returns: a first touch later would slow down stores.

    Up to 8 threads take pieces of 64 MiB. Each piece is held against the limits on memory first, because
    ranks take their shares at the same time and see the same free memory. Kind and node of the pages are
    wishes: if the kernel does not grant them, a warning says so.

    Args:
        address: start of the mapping, on a page.
        nbytes: its length.
        node: the NUMA node its pages should lie on; None for wherever the kernel puts them.
        huge_pages: whether to ask for transparent huge pages.
        is_shared: whether other processes map it, too.
        is_taken: all pages are in memory, and this process has yet to map them.

    Raises:
        HostMemoryError: there is not so much memory. The mapping is the caller's to undo.
    """
    if not is_taken:
        check_room(nbytes)
    refusal = prefer(address, nbytes, node=node, huge_pages=huge_pages, is_shared=is_shared)
    own_cpus = os.sched_getaffinity(0)
    cpus = own_cpus if node is None else (cpus_of_node(node) & own_cpus or own_cpus)

    def take(offset: int) -> None:
        size = min(_PIECE_BYTES, nbytes - offset)
        if not is_taken:
            check_room(size)
        _touch(address + offset, size, LOWER)

    # Zeroing is local then; and where mbind is refused, as by Docker's seccomp profile, the kernel's default
    # puts a page on the node of the CPU that touches it first.
    stay = partial(stay_on, cpus)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(cpus)), "kv-offload-pages", initializer=stay) as threads:
        for _ in threads.map(take, range(0, nbytes, _PIECE_BYTES)):
            pass
    if node is not None:
        _tell_node(address, node, refusal)


def prefer(
    address: int, nbytes: int, *, node: int | None, huge_pages: bool, is_shared: bool = False
) -> OSError | None:
    """Say what the kernel should take for pages there: of that node first, and huge ones. No page is touched.

    Returns why it does not hear of a node; None: it does, or there is none to prefer.
    """
    if huge_pages:
        _ask_for_huge_pages(address, nbytes, is_shared)
    return None if node is None else _ask_for_node(address, nbytes, node)


def take_more_pages(runs: Sequence[tuple[int, int]]) -> None:
    """Have pages of runs of a mapping in memory, each ``(address, bytes)``, beside an engine that works.

    On this thread, and wherever the kernel puts them. Pieces are held against the limits as ever.

    Raises:
        HostMemoryError: there is not so much memory. Some of them may have it.
    """
    num_left = sum(nbytes for _, nbytes in runs)
    ahead = 0  # bytes that there was room for
    for start, nbytes in runs:
        for address in range(start, start + nbytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, start + nbytes - address)
            if size > ahead:
                ahead = min(_PIECE_BYTES, num_left)
                check_room(ahead, instead=ASK_FOR_LESS)
            ahead -= size
            num_left -= size
            _touch(address, size, ASK_FOR_LESS)


def _touch(address: int, nbytes: int, instead: str) -> None:
    try:
        madvise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise HostMemoryError(
                f"cannot get {nbytes:,} bytes more of memory for the CPU pool ({error}); {instead}, or "
                f"raise the container's memory limit"
            ) from error
        ctypes.memset(address, 0, nbytes)  # Linux before 5.14


def _ask_for_huge_pages(address: int, nbytes: int, is_shared: bool) -> None:
    switch, ours = (_SHARED_THP_SWITCH, "advise") if is_shared else (THP_SWITCH, "madvise")
    reason = None
    try:
        madvise(address, nbytes, mmap.MADV_HUGEPAGE)
        if "[never]" in switch.read_text():
            reason = f"they are off; as root: echo {ours} > {switch}"
    except OSError as error:
        reason = str(error)
    if reason is not None:
        logger.warning("the CPU pool is not given huge pages: %s", reason)


def _ask_for_node(address: int, nbytes: int, node: int) -> OSError | None:
    """Ask for pages of ``node`` first. If of it alone, a pool larger than it would be killed, not refused."""
    try:
        prefer_node(address, nbytes, node)
    except OSError as error:
        return error
    return None


def _tell_node(address: int, node: int, refusal: OSError | None) -> None:
    """Warn if pages lie elsewhere, or if nobody knows."""
    elsewhere = share_elsewhere(address, node)
    if elsewhere is None and refusal is not None:
        logger.warning(
            "the CPU pool may not lie on NUMA node %d, its GPU's, and copies be slower: %s; a container "
            "needs --cap-add SYS_NICE for that",
            node,
            refusal,
        )
    elif elsewhere is not None and elsewhere > _TOLERATED_ELSEWHERE:
        logger.warning(
            "%.0f%% of the CPU pool lies on other NUMA nodes than %d, its GPU's, and copies of that part are "
            "slower: %s; lower cpu_gib, free memory of that node%s",
            elsewhere * 100,
            node,
            refusal or "it has no more memory",
            ", or give the container --cap-add SYS_NICE" if refusal is not None else "",
        )
