"""What a virtual engine is like, and the vLLM configuration that follows from it."""

import functools
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from evictor import available_policies
from offload.config import AUTO, DEFAULT_POLICY, GIB
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.engines.environment import transfer_config
from offload.vllm import plugin
from offload.vllm.places import Place

CELL_BYTES = 16
"""Bytes of one token position of one layer: two words, see ``tags``."""

CONNECTORS = ("offload", "native", "none")

DRAFTERS = ("ngram", "draft_model", "eagle", "mtp")

_STORED_ANSWERS = (AUTO, AUTO, True, True, False)

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4_194_304,
    "torch_dtype": "float32",
}
_MTP_MODEL = _MODEL | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "moe_intermediate_size": 48,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualSettings:
    """Sizes and modes of a virtual engine.

    Attributes:
        connector: "offload" (ours), "native" (vLLM's ``OffloadingConnector``) or "none".
        num_ranks: workers, each with its own part of every block.
        dcp: ranks that share the tokens of a block (decode context parallelism); 1: each has them all.
        pcp: ranks among which a prompt is divided (prefill context parallelism).
        stages: of a pipeline; the last one has a layer more than the others.
        gpu_blocks: blocks of the GPU cache, the null block included.
        cpu_slots: slots of the CPU pool.
        block_size: tokens that a rank holds of a block.
        num_layers: layers on each rank, but see ``stages``.
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
        places: below the pool.
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
    stages: int = 1
    gpu_blocks: int = 32
    cpu_slots: int = 64
    block_size: int = 4
    num_layers: int = 2
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
    places: tuple[Place, ...] = ()
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
        if self.connector == "native" and self.copies.fault_rate:
            raise ValueError(
                f"fault_rate={self.copies.fault_rate}: must be 0, the native connector ends with its first "
                "failed copy"
            )

    @property
    def longest(self) -> int:
        """Tokens per request at most."""
        return self.max_model_len or (self.gpu_blocks - 1) * self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens per block, on all ranks together."""
        return self.block_size * self.dcp

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block on one rank, of the first stage."""
        return (self.num_layers + len(self.draft_reaches)) * self.block_size * CELL_BYTES

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
    def stage_ranks(self) -> int:
        """Ranks per stage of the pipeline."""
        return self.num_ranks // self.stages

    def layers_of(self, rank: int) -> int:
        """Layers on a rank."""
        is_last = rank // self.stage_ranks == self.stages - 1
        return self.num_layers + (is_last and self.stages > 1)


def draw_settings(
    rng: random.Random, *, faults: bool = True, overlapped: bool | None = None, num_ranks: int | None = None
) -> VirtualSettings:
    """Settings of a random engine: tiny pools, any mode; the arguments fix what should not be drawn."""
    gpu_blocks = rng.choice([9, 14, 24, 40])
    verify = rng.choice(["always", "always", "always", "sampled", "never"])
    seals_of_blocks = rng.random() < 0.5
    kinds = [Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]
    if rng.random() < 0.5:
        kinds += [Fault.STUCK, Fault.DIE]
    if verify == "always" and seals_of_blocks:  # nothing less finds a copy that lies
        kinds.append(Fault.WRONG_BYTES)
    settings = VirtualSettings(
        num_ranks=num_ranks or rng.choice([1, 1, 2, 3]),
        gpu_blocks=gpu_blocks,
        cpu_slots=rng.choice([3, gpu_blocks // 2, 2 * gpu_blocks, 6 * gpu_blocks]),
        block_size=rng.choice([2, 4, 4]),
        block_outermost=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority"]),
        overlapped=rng.random() < 0.5 if overlapped is None else overlapped,
        v2_runner=rng.random() < 0.3,
        max_num_seqs=rng.choice([2, 4, 8]),
        chunk=rng.choice([5, 16, 48]),
        store_decode_blocks=_STORED_ANSWERS[int(rng.random() * len(_STORED_ANSWERS))],
        verify_loads=verify,
        seals_of_blocks=seals_of_blocks,
        first_part=rng.choice([1, 2, 16]),
        answer_run=rng.choice([1, 1, 3]),
        answer_interval=rng.choice([1, 1, 4]),
        rot_rate=rng.choice([0.0, 0.05]) if faults and verify == "always" else 0.0,
        copies=CopySchedule(
            longest_delay=rng.choice([0, 1, 3, 12]),
            burst_every=rng.choice([1, 1, 5]),
            fault_rate=rng.choice([0.0, 0.1, 0.4]) if faults else 0.0,
            faults=tuple(kinds),
            let_go_rate=1 / 60,  # what is stuck is mostly past its deadline by then, but not always
            threaded=rng.random() < 0.1,
        ),
        log_stats=rng.random() < 0.2,
        eviction_policy=rng.choice(available_policies()),
    )
    patience = 2 * settings.answer_run * (settings.answer_interval == 1)
    comes_in_bursts = settings.copies.burst_every > 1 and settings.copies.longest_delay > 0
    shares_blocks = settings.answer_run > 1
    return replace(
        settings,
        dcp=settings.num_ranks if shares_blocks else 1,
        step_restores=int(settings.first_part == 1),
        step_landed=int(settings.first_part == 2 and comes_in_bursts),
        answer_patience=patience,
    )


def with_drafts(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a random drafter.

    A step has room for a request with all of its drafts, and for a slot that draft models take. With less,
    vLLM would wait for ever for room to fill up a request whose prompt is computed but for its last token.
    """
    drafter = rng.choice([*DRAFTERS, "eagle"])
    num_drafts = rng.randint(1, 4)
    if drafter == "mtp":
        num_drafts = min(num_drafts, settings.block_size)  # vLLM refuses more
    chunk = max(settings.chunk, num_drafts + 2)
    skill = rng.choice([0.0, 0.5, 0.9])
    return replace(settings, dcp=1, drafter=drafter, num_drafts=num_drafts, chunk=chunk, draft_skill=skill)


