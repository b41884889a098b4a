"""Hand-offs as vLLM sees them: where this engine listens, and what it is called by others."""

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.fleet_config import Address, FleetConfig, peer_name, read_fleet_key
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.worker.peers.listener import Listener, ListenPlan

_LAST_PORT = 65535


def listens_at(vllm_config: VllmConfig, fleet: FleetConfig) -> Address | None:
    """Where rank 0 of this engine listens; rank r has ``port + r``. None: nobody can fetch from it.

    Engines that run data-parallel have ports behind each other's.

    Raises:
        ConfigError: a rank would have no port.
    """
    first = fleet.listens_at
    if first is None:
        return None
    parallel = vllm_config.parallel_config
    port = first.port + parallel.data_parallel_index * parallel.world_size
    if port + parallel.world_size - 1 > _LAST_PORT:
        raise ConfigError(
            f"listen is {fleet.listen!r}, and the last rank would listen at port "
            f"{port + parallel.world_size - 1}; give a lower port: each rank of each data-parallel engine "
            f"has one of its own"
        )
    return Address(first.host, port)


def peer_of(vllm_config: VllmConfig, fleet: FleetConfig) -> bytes | None:
    """By which others know this engine; None: they do not.

    Raises:
        ConfigError: as ``listens_at``.
    """
    address = listens_at(vllm_config, fleet)
    return None if address is None else peer_name(address)


def listener_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> Listener | None:
    """In a worker: takes this rank's port; None: nobody can fetch from this engine.

    Raises:
        ConfigError: as ``listens_at``, or the port cannot be had, or a file is not as it must be.
    """
    fleet, parallel = config.fleet, vllm_config.parallel_config
    address = listens_at(vllm_config, fleet)
    if address is None:
        return None
    groups = shape_of(kv_cache_config)
    return Listener(
        ListenPlan(
            address=address,
            rank=parallel.rank,
            world_size=parallel.world_size,
            namespace=namespace_of(vllm_config, kv_cache_config),
            columns=1 if groups is None else groups.columns,
            peer=peer_name(address),
            key=b"" if fleet.fleet_key_file is None else read_fleet_key(fleet.fleet_key_file),
            tls=fleet.fleet_tls,
        )
    )
