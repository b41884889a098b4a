"""Hand-offs as vLLM sees them: where this engine listens, and what it is called by others."""

from vllm.config import VllmConfig

from offload.errors import ConfigError
from offload.fleet_config import Address, FleetConfig, peer_name

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