def make_vllm_config(settings: VirtualSettings, transfer: dict[str, Any] | None = None) -> VllmConfig:
    """The configuration a real engine would make of these settings; ``transfer``: another connector's."""
    vllm_config: VllmConfig = EngineArgs(
        model=_model_folder(settings.drafter == "mtp"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=settings.longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(settings.chunk, settings.max_num_seqs),
        block_size=settings.block_size,
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
    if settings.pcp > 1:  # which no runner of the CPU backend takes
        parallel = vllm_config.parallel_config
        parallel.prefill_context_parallel_size = settings.pcp
        parallel.decode_context_parallel_size = settings.dcp
        parallel.world_size = settings.num_ranks
    return vllm_config


def make_kv_cache_config(settings: VirtualSettings, rank: int = 0) -> KVCacheConfig:
    """One group of full-attention layers over pages of a few bytes, as that rank has it.

    Those that draft come behind the others.
    """
    layers = [f"layer.{index}" for index in range(settings.layers_of(rank))]
    layers += [f"draft.{index}" for index in range(len(settings.draft_reaches))]
    page = settings.block_size * CELL_BYTES
    spec = FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=CELL_BYTES // 8, dtype=torch.float32
    )
    assert spec.page_size_bytes == page
    num_pages = len(layers) * settings.gpu_blocks
    outermost = settings.block_outermost
    tensor = KVCacheTensor(
        size=num_pages * page,
        layers=layers,
        layer_stride=page if outermost else settings.gpu_blocks * page,
        block_stride=len(layers) * page if outermost else page,
    )
    return KVCacheConfig(
        num_blocks=settings.gpu_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout="BLHNC" if outermost else "LBHNC",
    )


def _transfer_config(settings: VirtualSettings) -> dict[str, Any] | None:
    cpu_bytes = settings.cpu_slots * settings.slot_bytes * settings.num_ranks
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
        }
    return transfer_config(extra, name)


def _speculative_config(settings: VirtualSettings) -> dict[str, Any] | None:
    if not settings.drafter:
        return None
    config: dict[str, Any] = {"method": settings.drafter, "num_speculative_tokens": settings.num_drafts}
    if settings.drafter == "ngram":
        return config | {"prompt_lookup_max": 2}
    return config if settings.drafter == "mtp" else config | {"model": _model_folder()}


@functools.cache
def _model_folder(has_mtp: bool = False) -> str:
    folder = tempfile.mkdtemp(prefix="kv-offload-virtual-")
    (Path(folder) / "config.json").write_text(json.dumps(_MTP_MODEL if has_mtp else _MODEL))
    return folder
