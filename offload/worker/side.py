"""The worker's side: copies what a plan says and reports what became of it. Decides nothing."""

import atexit
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from offload.config import AUTO, Verify
from offload.messages import GPU, Fingerprint, JobReport, Order, StepPlan, WorkerReport
from offload.worker.awaited import Awaited, Ended
from offload.worker.cache_pages import CachePages
from offload.worker.copiers.cuda import pci_address, register_host_memory, unregister_host_memory
from offload.worker.failures import FailureLog
from offload.worker.gpu_cache import GpuCache
from offload.worker.lanes import gpu_lanes
from offload.worker.lasting import Lasting
from offload.worker.layout import BlockLayout
from offload.worker.media.base import PoolSlots
from offload.worker.media.lane import MakeLanes, PoolParts
from offload.worker.peers.listener import Listener
from offload.worker.pool.memory import HostMemory
from offload.worker.pool.numa import node_of_pci_device
from offload.worker.pool.region import RegionPlan
from offload.worker.replicas import Replicas, have_pool, size_pool
from offload.worker.resizing import SizeRange, WorkerResizing, make_resizable
from offload.worker.seals import Seals
from offload.worker.seams import Seams as Seams
from offload.worker.transfer import TransferEngine

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0  # vLLM kills a worker that has not left after 5
_AWAY = "the engine sleeps, and its KV cache has no memory"


_still_in_use: list[HostMemory | None] = []
"""Pools that a stuck copy may use until the process ends."""


