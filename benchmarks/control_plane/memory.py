"""Memory of the scheduler's process per resident block, and whether a long churn makes it grow."""

from __future__ import annotations

import ctypes
import gc
import random
from pathlib import Path
from typing import Any

from allocator import serve
from benchmarks.common.prompts import fresh_hashes
from benchmarks.control_plane.prompts import PromptEngine
from benchmarks.control_plane.sizes import BLOCK_TOKENS
from offload.config import DEFAULT_POLICY

__all__ = ["MemoryEngine"]

_CHAIN_BLOCKS = 1024
"""Of a chain that is stored in the churn."""


class MemoryEngine:
    """Fills a pool of ``num_blocks`` slots to the last one and looks at the process.

    The eviction policy is the default one, with the history it keeps. A small engine comes first, so that
    modules imported late, caches and the like are not counted. The worker side, which lives in the same
    process here, is gone with its pool before memory is read.
    """

    def __init__(self, connector: str, num_blocks: int) -> None:
        self._warm_up = PromptEngine(connector, BLOCK_TOKENS, 4096, DEFAULT_POLICY)
        self._warm_up.fill(4096)
        self._warm_up.engine.drop_worker()
        self._before = _resident_bytes()
        self._subject = PromptEngine(connector, BLOCK_TOKENS, num_blocks, DEFAULT_POLICY)
        self._subject.fill(num_blocks)
        self._subject.engine.drop_worker()

    def grown_by(self) -> int:
        """Bytes of the process that belong to the pool's bookkeeping."""
        return _resident_bytes() - self._before

    def churn(self, num_blocks: int, seed: str) -> None:
        """Ask for that many more blocks, which evict others or are kept out, as the policy likes.

        Only for our connector, without an engine around.
        """
        allocator: Any = self._subject.engine.connector._scheduler.allocator
        rng = random.Random(seed)
        for _ in range(0, num_blocks, _CHAIN_BLOCKS):
            hashes = fresh_hashes(rng, _CHAIN_BLOCKS)
            serve(allocator, hashes)

    def close(self) -> None:
        """Release both engines."""
        for each in (self._warm_up, self._subject):
            each.close()


def _resident_bytes() -> int:
    """Anonymous memory of this process that is resident, after everything that can be freed is freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
