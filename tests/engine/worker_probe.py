"""What tests do inside a worker, through vLLM's ``worker_extension_cls``."""

from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group


class WorkerProbe:
    """Methods for ``collective_rpc``; mixed into vLLM's worker class."""

    def corrupt_next_load(self, position: int) -> None:
        """Before the next load starts, the slot of its block ``position`` gets the bytes of another."""
        side = _worker_side()

        def spoil(slots: Any) -> Any:
            size = side.facts.slot_bytes
            pool = side._memory._bytes.reshape(-1, size)
            pool[slots[position]] = pool[slots[position - 1]]
            return slots

        _change_next_load(side._engine, spoil)

    def swap_in_next_load(self, position: int, other: int) -> None:
        """The next load fills these two of its blocks from each other's slots."""

        def swap(slots: Any) -> Any:
            order = np.arange(len(slots))
            order[[position, other]] = other, position
            return slots[order]

        _change_next_load(_worker_side()._engine, swap)

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """The KV bytes of GPU blocks, all layers, read without help from the connector."""
        caches = self.model_runner.kv_caches  # type: ignore[attr-defined]
        num_blocks = self.cache_config.num_gpu_blocks  # type: ignore[attr-defined]
        planes = [cache.unflatten(0, (num_blocks, -1)) for cache in caches]
        return [
            b"".join(plane[block].contiguous().cpu().view(torch.uint8).numpy().tobytes() for plane in planes)
            for block in block_ids
        ]


def _worker_side() -> Any:
    return get_kv_transfer_group()._worker


def _change_next_load(engine: Any, change: Any) -> None:
    """Let ``change`` see the slots of the next load, and give others."""
    load = engine.load

    def changed(job_id: int, slots: Any, block_ids: Any) -> None:
        engine.load = load
        load(job_id, change(slots), block_ids)

    engine.load = changed
