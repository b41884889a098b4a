"""The KV cache of an engine that computes on CPUs comes to lie on huge pages."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from offload.worker.pool.syscalls import madvise

logger = logging.getLogger(__name__)

HUGE_BYTES = 2 << 20
"""Of a huge page on x86-64, and on aarch64 with small pages of 4 KiB."""
_MADV_COLLAPSE = 25  # Linux 6.1; not in Python's mmap module
_LEAST_URGENT = 19  # nice
_TRY_ANOTHER = (errno.ENOMEM, errno.EAGAIN, errno.EBUSY)
"""What the kernel says of a piece that it cannot do now, while others may do well."""


class CachePages:
    """Turns the small pages of a cache into huge ones, which hold the same bytes, beside the engine's start.

    Compute and copies both read the cache from end to end, and have fewer page tables to walk then. vLLM has
    written all of it before, to fill it with zeros. So it takes no more memory than it did. It is a wish:
    where the kernel does not grant it, all goes on as before.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        """Begin with spans of memory, each ``(address, bytes)``; of each, what fills huge pages."""
        self._pieces = [
            piece
            for address, nbytes in spans
            for piece in range(-(-address // HUGE_BYTES) * HUGE_BYTES, address + nbytes, HUGE_BYTES)
            if piece + HUGE_BYTES <= address + nbytes
        ]
        self.num_huge = 0
        """Pieces that are huge pages now."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if self._pieces:
            self._thread = threading.Thread(target=self._run, name="kv-offload-cache-pages", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, kv_caches: Mapping[str, torch.Tensor]) -> "CachePages":
        """Of the memory that these lie in. It has to stay until ``close``."""
        storages = [cache.untyped_storage() for cache in kv_caches.values()]
        return cls({storage.data_ptr(): storage.nbytes() for storage in storages}.items())

    def close(self, seconds: float) -> bool:
        """Begin with no more of them. Returns whether that has ended in time."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def check_invariants(self) -> None:
        """No more are huge than there are."""
        assert 0 <= self.num_huge <= len(self._pieces), f"{self.num_huge} of {len(self._pieces)}"

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
        for address in self._pieces:
            if self._is_closed:
                return
            try:
                madvise(address, HUGE_BYTES, mmap.MADV_HUGEPAGE)  # that it stays one
                madvise(address, HUGE_BYTES, _MADV_COLLAPSE)
                self.num_huge += 1
            except OSError as error:
                if error.errno not in _TRY_ANOTHER:
                    logger.info("the KV cache lies on small pages: %s", error)
                    return
        logger.info(
            "%.3g of %.3g GiB of the KV cache lie on huge pages",
            *(num * HUGE_BYTES / 2**30 for num in (self.num_huge, len(self._pieces))),
        )
