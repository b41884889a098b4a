"""The connector as vLLM sees it: each hook forwarded to the side it belongs to.

--kv-transfer-config '{"kv_connector": "CpuOffloadConnector", "kv_role": "kv_both",
                       "kv_connector_extra_config": {"cpu_gib": 8}}'
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.platforms import current_platform
from vllm.v1.outputs import KVConnectorOutput

from offload.errors import UnsupportedError
from offload.messages import PoolFacts, TierFacts, WorkerFacts, WorkerReport
from offload.scheduler.common import Compute
from offload.scheduler.quiet import QuietSide
from offload.scheduler.side import SchedulerSide
from offload.scheduler.weights import Weights
from offload.vllm.copy_paths import make_copier
from offload.vllm.engine import VllmEngine, drafts_of
from offload.vllm.fingerprint import check_fingerprint, take_fingerprint
from offload.vllm.groups import event_groups, groups_of
from offload.vllm.hand_offs import listener_of, owes_delivery, peer_of, told_of
from offload.vllm.kv_events import KvEvents
from offload.vllm.lasting_pool import region_plan
from offload.vllm.layer_hooks import NoLayerHooks
from offload.vllm.operator import Operator
from offload.vllm.peers import engine_places
from offload.vllm.places import PLACES
from offload.vllm.pool_size import PoolSize
from offload.vllm.regions import VllmCache
from offload.vllm.replicas import join_replicas, replica_shape
from offload.vllm.resizing import range_of, sizes_of, target_of, watch_of
from offload.vllm.stats import OffloadPromMetrics, OffloadStats
from offload.vllm.support import check_cache_groups, check_engine
from offload.vllm.tiers import tier_places
from offload.vllm.versions import warn_if_certified
from offload.vllm.wire import NOTHING, FactsEnvelope, PlanEnvelope, ReportEnvelope
from offload.worker.cpus import beside_compute
from offload.worker.pool.pressure import PressureWatch
from offload.worker.side import Seams, WorkerSide

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not tell sources apart
    _HIT_SOURCE = None
else:
    _HIT_SOURCE = CacheHitSource.HOST

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class CpuOffloadConnector(NoLayerHooks, KVConnectorBase_V1, SupportsHMA):
    """A CPU tier below vLLM's prefix cache. One object in the scheduler, one in each worker."""

    _cache_hit_source = _HIT_SOURCE
    seams = Seams(make_copier)
    places = PLACES
    join_replicas = staticmethod(join_replicas)
    engine_places = staticmethod(engine_places)
    make_listener = staticmethod(listener_of)
    make_operator: Callable[..., Operator | None] = Operator
    """They are of connectors that are made from now on; the testing kit has others, and no operator."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Raises ConfigError or UnsupportedError for what this release cannot serve right."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._facts: list[WorkerFacts] = []
        self._pool_size: PoolSize | None = None
        self._tiers: list[list[TierFacts | None]] = []  # of each rank
        self._kept: list[PoolFacts] = []  # the same
        self._has_told = False
        self._operator: Operator | None = None
        self._watch: PressureWatch | None = None
        self._weights = Weights()
        config = check_engine(vllm_config)
        if config is None:
            raise UnsupportedError(
                "CpuOffloadConnector was made without kv_transfer_config naming it; name it there"
            )
        check_cache_groups(kv_cache_config)
        self._config = config
        self._target = target_of(config)
        self._seams = self.seams
        self._places = [
            *self.places,
            *self.engine_places(vllm_config, kv_cache_config, config),
            *tier_places(vllm_config, kv_cache_config, config),
        ]
        region = region_plan(vllm_config, kv_cache_config, config)
        self._num_ranks = vllm_config.parallel_config.world_size
        self._fingerprint = take_fingerprint(vllm_config, kv_cache_config)
        # A failed load is a cache miss. vLLM's default would fail the request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._samples_late = False
        if role is KVConnectorRole.SCHEDULER:  # one per engine, however many processes it has
            warn_if_certified()
            said = self._places, self._weights, self._target
            self._operator = self.make_operator(vllm_config, config, *said)
            self._watch = watch_of(config, self._target)
        if role is KVConnectorRole.WORKER:
            self._samples_late = current_platform.is_cuda() and not vllm_config.use_v2_model_runner
            self._worker = WorkerSide(
                VllmCache(kv_cache_config),
                config.cpu_bytes // self._num_ranks,
                self._fingerprint,
                self._seams,
                config.verify_loads,
                config.huge_pages,
                [place.make_lanes for place in self._places],
                self.join_replicas(replica_shape(vllm_config, kv_cache_config)),
                region,
                self.make_listener(vllm_config, kv_cache_config, config),
                range_of(config, self._num_ranks),
            )

    # Both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody a delivery: a dropped store is a later miss. What is handed off it does owe."""
        return owes_delivery(self._config.fleet)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """On CUDA, blocks outermost, so that a block of all layers is one piece. A preference only."""
        return "BLHNC" if current_platform.is_cuda() else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """On CUDA (not measured). A CPU engine has no sleep mode: vLLM refuses it itself."""
        return bool(current_platform.is_cuda() or current_platform.is_cpu())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ranks may hold different layers and so different numbers of slots: all use the least.

        From vLLM 0.33 on an engine that wakes up tells it again. What is in the pool is still known then.

        Raises:
            UnsupportedError: a worker sees the cache in another way than the scheduler, or its part of the
                pool is not what it was.
        """
        facts = {rank: each.facts for rank, each in metadata.items() if isinstance(each, FactsEnvelope)}
        for (pipeline_rank, tensor_rank), fact in facts.items():
            who = f"the worker of pipeline rank {pipeline_rank}, tensor rank {tensor_rank}"
            check_fingerprint(self._fingerprint, fact.fingerprint, who)
        if not facts:
            return
        asked = PoolSize.of(facts.values(), self._num_ranks)
        self._take_kept(facts.values())
        if self._side is not None and asked != self._pool_size:
            raise UnsupportedError(
                f"the workers' pool is {asked} now and was {self._pool_size} before; restart the engine"
            )
        self._pool_size = asked

    def on_new_request(self, request: "Request") -> None:
        if (side := self._scheduler) is not None:
            side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self._scheduler
        if side is None:
            return 0, False
        num_tokens = side.offer(request, num_computed_tokens).tokens
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if (side := self._scheduler) is not None:
            side.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        side = self._scheduler
        if side is None:
            return NOTHING
        if self._operator is not None:
            self._operator.tell(side)
        return PlanEnvelope.of(side.build_plan(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        envelope = connector_output.kv_connector_worker_meta
        assert envelope is None or isinstance(envelope, ReportEnvelope), f"{type(envelope)} is not ours"
        if envelope is not None and envelope.facts:
            self._learn(envelope.facts)
        side = self._scheduler
        if side is not None:
            side.receive(envelope and envelope.report, connector_output.invalid_block_ids)
            if self._operator is not None:
                self._operator.settle(side)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the request's blocks: stores in flight hold references of their own."""
        side = self._scheduler
        return False, None if side is None else told_of(side, request, self._vllm_config)

    def has_pending_push_work(self) -> bool:
        """Facts, completions and events travel on steps: the engine must step while any are to come."""
        if (side := self._scheduler) is None:
            return self._kv_cache_manager is not None
        return side.has_pending_work or self._events.is_behind

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._scheduler is None else self._events.take()

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            with beside_compute(is_on_cpu=current_platform.is_cpu()):
                self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What ranks tell the scheduler side at start.

        Not inside a MultiConnector, which would hand it to siblings. There it travels with the first report,
        and every plan that says something is checked.
        """
        is_child = has_kv_transfer_group() and get_kv_transfer_group() is not self
        if self._worker is None or is_child:
            return None
        self._has_told = True
        return FactsEnvelope(self._worker.facts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, PlanEnvelope), f"{type(connector_metadata)} is not ours"
            self._worker.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_step()

    def wait_for_save(self) -> None:
        """Submits the stores and waits for nothing: their source blocks are held until they end.

        Sampling's own copies must not queue behind them. vLLM's first model runner samples after this call;
        there, and on CPU engines, stores are submitted when the next step begins.
        """
        if self._worker is not None and not self._samples_late:
            self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.poll()
        return KVConnectorTransferResults(finished_recving=ended.requests, failed_recving=ended.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_unfilled() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        report, has_told, self._has_told = self._worker.take_report(), self._has_told, True
        if not has_told:
            return ReportEnvelope(report or WorkerReport(), [self._worker.facts])
        return None if report is None else ReportEnvelope(report)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Everything is counted on the scheduler side; workers report none."""
        side = self._scheduler
        metrics = None if side is None else side.take_metrics()
        return OffloadStats(data=metrics) if metrics else None

    def shutdown(self) -> None:
        for part in (self._worker, self._side, self._operator, self._watch):
            if part is not None:
                part.close()

    @property
    def _scheduler(self) -> SchedulerSide | None:
        """Made once, by the first hook that asks for it when all workers have told their facts.

        Until then nothing is offered, loaded or stored. Requests that were admitted before stay unknown.
        """
        if self._side is None and self._kv_cache_manager is not None and self._pool_size is not None:
            self._side = self._make_scheduler_side(self._pool_size)
        return self._side

    @property
    def _block_size(self) -> int:
        """Tokens per block as the scheduler counts them: on all ranks that share one."""
        block_size: int = self._kv_cache_manager.coordinator.scheduler_block_size
        return block_size

    def _learn(self, facts: list[WorkerFacts]) -> None:
        """Ranks have told; they may hold different layers, and so different numbers of slots."""
        self._facts += facts
        if self._pool_size is None and len(self._facts) == self._num_ranks:
            self._pool_size = PoolSize.of(self._facts, self._num_ranks)
            self._take_kept(self._facts)

    def _take_kept(self, facts: Iterable[WorkerFacts]) -> None:
        """What ranks have found of earlier engines."""
        self._tiers = [fact.tiers for fact in facts]
        self._kept = [fact.pool for fact in facts if fact.pool is not None]
        if self._operator is not None:
            self._operator.learn([fact.memory for fact in facts])

    def _make_scheduler_side(self, size: PoolSize) -> SchedulerSide:
        vllm_config, manager = self._vllm_config, self._kv_cache_manager
        events = vllm_config.kv_events_config
        shares_cores = current_platform.is_cpu() if (told := self._seams.shares_cores) is None else told
        engine = VllmEngine(manager, drafts_of(vllm_config, manager), groups_of(vllm_config, manager))
        side = QuietSide(
            self._config,
            engine,
            block_size=self._block_size,
            num_slots=size.num_slots,
            slot_bytes=size.slot_bytes,
            block_bytes=size.block_bytes,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            num_ranks=self._num_ranks,
            record_events=events is not None and events.enable_kv_cache_events,
            fingerprint=self._fingerprint,
            clock=self._seams.clock,
            places=[
                place.flows_of(kept)
                for place, kept in zip(self._places, zip(*self._tiers, strict=True), strict=True)
            ],
            kept=self._kept,
            weights=self._weights,
            peer=peer_of(self._vllm_config, self._config.fleet),
            sizes=sizes_of(size, self._target),
            compute=Compute(vllm_config.max_concurrent_batches > 1, shares_cores),
        )
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        hash_bytes = 16 if algorithm.startswith("xxhash") else 32
        groups = event_groups(self._vllm_config, manager)
        self._events = KvEvents(groups, self._block_size, side, hash_bytes)
        return side
