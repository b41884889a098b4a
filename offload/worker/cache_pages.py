"""The KV cache of an engine that computes on CPUs comes to lie on huge pages."""

import errno
import logging
import mmap
import threading
import time
from collections.abc import Mapping

import torch

from offload.worker.pool.pages import THP_SWITCH
from offload.worker.pool.syscalls import madvise

logger = logging.getLogger(__name__)

HUGE_BYTES = 2 << 20
"""Of a huge page where small ones have 4 KiB. Others have larger ones, and no use for this."""
_SMALL_BYTES = 4 << 10
_MADV_COLLAPSE = 25  # Linux 6.1; not in Python's mmap module
_MOST_REFUSALS = 16
"""In a row, before no more is asked for. Each may have cost a search for memory."""


class CachePages:
    """Converts the small pages of a cache into huge ones, which hold the same bytes, while the engine runs.

    Compute and copies both read the cache from end to end, and have fewer page tables to walk then. vLLM has
    written all of it before, to fill it with zeros. So it takes no more memory, but for the piece that is
    converted. It is a wish: where the kernel does not grant it, all goes on as before.

    The kernel lets nobody map memory in this process while it moves a piece. So each is followed by a rest.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Start to convert every whole piece that these lie in. They stay until no piece is under way.

        None is converted where the administrator has turned huge pages off.
        """
        storages = [cache.untyped_storage() for cache in kv_caches.values()]
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._pieces = [
            piece
            for address, storage in (self._storages.items() if _are_possible() else ())
            for piece in range(-(-address // HUGE_BYTES) * HUGE_BYTES, address + storage.nbytes(), HUGE_BYTES)
            if piece + HUGE_BYTES <= address + storage.nbytes()
        ]
        self.num_huge = 0
        """Pieces that are huge pages now."""
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._pieces:
            self._thread = threading.Thread(target=self._run, name="kv-offload-cache-pages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Convert no further piece. Does not wait for the one under way."""
        self._is_closed.set()

    def check_invariants(self) -> None:
        """``num_huge`` is at most the number of pieces."""
        assert 0 <= self.num_huge <= len(self._pieces), f"{self.num_huge} of {len(self._pieces)}"

    def _run(self) -> None:
        num_refused, refusal = 0, ""
        for address in self._pieces:
            began = time.monotonic()
            try:
                madvise(address, HUGE_BYTES, mmap.MADV_HUGEPAGE)  # and makes it again if it is split
                madvise(address, HUGE_BYTES, _MADV_COLLAPSE)
                self.num_huge += 1
                num_refused = 0
            except OSError as error:
                num_refused, refusal = num_refused + 1, f"; the last refusal: {error}"
                is_unknown = error.errno == errno.EINVAL and not self.num_huge
                if is_unknown:
                    refusal += "; it takes Linux 6.1 or later, with transparent huge pages"
                if is_unknown or num_refused == _MOST_REFUSALS:
                    break
            if self._is_closed.wait(time.monotonic() - began):
                break
        self._storages.clear()
        sizes = (num * HUGE_BYTES / 2**30 for num in (self.num_huge, len(self._pieces)))
        logger.info("%.3g of %.3g GiB of the KV cache lies on huge pages%s", *sizes, refusal)


def _are_possible() -> bool:
    try:
        return mmap.PAGESIZE == _SMALL_BYTES and "[never]" not in THP_SWITCH.read_text()
    except OSError:  # this kernel has none
        return False
