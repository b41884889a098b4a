"""vLLM's SimpleCPUOffloadConnector on a virtual link: its own worker, without CUDA streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from offload.messages import LOAD, STORE
from offload.testing.copiers.paced import Link


class _VirtualEvent:
    """Stands for a CUDA event that is recorded behind a copy."""

    def __init__(self, link: Link, end: float) -> None:
        self._link = link
        self.end = end

    def query(self) -> bool:
        return self._link.clock.now >= self.end

    def synchronize(self) -> None:
        self._link.clock.wait_until(self.end)


class VirtualSimpleWorker(SimpleCPUOffloadWorker):
    """Keeps all of vLLM's worker but its streams: polls, reports and flushes are vLLM's own.

    Made of an existing worker; ``block_bytes`` go over the link for each block.
    """

    def __init__(self, worker: SimpleCPUOffloadWorker, link: Link, block_bytes: float) -> None:
        self.__dict__.update(worker.__dict__)
        self._backend: Any = self
        self._link = link
        self._block_bytes = block_bytes

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """There are no bytes to find."""

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                is_store=True,
                event_idx=metadata.store_event,
                events_list=self._store_events,
            )

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
    ) -> None:
        """What vLLM's worker asks of its copy backend."""
        direction = STORE if is_store else LOAD
        end = self._link.book(direction, len(src_blocks) * self._block_bytes)
        events_list.append((event_idx, _VirtualEvent(self._link, end)))

    @property
    def next_end(self) -> float | None:
        """When the next copy ends; None if there is none."""
        now = self._link.clock.now
        events = [event for _, event in (*self._load_events, *self._store_events)]
        return min((event.end for event in events if event.end > now), default=None)
