"""What a virtual engine is like, and the vLLM configuration that follows from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from offload.config import DEFAULT_POLICY
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import GIB
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.engines.environment import transfer_config
from offload.testing.virtual.groups import FULL, STATE, Group
from offload.testing.virtual.model_folders import folder_of
from offload.testing.virtual.network import VirtualNetwork
from offload.testing.virtual.region import VirtualRegion
from offload.testing.virtual.resizes import Resizes
from offload.testing.virtual.several import VirtualTiers
from offload.testing.virtual.tier import VirtualTier
from offload.vllm import plugin
from offload.vllm.places import Place
from offload.vllm.replicas import Shape

CONNECTORS = ("offload", "native", "none")

DRAFTERS = ("ngram", "draft_model", "eagle", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualSettings:
    """Sizes and modes of a virtual engine.

    Attributes:
        connector: "offload" (ours), "native" (vLLM's ``OffloadingConnector``) or "none".
        num_ranks: workers, each with its own part of every block.
        dcp: ranks that share the tokens of a block (decode context parallelism); 1: each has them all.
        pcp: ranks among which a prompt is divided (prefill context parallelism).
        replicas: so many neighbours hold the same heads; without ``dcp``, all ranks of ``pcp`` do, too.
        stages: of a pipeline; the last one has a layer more than the others.
        gpu_blocks: blocks of the GPU cache, the null block included.
        cpu_slots: slots of the CPU pool.
        resizes: how the pool is resized; None: it is not.
        block_size: tokens that a rank holds of a block, if ``groups`` do not say so.
        num_layers: layers of a group on each rank, but see ``stages``.
        groups: of the model's KV cache, see ``MODELS``; none: one of full attention.
        retention: tokens between places at which vLLM keeps windows and states on the GPU; 0: where prompts
            end and part only; None: everywhere.
        match_unit: tokens between places at which vLLM finds states on the GPU; 0: whole blocks.
        block_outermost: a block of all layers is one piece, instead of one piece per layer.
        policy: "fcfs" or "priority".
        overlapped: schedule the next step before the last one's output is known.
        v2_runner: report resumed requests as the newer model runner wants it.
        max_num_seqs: running requests at most.
        chunk: tokens computed per step at most.
        max_model_len: tokens per request at most; defaults to what the GPU cache holds.
        store_decode_blocks: as in the connector's configuration.
        verify_loads: as in the connector's configuration.
        seals_of_blocks: checksums are taken where a CPU engine takes them, not as beside a GPU.
        first_part: blocks in the first part of a load.
        answer_run: blocks of an answer that are stored at a time, at least.
        answer_interval: steps from one answer's store to the next one's.
        answer_patience: answers in a row that may stay away before no more are stored, if that is learned;
            0: as many as usual.
        step_restores: blocks that are handed over in a step, and pins that end in it; 0: as many as usual.
        step_landed: loads that a rank tells as done in a step; 0: as many as usual.
        step_seconds: time that the connector's clock advances with each step.
        rot_rate: how often, per step, a byte of a resident slot changes by itself.
        copies: when copies end, and which of them fail.
        record_trace: as in the connector's configuration.
        native_options: more of the native connector's ``kv_connector_extra_config``.
        eviction_policy: as in the connector's configuration.
        fetch_gpu_share: the same.
        restore: the same.
        store: the same.
        shares_cores: whether it computes on CPUs, whose cores copies take; None: where vLLM does.
        fleet: what the connector's configuration says of hand-offs.
        network: over which peers meet; None: that of the machine.
        peer_limits: what bounds fetches from peers.
        peer_extent: slots of an extent there.
        places: below the pool.
        tier: that the places are of; engines of one run have it one after the other.
        region: where the pool lies, if it outlives the engine; the same.
        log_stats: let the scheduler collect statistics as a served engine does.
        drafter: a method of speculative decoding of ``DRAFTERS``, or "" for none. "mtp" has a module for each
            draft.
        num_drafts: tokens drafted per request and step, at most.
        draft_skill: share of drafts that are right.
    """

    connector: str = "offload"
    num_ranks: int = 1
    dcp: int = 1
    pcp: int = 1
    replicas: int = 1
    stages: int = 1
    gpu_blocks: int = 32
    cpu_slots: int = 64
    resizes: Resizes | None = None
    block_size: int = 4
    num_layers: int = 2
    groups: tuple[Group, ...] = ()
    retention: int | None = 0
    match_unit: int = 0
    block_outermost: bool = False
    policy: str = "fcfs"
    overlapped: bool = False
    v2_runner: bool = False
    max_num_seqs: int = 8
    chunk: int = 32
    max_model_len: int = 0
    store_decode_blocks: bool | str = True
    verify_loads: str = "always"
    seals_of_blocks: bool = True
    first_part: int = 16
    answer_run: int = 1
    answer_interval: int = 1
    answer_patience: int = 0
    step_restores: int = 0
    step_landed: int = 0
    step_seconds: float = 1.0
    rot_rate: float = 0.0
    copies: CopySchedule = field(default_factory=CopySchedule)
    record_trace: str | None = None
    native_options: Mapping[str, Any] = field(default_factory=dict)
    eviction_policy: str = DEFAULT_POLICY
    fetch_gpu_share: float = 0.1
    restore: str = "always"
    store: str = "eager"
    shares_cores: bool | None = False
    fleet: Mapping[str, Any] = field(default_factory=dict)
    network: VirtualNetwork | None = None
    peer_limits: TierLimits = TierLimits(least_tokens=1)  # noqa: RUF009 (immutable)
    peer_extent: int = 1
    places: tuple[Place, ...] = ()
    tier: VirtualTier | VirtualTiers | None = None
    region: VirtualRegion | None = None
    log_stats: bool = False
    drafter: str = ""
    num_drafts: int = 0
    draft_skill: float = 0.7
    samples_late: bool = False
    """Whether stores are submitted with the next step, as for a model runner that samples after saving."""

    def __post_init__(self) -> None:
        """Refuse what no engine can be."""
        if self.connector not in CONNECTORS:
            raise ValueError(f"connector={self.connector!r}: must be one of {', '.join(CONNECTORS)}")
        if self.drafter not in ("", *DRAFTERS) or bool(self.drafter) != bool(self.num_drafts):
            raise ValueError(f"drafter={self.drafter!r} and num_drafts={self.num_drafts} do not go together")
        self._check_groups()
        if self.connector == "native" and self.copies.fault_rate:
            raise ValueError(
                f"fault_rate={self.copies.fault_rate}: must be 0, the native connector ends with its first "
                "failed copy"
            )

    def _check_groups(self) -> None:
        kinds = {group.kind for group in self.groups}
        if self.groups and self.draft_reaches:
            raise ValueError(f"drafter={self.drafter!r}: no layers that draft beside several groups")
        if STATE in kinds and self.drafter:
            raise ValueError(f"drafter={self.drafter!r}: states of drafts are not kept")
        if kinds - {FULL, STATE} and self.dcp > 1:
            raise ValueError(f"dcp={self.dcp}: vLLM shares no windows among ranks")
        smallest = min(group.block_size for group in self.cache_groups)
        if any(group.kind == STATE and group.block_size > smallest for group in self.groups):
            raise ValueError(f"block_size={smallest}: vLLM cuts prompts by it, and keeps states at no other")

    @property
    def cache_groups(self) -> tuple[Group, ...]:
        """Groups of the model's KV cache, one at least."""
        return self.groups or (Group(block_size=self.block_size),)

    @property
    def longest(self) -> int:
        """Tokens per request at most."""
        if self.max_model_len:
            return self.max_model_len
        num_blocks = self.gpu_blocks - 1
        while self.blocks_for(num_blocks * self.block_tokens) >= self.gpu_blocks:
            num_blocks -= 1
        return num_blocks * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """GPU blocks that a request of so many tokens holds at most, in all groups."""
        in_flight = max(self.chunk, self.max_num_seqs) * (2 if self.overlapped else 1)
        copied = len(self.groups) if self.match_unit else 0  # blocks that are half full and others'
        return copied + sum(group.blocks_for(num_tokens, self.dcp, in_flight) for group in self.cache_groups)

    @property
    def most_slots(self) -> int:
        """Slots that the pool may have."""
        return self.cpu_slots if self.resizes is None else max(self.cpu_slots, self.resizes.most_slots)

    @property
    def block_tokens(self) -> int:
        """Tokens that fill blocks of all groups, on all ranks together."""
        return math.lcm(*(group.tokens_of_block(self.dcp) for group in self.cache_groups))

    @property
    def columns(self) -> int:
        """Slots of a position in the pool: none without full attention."""
        full = [group for group in self.cache_groups if group.kind == FULL]
        return sum(self.block_tokens // group.tokens_of_block(self.dcp) for group in full)

    @property
    def page_bytes(self) -> int:
        """Bytes of a layer's part of a block, in any group."""
        return max(group.page_bytes for group in self.cache_groups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block on one rank, of the first stage."""
        return self.block_layers(0) * self.page_bytes

    @property
    def draft_reaches(self) -> tuple[int, ...]:
        """For each draft layer, on how many tokens behind a position its KV there depends."""
        reaches = {"draft_model": (0,), "eagle": (1,), "mtp": tuple(range(1, self.num_drafts + 1))}
        return reaches.get(self.drafter, ())

    @property
    def num_unsettled(self) -> int:
        """Tokens at the end of the computed ones whose KV draft layers write once more."""
        return max(0, *self.draft_reaches, 1) - 1

    @property
    def replica_shape(self) -> Shape:
        """How many ranks hold the same KV."""
        is_divided = self.dcp > 1 or any(group.kind == STATE for group in self.groups)
        return Shape() if is_divided else Shape(self.replicas, self.pcp)

    def first_replica(self, rank: int) -> int:
        """The first of the ranks that hold the same KV as that one, itself included."""
        if self.replica_shape == Shape():
            return rank
        stage, place = divmod(rank, self.stage_ranks)
        num_tensor = self.stage_ranks // self.pcp
        return stage * self.stage_ranks + self.replica_shape.members_of(place % num_tensor, num_tensor)[0]

    @property
    def stage_ranks(self) -> int:
        """Ranks per stage of the pipeline."""
        return self.num_ranks // self.stages

    def layers_of(self, rank: int) -> list[int]:
        """Layers of each group on a rank, without those that draft."""
        is_last = rank // self.stage_ranks == self.stages - 1
        more = is_last and self.stages > 1
        return [(group.num_layers or self.num_layers) + more for group in self.cache_groups]

    def block_layers(self, rank: int) -> int:
        """Layers that a block has room for on a rank."""
        return max(self.layers_of(rank)) + len(self.draft_reaches)


def make_vllm_config(settings: VirtualSettings, transfer: dict[str, Any] | None = None) -> VllmConfig:
    """The configuration a real engine would make of these settings; ``transfer``: another connector's."""
    vllm_config: VllmConfig = EngineArgs(
        model=_model_folder(settings, settings.drafter == "mtp"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=settings.longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(settings.chunk, settings.max_num_seqs),
        block_size=min(group.block_size for group in settings.cache_groups),
        prefix_cache_retention_interval=settings.retention,
        prefix_match_unit=settings.match_unit or None,
        tensor_parallel_size=settings.stage_ranks // settings.pcp,
        pipeline_parallel_size=settings.stages,
        decode_context_parallel_size=settings.dcp if settings.pcp == 1 else 1,
        distributed_executor_backend="mp" if settings.num_ranks > 1 else "uni",
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        scheduling_policy=settings.policy,
        kv_transfer_config=transfer or _transfer_config(settings),
        speculative_config=_speculative_config(settings),
    ).create_engine_config()
    # The platform at hand may have its own mind about these; the scheduler only reads them.
    vllm_config.scheduler_config.async_scheduling = settings.overlapped
    vllm_config.cache_config.num_gpu_blocks = settings.gpu_blocks
    if any(group.kind == STATE for group in settings.groups):
        vllm_config.cache_config.mamba_cache_mode = "align"
    if settings.pcp > 1:  # which no runner of the CPU backend takes
        parallel = vllm_config.parallel_config
        parallel.prefill_context_parallel_size = settings.pcp
        parallel.decode_context_parallel_size = settings.dcp
        parallel.world_size = settings.num_ranks
    return vllm_config


def make_kv_cache_config(settings: VirtualSettings, rank: int = 0) -> KVCacheConfig:
    """Groups of layers over pages of a few bytes, as that rank has them.

    Layers that draft come behind the others of the first group.
    """
    page, outermost = settings.page_bytes, settings.block_outermost
    block_layers = settings.block_layers(rank)
    groups, tensors, first = [], [], 0
    for index, (group, num_layers) in enumerate(
        zip(settings.cache_groups, settings.layers_of(rank), strict=True)
    ):
        layers = [f"layer.{number}" for number in range(first, first + num_layers)]
        first += num_layers
        if index == 0:
            layers += [f"draft.{number}" for number in range(len(settings.draft_reaches))]
        spec = group.spec(page)
        assert spec.page_size_bytes == page
        groups.append(KVCacheGroupSpec(layers, spec))
        tensors.append(
            KVCacheTensor(
                size=block_layers * settings.gpu_blocks * page,
                layers=layers,
                layer_stride=page if outermost else settings.gpu_blocks * page,
                block_stride=block_layers * page if outermost else page,
            )
        )
    return KVCacheConfig(
        num_blocks=settings.gpu_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        prefix_cache_retention_interval=settings.retention if settings.groups else None,
        kv_cache_layout="BLHNC" if outermost else "LBHNC",
    )


def _transfer_config(settings: VirtualSettings) -> dict[str, Any] | None:
    num_sharing = math.prod(settings.replica_shape)
    cpu_bytes = -(-settings.cpu_slots * settings.slot_bytes // num_sharing) * settings.num_ranks
    if settings.connector == "none":
        return None
    if settings.connector == "native":
        name = "OffloadingConnector"
        extra = {
            "cpu_bytes_to_use": cpu_bytes,
            "offload_prompt_only": not settings.store_decode_blocks,
            "spec_name": "VirtualNativeSpec",
            "spec_module_path": "offload.testing.virtual.native",
            **settings.native_options,
        }
    else:
        plugin.register()
        name = plugin.CONNECTOR
        extra = {
            "cpu_gib": cpu_bytes / GIB,
            "store_decode_blocks": settings.store_decode_blocks,
            "verify_loads": settings.verify_loads,
            "record_trace": settings.record_trace,
            "eviction_policy": settings.eviction_policy,
            "fetch_gpu_share": settings.fetch_gpu_share,
            "restore": settings.restore,
            "store": settings.store,
            **settings.fleet,
        }
        if settings.resizes is not None:
            extra["cpu_gib_max"] = cpu_bytes / GIB * settings.resizes.most_slots / settings.cpu_slots
        if settings.region is not None:
            extra["pool"] = {"kind": "shared-memory", "path": str(settings.region.path)}
    return transfer_config(extra, name)


def _speculative_config(settings: VirtualSettings) -> dict[str, Any] | None:
    if not settings.drafter:
        return None
    config: dict[str, Any] = {"method": settings.drafter, "num_speculative_tokens": settings.num_drafts}
    if settings.drafter == "ngram":
        return config | {"prompt_lookup_max": 2}
    return config if settings.drafter == "mtp" else config | {"model": _model_folder(settings)}


def _model_folder(settings: VirtualSettings, has_mtp: bool = False) -> str:
    """A model with as many KV heads as these settings need; one under decode context parallelism."""
    num_tensor = settings.stage_ranks // settings.pcp
    return folder_of(1 if settings.dcp > 1 else num_tensor // settings.replicas, has_mtp)
