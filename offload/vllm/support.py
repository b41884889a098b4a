"""What this release can serve right, checked before the model loads and again when its cache is known."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig, check_record_trace
from offload.errors import ConfigError, UnsupportedError
from offload.files.memory_path import look_for_room
from offload.files.probe import probe
from offload.fleet_config import IN_CLEAR, check_fleet_files
from offload.observe.recorder import check_divides
from offload.settings import GIB
from offload.store_probe import probe_store
from offload.tier_config import DiskConfig
from offload.vllm.groups import KINDS, cached_groups, is_full, layer_specs
from offload.vllm.hand_offs import check_siblings_of_peers, listens_at
from offload.vllm.namespace import check_hashes, hash_advice
from offload.vllm.plugin import CONNECTOR
from offload.vllm.replicas import most_replicas
from offload.vllm.versions import is_on_trial
from offload.worker.media.resp_check import StoreGoneError
from offload.worker.peers.nixl import check_nixl
from offload.worker.pool.host_limits import check_host_memory, host_memory_bytes
from offload.worker.pool.pin_probe import check_pinning

logger = logging.getLogger(__name__)

_MULTI_CONNECTOR = "MultiConnector"
_STATE_MODE = "align"
DRAFTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods of speculative decoding that are served."""
SLEEP_BACKEND = "cumem"
"""vLLM's own way to take the GPU's memory away while the engine sleeps."""


def find_settings(transfer: KVTransferConfig | None) -> tuple[str, Mapping[str, Any]] | None:
    """Role and extra config of our connector, also as a child of a MultiConnector; None if not used."""
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == CONNECTOR:
        return str(transfer.kv_role), extra
    if transfer.kv_connector == _MULTI_CONNECTOR:
        for child in extra.get("connectors", []):
            if child.get("kv_connector") == CONNECTOR:
                return str(child.get("kv_role")), child.get("kv_connector_extra_config") or {}
    return None


def check_not_replaced(arguments: EngineArgs) -> None:
    """Refuse the flag with which vLLM takes a connector of its own in place of the one that is configured.

    To be asked before vLLM makes its configuration: that has no trace of ours any more.

    Raises:
        UnsupportedError: ``--kv-offloading-size`` is given.
    """
    size = getattr(arguments, "kv_offloading_size", None)
    if size is not None:
        raise UnsupportedError(
            f"kv_offloading_size is {size}, with which vLLM takes a connector of its own in place of "
            f"{CONNECTOR}; remove --kv-offloading-size, the size of the pool is cpu_gib"
        )


def check_before_start(vllm_config: VllmConfig) -> None:
    """``check_engine``, and what this machine lets us do. For the process that configures.

    Raises:
        OffloadError: as ``check_engine`` and ``check_machine``.
    """
    config = check_engine(vllm_config)
    if config is not None:
        advice = hash_advice(vllm_config)
        if advice is not None and _has_others(config):
            logger.info("%s", advice)
        num_nodes = vllm_config.parallel_config.nnodes_within_dp
        check_machine(config, num_nodes, pool_bytes_here(vllm_config, config))


