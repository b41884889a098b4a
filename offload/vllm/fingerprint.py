"""What scheduler and workers must agree on, or every slot would be read as something else."""

import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.errors import UnsupportedError
from offload.messages import Fingerprint
from offload.provenance import own_version
from offload.vllm.groups import describe


def take_fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Fingerprint:
    """This process's own."""
    parallel, spec = vllm_config.parallel_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return Fingerprint(
        kv_offload=own_version(),
        vllm=vllm.__version__,
        world_size=parallel.world_size,
        block_size=resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size),
        dtype=f"{vllm_config.cache_config.cache_dtype} ({vllm_config.model_config.dtype})",
        layout=kv_cache_config.kv_cache_layout,
        groups=describe(kv_cache_config),
    )


def check_fingerprint(ours: Fingerprint, theirs: Fingerprint, who: str) -> None:
    """Refuse a worker that sees the cache in another way.

    Args:
        ours: the scheduler's.
        theirs: the worker's.
        who: names the worker in the message.

    Raises:
        UnsupportedError: they differ.
    """
    if ours == theirs:
        return
    differences = "; ".join(
        f"{name} is {there!r} there and {here!r} in the scheduler"
        for name, here, there in zip(Fingerprint._fields, ours, theirs, strict=True)
        if here != there
    )
    raise UnsupportedError(
        f"{who} does not fit the scheduler: {differences}. Start all processes of an engine from the same "
        f"installation with the same settings"
    )
