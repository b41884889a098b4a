"""The worker's side: copies what a plan says and reports what became of it. Decides nothing."""

import atexit
import logging
import time
from collections.abc import Callable, Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.copiers import Copier, CpuCopier, CudaCopier, Direction
from offload.copiers.cuda import register_host_memory, unregister_host_memory
from offload.errors import ConfigError
from offload.layout import BlockLayout
from offload.memory import HostMemory
from offload.transfer import CANCELLED, TransferEnd, TransferEngine
from offload.vllm.messages import JobReport, LoadOrder, StepPlan, StoreOrder, WorkerFacts, WorkerReport
from offload.vllm.regions import block_bytes, block_regions, cache_address

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 10.0


class WorkerSide:
    """One rank's part of the pool and the copies into and out of it.

    No method raises towards the engine once ``register`` has returned: what goes wrong is the failed end
    of a job. Every load is reported exactly once, with its unfilled blocks in the same pass.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        cpu_bytes: int,
        make_copier: Callable[[torch.device], Copier] | None = None,
    ) -> None:
        """Size the pool.

        Args:
            kv_cache_config: this rank's.
            cpu_bytes: this rank's share of the pool.
            make_copier: for tests; by default the one for the device the cache lies on.

        Raises:
            ConfigError: the share does not hold one block.
        """
        self._kv_cache_config = kv_cache_config
        self._make_copier = make_copier or _copier_for
        slot_bytes = block_bytes(kv_cache_config)
        self.facts = WorkerFacts(cpu_bytes // slot_bytes, slot_bytes)
        if not self.facts.num_slots:
            raise ConfigError(
                f"cpu_gib leaves {cpu_bytes:,} bytes for each rank, but one block takes {slot_bytes:,}; "
                f"raise cpu_gib"
            )
        self._memory: HostMemory | None = None
        self._engine: TransferEngine | None = None
        self._loading: dict[int, str] = {}
        self._loads: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._report = WorkerReport()
        self._unfilled: set[int] = set()
        self._num_unlogged = 0
        self._quiet_until = 0.0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map and pin the pool and learn where the GPU cache lies.

        Raises:
            HostMemoryError: the pool cannot be mapped or pinned.
        """
        device = next(iter(kv_caches.values())).device
        on_gpu = device.type == "cuda"
        num_slots, slot_bytes = self.facts.num_slots, self.facts.slot_bytes
        self._memory = HostMemory(
            num_slots,
            slot_bytes,
            register=register_host_memory if on_gpu else None,
            unregister=unregister_host_memory if on_gpu else None,
        )
        regions = block_regions(self._kv_cache_config, cache_address(kv_caches, self._kv_cache_config))
        layout = BlockLayout(
            regions, self._memory.address, slots_per_registration=self._memory.slots_per_registration
        )
        self._engine = TransferEngine(layout, self._make_copier(device))
        atexit.register(self.close)  # an engine in the caller's process may never be shut down
        logger.info(
            "CPU pool of %d blocks x %d bytes = %.2f GiB for this rank",
            num_slots,
            slot_bytes,
            self._memory.nbytes / 2**30,
        )

    def bind(self, plan: StepPlan) -> None:
        """A step begins. Loads of this plan wait for what the engine has enqueued up to here, not more."""
        self._loads.extend(plan.loads)
        self._stores.extend(plan.stores)
        if self._engine is None:
            return
        for job_id in plan.cancelled:
            self._engine.cancel(job_id)
        if plan.loads:
            self._engine.fence(Direction.LOAD)

    def start_loads(self) -> None:
        """Submit this step's loads."""
        orders, self._loads = self._loads, []
        if self._engine is None:
            return
        for order in orders:
            self._loading[order.job_id] = order.request_id
            self._engine.load(order.job_id, order.slots, order.block_ids)

    def start_stores(self) -> None:
        """Submit this step's stores, behind the compute that writes their source."""
        orders, self._stores = self._stores, []
        if self._engine is None or not orders:
            return
        self._engine.fence(Direction.STORE)
        for order in orders:
            self._engine.store(order.job_id, order.block_ids, order.slots)

    def poll(self) -> KVConnectorTransferResults:
        """Jobs that ended: loads by request for the engine, all of them for the next report."""
        results = KVConnectorTransferResults()
        for end in self._engine.poll() if self._engine else ():
            self._report.jobs[end.job_id] = JobReport(1, end.num_blocks)
            if end.error is not None:
                self._warn(end)
            if end.direction is Direction.LOAD:
                self._end_load(end, results)
        return results

    def take_unfilled(self) -> set[int]:
        """GPU blocks of the loads that the last ``poll`` reported which were not filled."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def take_report(self) -> WorkerReport | None:
        """What the scheduler side has not been told yet."""
        if not self._report.jobs:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Wait for copies in flight, then unpin and unmap. Calling it again does nothing."""
        atexit.unregister(self.close)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _warn(self, end: TransferEnd) -> None:
        """Log a failed copy; while copies keep failing, one in so many seconds."""
        self._num_unlogged += 1
        if end.error != CANCELLED and time.monotonic() >= self._quiet_until:
            logger.warning(
                "%s of %d blocks failed (%d since the last such line): %s",
                end.direction.value,
                len(end.block_ids),
                self._num_unlogged,
                end.error,
            )
            self._num_unlogged = 0
            self._quiet_until = time.monotonic() + _QUIET_SECONDS

    def _end_load(self, end: TransferEnd, results: KVConnectorTransferResults) -> None:
        results.finished_recving.add(self._loading.pop(end.job_id))
        self._unfilled.update(end.block_ids[end.num_blocks :].tolist())


def _copier_for(device: torch.device) -> Copier:
    if device.type == "cuda":
        from vllm import _custom_ops

        return CudaCopier(device, _custom_ops.swap_blocks_batch)
    return CpuCopier()