def check_machine(config: OffloadConfig, num_nodes: int = 1, pool_bytes: int | None = None) -> None:
    """Refuse what can be seen on this machine not to work, before memory is taken.

    Args:
        config: of our connector.
        num_nodes: that the engine's ranks are spread over.
        pool_bytes: of the pools of all replicas here; None: of one engine.

    Raises:
        OffloadError: ConfigError for a trace that cannot be written here, or a key that cannot be read;
            TierError for a tier or a pool whose path cannot be used; HostMemoryError if CUDA may not pin
            memory.
    """
    check_record_trace(config)
    check_fleet_files(config.fleet)
    if config.fleet.has_nixl:
        check_nixl()
    if config.fleet.is_in_clear:
        logger.warning("%s", IN_CLEAR)
    if config.fetches_from_nobody:
        logger.warning(
            'role is "decode", and there is nobody to fetch KV from: this engine computes all prompts. Give '
            "peers, a store in tiers, or a pool in shared memory"
        )
    if config.pool is not None:
        look_for_room(config.pool.root, pool_bytes or config.cpu_bytes, config.pool.num_bytes)
    for tier in config.tiers:
        if isinstance(tier, DiskConfig):
            probe(tier.root, tier.num_bytes // num_nodes)
            continue
        try:
            probe_store(tier)
        except StoreGoneError as error:  # it may come back, and requests are served without it
            logger.warning("%s", error)
    if current_platform.is_cuda() and not is_on_trial():  # virtual workers pin nothing
        check_pinning()


def check_connector(transfer: KVTransferConfig | None) -> OffloadConfig | None:
    """Read and check our connector's settings and role; None if it is not in use.

    Raises:
        ConfigError: a key or value of the extra config.
        UnsupportedError: a role with which it could not both store and load.
    """
    found = find_settings(transfer)
    if found is None:
        return None
    role, settings = found
    config = OffloadConfig.from_mapping(settings)
    if role != "kv_both":
        raise UnsupportedError(
            f'kv_role is "{role}"; kv-offload both stores and loads, set "kv_role": "kv_both"'
        )
    return config


def check_engine(vllm_config: VllmConfig) -> OffloadConfig | None:
    """Read and check all that is known before a model is loaded; None if our connector is not in use.

    Raises:
        ConfigError: a key or value of the extra config.
        UnsupportedError: an engine setting or a model that this release cannot serve right.
    """
    config = check_connector(vllm_config.kv_transfer_config)
    if config is None:
        return None
    _check_platform()
    _check_memory(vllm_config, config)
    _check_multi_connector(vllm_config)
    _check_model(vllm_config)
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "prefix caching is off, and without it vLLM has no prefix hashes to find blocks by; remove "
            "--no-enable-prefix-caching or, if vLLM itself turned it off for this model, the connector"
        )
    _check_drafts(vllm_config)
    _check_hashes(vllm_config)
    _check_sparse_cache(vllm_config)
    _check_sleep_mode(vllm_config)
    _check_auxiliary_outputs(vllm_config)
    _check_parallelism(vllm_config)
    _check_one_block_fits(vllm_config, config)
    listens_at(vllm_config, config.fleet)
    check_siblings_of_peers(vllm_config, config.fleet)
    if _has_others(config):
        check_hashes(vllm_config)
    if config.record_trace is not None and vllm_config.cache_config.block_size:
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        check_divides(vllm_config.cache_config.block_size * dcp)
    return config


def _check_platform() -> None:
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise UnsupportedError(
            f'vLLM runs on "{current_platform.device_name}" here; kv-offload knows NVIDIA GPUs and the CPU '
            "backend only; remove the connector"
        )


def check_cache_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse caches of kinds that are not known here.

    Raises:
        UnsupportedError: such a kind, states that are kept in another way, or a part in host memory.
    """
    num_host_blocks = getattr(kv_cache_config, "hisparse_host_num_blocks", None)
    if num_host_blocks is not None:
        raise UnsupportedError(
            f"HiSparse keeps {num_host_blocks} KV blocks in host memory (hisparse_host_num_blocks) and "
            f"delays loads; this release does not serve it, remove hisparse_config from --attention-config"
        )
    groups = kv_cache_config.kv_cache_groups
    served = cached_groups(kv_cache_config)
    for index in served:
        specs = layer_specs(groups[index].kv_cache_spec)
        for spec in specs:
            if type(spec) not in KINDS:
                raise UnsupportedError(
                    f"KV cache group {index} is of kind {type(spec).__name__}; this release serves "
                    f"{', '.join(kind.__name__ for kind in KINDS)}. Remove the connector for this model"
                )
            mode = getattr(spec, "mamba_cache_mode", _STATE_MODE)
            if mode != _STATE_MODE:
                raise UnsupportedError(
                    f'KV cache group {index} keeps its states in mode "{mode}", and this release knows '
                    f'"{_STATE_MODE}" only; set --mamba-cache-mode {_STATE_MODE}'
                )
        spans = {
            (type(spec), getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None))
            for spec in specs
        }
        if len(spans) > 1 and not is_full(groups[index].kv_cache_spec):
            raise UnsupportedError(
                f"layers of KV cache group {index} differ in kind or window; this release serves groups "
                f"whose layers are alike. Remove the connector for this model"
            )
    if not served:
        raise UnsupportedError("no KV cache group has prefix hashes; remove the connector for this model")


def pool_bytes_here(vllm_config: VllmConfig, config: OffloadConfig) -> int:
    """What the pools of all data-parallel replicas on this machine take together."""
    parallel = vllm_config.parallel_config
    replicas, nodes = max(parallel.data_parallel_size_local, 1), parallel.nnodes_within_dp
    return int(config.cpu_bytes * replicas // nodes)


def bytes_to_take(config: OffloadConfig, pool_bytes: int) -> int:
    """Memory that pools of so many bytes take beside what is in use: regions of earlier engines are adopted.

    Raises:
        TierError: their path cannot be used.
    """
    if config.pool is None:
        return pool_bytes
    room = look_for_room(config.pool.root, pool_bytes, config.pool.num_bytes)
    return max(0, pool_bytes - room.kept_bytes)


def _check_memory(vllm_config: VllmConfig, config: OffloadConfig) -> None:
    """Every data-parallel replica has a pool of its own; its ranks may be spread over several nodes."""
    parallel = vllm_config.parallel_config
    replicas = max(parallel.data_parallel_size_local, 1)
    nodes = parallel.nnodes_within_dp
    available = host_memory_bytes()
    if replicas == nodes == 1:
        check_host_memory(config, available)
    elif config.cpu_gib * replicas > available / GIB * nodes:
        raise ConfigError(
            f"cpu_gib is {config.cpu_gib} for each data-parallel replica, of which {replicas} run on this "
            f"machine with 1/{nodes} of their ranks each, but it has {available / GIB:.1f} GiB of memory; "
            f"lower cpu_gib"
        )


def _check_multi_connector(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != _MULTI_CONNECTOR:
        return
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}", with which a failed restore '
            f'would fail the request; inside {_MULTI_CONNECTOR} add "kv_load_failure_policy": "recompute" '
            f"to --kv-transfer-config"
        )


def _check_drafts(vllm_config: VllmConfig) -> None:
    """Whether it is known what drafts keep beside the model's KV: nothing, or KV in layers of their own."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTS:
        raise UnsupportedError(
            f'the method of --speculative-config is "{speculative.method}", and this release knows what '
            f"{', '.join(DRAFTS)} keep in the KV cache; use one of these, or remove --speculative-config"
        )


