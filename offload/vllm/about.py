"""What an engine is, and how it was set: told at its operator socket, for whoever looks for faults."""

import os
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from offload.config import OffloadConfig
from offload.provenance import own_version
from offload.vllm.versions import is_tested


def about_engine(vllm_config: VllmConfig) -> dict[str, Any]:
    """Which engine it is, of what versions; plain."""
    parallel = vllm_config.parallel_config
    return {
        "model": vllm_config.model_config.model,
        "vllm": vllm.__version__,
        "vllm_is_tested": is_tested(),
        "kv_offload": own_version(),
        "num_ranks": parallel.world_size,
        "data_parallel_rank": parallel.data_parallel_rank,
    }


def settings_of(vllm_config: VllmConfig, config: OffloadConfig) -> dict[str, Any]:
    """What of its settings can be wrong on a machine or in a fleet; plain, and nothing secret."""
    fleet = config.fleet
    return {
        "device": current_platform.device_type,
        "num_gpu_blocks": vllm_config.cache_config.num_gpu_blocks,
        "cpu_gib": config.cpu_gib,
        "huge_pages": config.huge_pages,
        "record_trace": config.record_trace,
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
        "has_hash_seed": bool(os.environ.get("PYTHONHASHSEED")),
        "role": str(fleet.role),
        "listen": fleet.listen,
        "is_in_clear": fleet.is_in_clear,
        "uses_nixl": fleet.has_nixl,
    }
