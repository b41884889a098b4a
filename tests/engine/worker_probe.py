"""What tests do inside a worker, through vLLM's ``worker_extension_cls``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from offload.copiers import CopyEnd, Direction
from offload.copiers.faulty import Fault, FaultyCopier
from offload.layout import Ids


class WorkerProbe:
    """Methods for ``collective_rpc``; mixed into vLLM's worker class."""

    def corrupt_next_load(self, position: int) -> None:
        """Before the next load starts, the slot of its block ``position`` gets another block's bytes."""
        side = _worker_side()

        def corrupt(slots: Ids) -> Ids:
            pool = side._memory._bytes.reshape(-1, side.facts.slot_bytes)
            pool[slots[position]] = pool[slots[position - 1]]
            return slots

        _change_next_load(corrupt)

    def swap_in_next_load(self, position: int, other: int) -> None:
        """The next load fills these two of its blocks from each other's slots."""

        def swap(slots: Ids) -> Ids:
            order = np.arange(len(slots))
            order[[position, other]] = other, position
            return slots[order]

        _change_next_load(swap)

    def fail_next(self, direction: str, fault: str) -> None:
        """The next job of that direction ends as ``Fault`` says, by their names."""
        faults = {Direction[direction]: Fault[fault]}
        _faulty_copier()._choose = lambda job_id, way: faults.pop(way, Fault.NONE)

    def hold_ends(self, holding: bool) -> None:
        """While True, no copy ends as far as the engine can tell."""
        _faulty_copier().holding = holding

    def hold_ends_for(self, num_polls: int) -> None:
        """No copy ends in the next so many steps."""
        copier = _faulty_copier()
        poll, held = copier.poll, iter(range(num_polls))

        def poll_later() -> list[CopyEnd]:
            copier.holding = next(held, None) is not None
            return poll()

        copier.poll = poll_later  # type: ignore[method-assign]

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """The KV bytes of GPU blocks, all layers, read without help from the connector."""
        caches = self.model_runner.kv_caches  # type: ignore[attr-defined]
        num_blocks = self.cache_config.num_gpu_blocks  # type: ignore[attr-defined]
        planes = [cache.unflatten(0, (num_blocks, -1)) for cache in caches]
        return [
            b"".join(plane[block].contiguous().cpu().view(torch.uint8).numpy().tobytes() for plane in planes)
            for block in block_ids
        ]

    def read_slots(self, slots: list[int]) -> list[bytes]:
        """The bytes of slots of the pool."""
        side = _worker_side()
        pool = side._memory._bytes.reshape(-1, side.facts.slot_bytes)
        return [pool[slot].tobytes() for slot in slots]


def _worker_side() -> Any:
    return get_kv_transfer_group()._worker


def _change_next_load(change: Callable[[Ids], Ids]) -> None:
    """Let ``change`` see the slots of the next load, and give others."""
    engine = _worker_side()._engine
    load = engine.load

    def changed(job_id: int, slots: Ids, block_ids: Ids) -> None:
        engine.load = load
        load(job_id, change(slots), block_ids)

    engine.load = changed


def _faulty_copier() -> FaultyCopier:
    """The engine's copier, which misbehaves from the first call of this on, when told to."""
    engine = _worker_side()._engine
    if not isinstance(engine._copier, FaultyCopier):
        engine._copier = FaultyCopier(engine._copier)
    return engine._copier
