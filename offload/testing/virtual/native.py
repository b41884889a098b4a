"""vLLM's own OffloadingConnector in a virtual engine: its scheduler, manager and worker, our seeded copies.

vLLM's ``CPUOffloadingSpec`` copies with CUDA streams. The spec below keeps all of it but the copies, through
the connector's hook for specs from outside vLLM (``spec_name`` and ``spec_module_path``). One block per
chunk.
"""

from typing import Any

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from offload.messages import LOAD, STORE, Ids
from offload.testing.copiers.seeded import SeededCopier
from offload.worker.layout import BlockLayout, Region


class VirtualNativeSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading spec on a seeded copier, which ``use_copier`` has to bring."""

    BLOCK_SIZE_ALIGNMENT = 1
    """vLLM rounds blocks up to whole memory pages; those of a virtual engine are a few bytes."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk={self.blocks_per_chunk}: must be 1 in a virtual engine")
        self.copier: SeededCopier | None = None

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.copier is not None, "a rank registers its cache after use_copier"
        return SeededWorker(kv_caches, self.num_chunks, self.copier)


class SeededWorker(OffloadingWorker):
    """The seam below vLLM's connector, on one rank: what it submits goes to the copier as it is.

    A slot takes all bytes of a block, whatever group has it.

    Args:
        kv_caches: the rank's cache, as vLLM describes it.
        num_slots: size of the pool in blocks.
        copier: makes the copies; each ``get_finished`` is one poll.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, num_slots: int, copier: SeededCopier) -> None:
        tensors = [each.tensor for each in kv_caches.tensors]
        regions = [
            Region(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), each.page_size_bytes)
            for tensor, each in zip(tensors, kv_caches.tensors, strict=True)
        ]
        slot_bytes = sum(region.piece_bytes for region in regions)
        self._pool = torch.zeros(num_slots * slot_bytes, dtype=torch.uint8)
        self._cache = tensors  # keeps the addresses alive
        self._layout = BlockLayout(regions, self._pool.data_ptr())
        self._copier = copier
        self._in_flight: set[int] = set()

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._in_flight.add(job_id)
        self._copier.fence(STORE)
        batch = self._layout.store(_ids(src_spec), _ids(dst_spec))
        self._copier.submit(job_id, STORE, batch)
        return True

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._in_flight.add(job_id)
        self._copier.fence(LOAD)
        batch = self._layout.load(_ids(src_spec), _ids(dst_spec))
        self._copier.submit(job_id, LOAD, batch)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        ends = self._copier.poll()
        self._in_flight.difference_update(end.job_id for end in ends)
        return [TransferResult(end.job_id, end.error is None) for end in ends]

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._copier.hurry(job_ids)

    @override
    def shutdown(self) -> None:
        self._copier.close(seconds=1.0)

    @property
    def in_flight(self) -> frozenset[int]:
        """Jobs submitted and not reported."""
        return frozenset(self._in_flight)


def use_copier(connector: Any, copier: SeededCopier) -> None:
    """Let a native connector of worker role copy with ``copier``; call before it is given its cache."""
    connector.connector_worker.spec.copier = copier


def worker_jobs(connector: Any) -> list[int]:
    """Jobs that a native connector of worker role has not reported yet."""
    side = connector.connector_worker
    return [*(job_id for job_id, _, _ in side._unsubmitted_store_jobs), *side.worker.in_flight]


def scheduler_jobs(connector: Any) -> list[Any]:
    """Jobs that a native connector of scheduler role waits for."""
    return list(connector.connector_scheduler._jobs.values())


def _ids(spec: Any) -> Ids:
    """Blocks or slots that one side of a transfer names."""
    ids: Ids = spec.block_ids.astype("int64")
    return ids