def _has_others(config: OffloadConfig) -> bool:
    """Whether other processes, now or later, find this engine's KV by its names."""
    return bool(config.tiers) or config.pool is not None or config.fleet.is_used


def _check_hashes(vllm_config: VllmConfig) -> None:
    """A slot is named by the hash of its tokens alone. vLLM says 0 where there is a connector, so far."""
    num_tokens = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    if num_tokens:
        raise UnsupportedError(
            f"num_hash_lookahead_tokens is {num_tokens}: prefix hashes would cover tokens after their block, "
            f'which this release cannot read; set "disable_lookahead_block_hashes": true in '
            f"--speculative-config, or remove --speculative-config"
        )


def _check_sparse_cache(vllm_config: VllmConfig) -> None:
    """As ``check_cache_groups``, before the model is loaded."""
    hisparse = getattr(vllm_config.attention_config, "hisparse_config", None)
    if hisparse is not None:
        raise UnsupportedError(
            f"hisparse_config is {hisparse}; HiSparse keeps KV blocks in host memory itself and delays "
            f"loads, which this release does not serve; remove hisparse_config from --attention-config"
        )


def _check_sleep_mode(vllm_config: VllmConfig) -> None:
    """The backend must leave host memory and streams as they are, and the cache where it was."""
    model = vllm_config.model_config
    backend = getattr(model, "sleep_mode_backend", SLEEP_BACKEND)
    if model.enable_sleep_mode and backend != SLEEP_BACKEND:
        raise UnsupportedError(
            f'sleep_mode_backend is "{backend}", and this release knows what "{SLEEP_BACKEND}" does to the '
            f"KV cache only; set --sleep-mode-backend {SLEEP_BACKEND}, or remove --enable-sleep-mode"
        )


def _check_auxiliary_outputs(vllm_config: VllmConfig) -> None:
    """vLLM keeps them by prefix hash for about as many blocks as its cache has, and fails without them."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None and outputs.enabled:
        raise UnsupportedError(
            f"enable_return_routed_experts is {outputs.enable_return_routed_experts}: vLLM keeps routed "
            f"experts for the blocks of its own cache only, and ends when a restored block has none; remove "
            f"--enable-return-routed-experts, or the connector"
        )


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        raise UnsupportedError(
            "distributed_executor_backend is external_launcher, where ranks schedule on their own and would "
            "disagree about the pool; use mp or ray"
        )


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if model.is_encoder_decoder or model.is_diffusion:
        raise UnsupportedError(
            f"{model.model} is a model whose KV depends on more than the tokens before (encoder-decoder or "
            f"diffusion), which this release does not serve; remove the connector for this model"
        )


def _check_one_block_fits(vllm_config: VllmConfig, config: OffloadConfig) -> None:
    """A block's size is only known with the model's cache; this bound needs its configuration alone."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if not cache.block_size:
        return
    per_token = model.get_head_size() * (1 if model.use_mla else 2 * model.get_num_kv_heads(parallel))
    least = per_token * cache.block_size * model.get_num_layers(parallel)  # one byte per element at least
    if config.cpu_bytes // parallel.world_size * most_replicas(vllm_config) < least:
        raise ConfigError(
            f"cpu_gib is {config.cpu_gib}, {config.cpu_bytes // parallel.world_size:,} bytes for each of "
            f"{parallel.world_size} ranks, but one block of {cache.block_size} tokens takes at least "
            f"{least:,}; raise cpu_gib"
        )