class WorkerSide:
    """One rank's part of the pool and the copies into and out of it.

    No method raises towards the engine once ``register`` has returned: what goes wrong is the failed end
    of a job. Every restore is reported exactly once, with its unfilled blocks in the same pass. It is
    reported as failed whole if a copy is stuck, because the engine must not compute into blocks that may
    still be written. So it is if a part was cancelled: then the others are of old weights, too. And so it is
    where the engine cannot use a part of it.
    """

    def __init__(
        self,
        cache: GpuCache,
        cpu_bytes: int,
        fingerprint: Fingerprint,
        seams: Seams,
        verify: Verify = Verify.ALWAYS,
        huge_pages: bool | str = AUTO,
        make_lanes: Sequence[MakeLanes] = (),
        replicas: Replicas | None = None,
        region: RegionPlan | None = None,
        listener: Listener | None = None,
        sizes: SizeRange | None = None,
    ) -> None:
        """Size the pool.

        Args:
            cache: this rank's.
            cpu_bytes: this rank's share of the pool.
            fingerprint: this rank's; a plan of a scheduler with another one is not carried out.
            seams: how to copy, among others.
            verify: which blocks are checked when they are loaded.
            huge_pages: whether to ask for huge pages, for the pool and for the KV cache of a CPU engine;
                "auto": for that cache only.
            make_lanes: make the lanes between the pool and places below it.
            replicas: the ranks that hold the same KV as this one, and share the pool with it.
            region: where the pool lies if it outlives the engine.
            listener: shows the pool to peers; None: nobody listens.
            sizes: that the pool may have later; None: it keeps its size.

        Raises:
            ConfigError: the share does not hold the smallest store.
        """
        self._cache = cache
        self._verify = verify
        self._wants_pool_huge = huge_pages is True
        self._wants_cache_huge = huge_pages is not False
        self._make_lanes = make_lanes
        self._seams = seams
        self._replicas = replicas
        self._region = region
        self._listener = listener
        self._sizes = sizes
        self._resizing: WorkerResizing | None = None
        self._lasting: Lasting | None = None
        self._size = partial(size_pool, cpu_bytes, cache.block_bytes, cache.least_slots, fingerprint)
        self.facts = self._size(1 if replicas is None else len(replicas.members))
        self._memory: HostMemory | None = None
        self._engine: TransferEngine | None = None
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._cache_pages: CachePages | None = None
        self._is_away = False  # the cache's memory, while the engine sleeps
        self._computes_here = False  # the engine, on the calling thread: a step has ended at ``begin_step``
        self._awaited = Awaited(is_divisible=cache.is_divisible)
        self._refusal: str | None = None
        self._before: list[Order] = []
        self._behind: list[Order] = []
        self._cancelled: list[int] = []
        self._report = WorkerReport()
        self._failures = FailureLog(seams.clock)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map and pin the pool, next to the GPU if it can be, and learn where the GPU cache lies.

        Where ranks share the pool, this returns when all of them have called it.

        Raises:
            HostMemoryError: the pool cannot be mapped, exceeds a limit on memory, or cannot be pinned.
        """
        device = next(iter(kv_caches.values())).device
        on_gpu, node, huge = device.type == "cuda", _node_of(device), self._wants_pool_huge
        listener = self._listener
        self.facts, sharing = have_pool(
            self._replicas, self._size, node, huge, self._region, is_seen=listener is not None
        )
        if self._sizes is not None and sharing.slots is None:
            unit_slots = self._seams.unit_slots
            make_resizable(self.facts, self._sizes, on_gpu=on_gpu, huge_pages=huge, unit_slots=unit_slots)
        num_slots, slot_bytes = self.facts.most_slots or self.facts.num_slots, self.facts.slot_bytes
        self._memory = HostMemory(
            self.facts.num_slots,
            slot_bytes,
            register=register_host_memory if on_gpu else None,
            unregister=unregister_host_memory if on_gpu else None,
            node=node,
            huge_pages=self._wants_pool_huge,
            shared=sharing.slots,
            most_slots=num_slots,
            unit_slots=self.facts.unit_slots,
        )
        self.facts.memory = self._memory.facts
        self._resizing = WorkerResizing(self._memory, self._seams.make_page_executor, device)
        self._kv_caches = kv_caches
        layout = self._layout(self._memory)
        of_blocks = not on_gpu if self._seams.seals_of_blocks is None else self._seams.seals_of_blocks
        self._computes_here = not on_gpu if self._seams.shares_cores is None else self._seams.shares_cores
        self._lasting = lasting = sharing.lasting
        if lasting is not None:
            lasting.begin(self._seams.make_executor)
        seals = Seals(
            layout,
            num_slots,
            self._verify,
            of_blocks=of_blocks,
            tables=sharing.tables,
            for_others=bool(self._make_lanes) or lasting is not None or listener is not None,
            unproven=None if lasting is None else lasting.unproven(num_slots),
        )
        copier = self._seams.make_copier(device, layout, self._cache.num_blocks, num_slots)
        lanes = gpu_lanes(layout, copier)
        home = None if lasting is None else lasting.home
        parts = PoolParts(PoolSlots(self._memory.address, num_slots, slot_bytes), seals, sharing.share, home)
        for make_lanes in self._make_lanes:
            made = make_lanes(parts)
            lanes += made.lanes
            self.facts.tiers.append(made.facts)
        self._engine = TransferEngine(
            lanes,
            seals,
            clock=self._seams.clock,
            make_executor=self._seams.make_executor,
            landed_at_once=self._seams.landed_at_once,
            share=sharing.share,
        )
        if listener is not None:
            listener.open(sharing, parts.slots, self._seams.make_executor)
        if not on_gpu and self._wants_cache_huge:
            self._cache_pages = CachePages(kv_caches)
        atexit.register(self.close)  # an engine in the caller's process may never be shut down
        num_sharing = sharing.share.num_parts
        logger.info(
            "CPU pool of %d blocks x %d bytes = %.2f GiB for %s",
            *(self.facts.num_slots, slot_bytes, self.facts.num_slots * slot_bytes / 2**30),
            "this rank" if num_sharing == 1 else f"{num_sharing} ranks with the same KV",
        )
        if lasting is not None:
            logger.info("the CPU pool outlives the engine: %s", lasting)

    def unregister(self) -> None:
        """The cache's memory is about to be taken away. Until ``restore`` all orders fail. Idempotent.

        The pool stays as it is, mapped and pinned.

        Raises:
            RuntimeError: a copy is still under way, perhaps one that hangs. Then nothing has changed.
        """
        if self._engine is None or self._is_away:
            return
        self._submit_behind()
        num_left = self._engine.rest(_CLOSE_SECONDS)
        if num_left:
            raise RuntimeError(
                f"{num_left} copies between KV cache and CPU pool have not ended after {_CLOSE_SECONDS:g} s; "
                f"the cache must stay until then. Wake the engine up and try again when the metric "
                f"stuck_jobs is 0; with several ranks, of which others sleep now, restart it"
            )
        self._is_away = True

    def restore(self) -> None:
        """The cache that ``register`` was given has memory again, perhaps at other addresses. Idempotent."""
        if self._engine is None or self._memory is None or not self._is_away:
            return
        self._engine.relocate(self._layout(self._memory))
        self._is_away = False

    def bind(self, plan: StepPlan | None) -> None:
        """A step begins. What this plan fills of the cache waits for what the engine has enqueued, not more.

        What the step before has left is submitted. None: the plan says nothing. Where the engine computes on
        this thread, loads begin here: ``begin_step`` comes only after the compute.
        """
        self._submit_behind()
        self._refusal = None
        self._report.timed = 0 if plan is None else plan.timed
        if plan is None:
            return
        self._cancelled.extend(plan.cancelled)
        if plan.fingerprint != self.facts.fingerprint:
            self._refusal = f"the scheduler is another one: {plan.fingerprint}, not {self.facts.fingerprint}"
            if self._resizing is not None:
                self._resizing.refuse(plan.resizes, self._refusal)
        else:
            if self._lasting is not None:
                self._lasting.keep(plan.kept)
            if self._listener is not None:
                self._listener.tell(plan)
            if self._resizing is not None:
                self._resizing.begin(plan.resizes)
        for order in plan.orders:
            (self._behind if order.route.source == GPU else self._before).append(order)
        self._fence(self._before)
        if self._computes_here:
            self.begin_step()

    def begin_step(self) -> None:
        """Submit what reads nothing that this step computes. Then cancel what is unwanted, of this too."""
        orders, self._before = self._before, []
        cancelled, self._cancelled = self._cancelled, []
        if self._engine is None:
            return
        for order in orders:
            self._submit(self._engine, order)
        for job_id in cancelled:
            self._engine.cancel(job_id)

    def end_step(self) -> None:
        """Submit what copies the engine's blocks, behind the compute that writes them.

        Where that is on this thread, ``bind`` of the next step submits them, to run beside its compute.
        """
        if not self._computes_here:
            self._submit_behind()

    def poll(self) -> Ended:
        """Jobs that ended: restores by request for the engine, all jobs for the next report."""
        ended = Ended(set(), set())
        for end in () if self._engine is None else self._engine.poll():
            sound, is_over = end.error is None or end.is_absent, end.is_over
            moved = JobReport(int(is_over), end.num_good, not is_over, end.seconds, end.nbytes, sound)
            self._report.add(end.job_id, moved._replace(reason=end.reason))
            if not sound:
                self._failures.warn(end)
            self._awaited.end_part(end, ended)
        return ended

    def take_unfilled(self) -> set[int]:
        """GPU blocks of the loads that the last ``poll`` reported which were not filled."""
        return self._awaited.take_unfilled()

    def take_report(self) -> WorkerReport | None:
        """What the scheduler side has not been told yet."""
        if self._listener is not None:
            self._listener.report_into(self._report)
        self._report.resized |= {} if self._resizing is None else self._resizing.take_ended()
        self._report.peers += [] if self._engine is None else self._engine.take_facts()
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def check_invariants(self) -> None:
        """Every restore waits for as many jobs as are known to be its own. For tests."""
        if self._engine is not None:
            self._engine.check_invariants()
        self._awaited.check_invariants()
        both = [part for order in self._behind for part in order.parts if part.job_id in self._report.jobs]
        assert not both, f"{both} have ended, and were never begun"
        assert (self._engine is None) == (self._memory is None), (
            "a pool without copies into it, or the reverse"
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nobody is remembered. For tests."""
        num_jobs = 0 if self._engine is None else len(self._engine)
        return not (num_jobs or self._awaited.num_jobs or self._before or self._behind or self._cancelled)

    def close(self) -> None:
        """Wait for copies in flight, then unpin and unmap. Calling it again does nothing.

        Memory that a stuck copy or resize may still use is left to the end of the process.
        """
        atexit.unregister(self.close)
        if self._cache_pages is not None:
            self._cache_pages.close()
        resizing, self._resizing = self._resizing, None
        is_resized = resizing is None or resizing.close(_CLOSE_SECONDS / 2)
        engine, self._engine = self._engine, None
        memory, self._memory = self._memory, None
        self._kv_caches = {}
        lasting, self._lasting = self._lasting, None
        if lasting is not None:
            lasting.rest()
        is_seen = self._listener is not None and not self._listener.close(_CLOSE_SECONDS)
        if engine is not None and (not engine.close(_CLOSE_SECONDS) or is_seen or not is_resized):
            _still_in_use.append(memory)
            logger.warning(
                "copies or resizes have not ended after %g s; the CPU pool stays mapped", _CLOSE_SECONDS
            )
        elif memory is not None:
            memory.close()
            if lasting is not None:
                lasting.close()

    def _submit_behind(self) -> None:
        orders, self._behind = self._behind, []
        if self._engine is None or not orders:
            return
        self._fence(orders)
        for order in orders:
            self._submit(self._engine, order)

    def _layout(self, memory: HostMemory) -> BlockLayout:
        """The layout of the pool, and of the cache where it lies now."""
        return BlockLayout(
            self._cache.regions(self._kv_caches),
            memory.address,
            slots_per_registration=memory.slots_per_registration,
        )

    def _fence(self, orders: Iterable[Order]) -> None:
        if self._engine is None or self._is_away or self._refusal is not None:
            return
        for route in {order.route for order in orders if GPU in (order.route.source, order.route.target)}:
            self._engine.fence(route)

    def _submit(self, engine: TransferEngine, order: Order) -> None:
        """Each part of the order is a job."""
        refusal = _AWAY if self._is_away else self._refusal
        self._awaited.begin(order)
        for job_id, start, stop in order.parts:
            part = slice(start, stop)
            if refusal is not None:
                engine.refuse(job_id, order.route, order.targets[part], refusal)
                continue
            fills = None if order.fills is None else order.fills[part]
            extents = None if order.extents is None else order.extents.part(start, stop)
            sources, targets = order.sources[part], order.targets[part]
            engine.submit(job_id, order.route, sources, targets, fills, extents, order.is_urgent)


def _node_of(device: torch.device) -> int | None:
    """The NUMA node next to the device, if it has one that is known."""
    address = pci_address(device) if device.type == "cuda" else None
    return None if address is None else node_of_pci_device(address)
