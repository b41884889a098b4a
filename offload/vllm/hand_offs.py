"""Hand-offs as vLLM sees them: where an engine listens, what others call it, what its clients are told."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.errors import ConfigError, UnsupportedError
from offload.fleet_config import Address, FleetConfig, Role, peer_name, read_fleet_key
from offload.scheduler.side import SchedulerSide
from offload.transfer_params import REPORT, KVTransferParams
from offload.vllm.groups import shape_of
from offload.vllm.namespace import namespace_of
from offload.vllm.plugin import CONNECTOR
from offload.vllm.prompt_hashes import hashes_of
from offload.worker.peers.listener import Listener, ListenPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LAST_PORT = 65535
_OF_REFERENCES = ("Nixl", "Mooncake", "MoRIIO")
"""How connectors begin that take ``do_remote_prefill`` for their own, and end the engine without their keys.
Mooncake's store does not: it reads no parameters."""
_HARMLESS = ("MooncakeStoreConnector",)


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
        ConfigError: as ``listen_plan``, or the port cannot be had.
    """
    plan = listen_plan(vllm_config, kv_cache_config, config)
    return None if plan is None else Listener(plan)


def listen_plan(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
) -> ListenPlan | None:
    """Where this rank listens, and for whom; None: nobody can fetch from this engine.

    Raises:
        ConfigError: as ``listens_at``, or a file is not as it must be.
    """
    fleet, parallel = config.fleet, vllm_config.parallel_config
    address = listens_at(vllm_config, fleet)
    if address is None:
        return None
    groups = shape_of(kv_cache_config)
    return ListenPlan(
        address=address,
        rank=parallel.rank,
        world_size=parallel.world_size,
        namespace=namespace_of(vllm_config, kv_cache_config),
        columns=1 if groups is None else groups.columns,
        peer=peer_name(address),
        key=b"" if fleet.fleet_key_file is None else read_fleet_key(fleet.fleet_key_file),
        tls=fleet.fleet_tls,
        has_nixl=fleet.has_nixl,
        hash_prompt=hashes_of(vllm_config, kv_cache_config) if parallel.rank == 0 else None,
        has_bags=groups is not None and groups.has_bags,
    )


def as_params(told: KVTransferParams, vllm_config: VllmConfig) -> dict[str, Any]:
    """What a response says of a hand-off.

    Inside a MultiConnector ``do_remote_prefill`` is left out: two connectors that say the same key end the
    engine, and others say this one.
    """
    transfer = vllm_config.kv_transfer_config
    is_alone = transfer is not None and transfer.kv_connector == CONNECTOR
    return (told if is_alone else replace(told, do_remote_prefill=False)).to_dict()


def told_of(side: SchedulerSide, request: "Request", vllm_config: VllmConfig) -> dict[str, Any] | None:
    """``request`` is over: what its response says in ``kv_transfer_params``; None: nothing.

    One that was to be handed off has no report: whoever passes its answer on would send that to an engine.
    """
    told = side.finish(request)
    if told is not None:
        return as_params(told, vllm_config)
    report = side.notes.report(request.request_id)
    return None if report is None else {REPORT: report}


def check_siblings_of_peers(vllm_config: VllmConfig, fleet: FleetConfig) -> None:
    """Refuse ``peers`` beside connectors whose own word for KV that comes from elsewhere is ours, too.

    Raises:
        UnsupportedError: there is such a one.
    """
    transfer = vllm_config.kv_transfer_config
    if not fleet.peers or transfer is None or transfer.kv_connector == CONNECTOR:
        return
    extra = transfer.kv_connector_extra_config or {}
    names = [str(child.get("kv_connector")) for child in extra.get("connectors", [])]
    clashing = [name for name in names if name.startswith(_OF_REFERENCES) and name not in _HARMLESS]
    if clashing:
        raise UnsupportedError(
            f"peers has {list(fleet.peers)!r} beside {clashing[0]}, which ends the engine when a request "
            f"says do_remote_prefill without its own keys, as those do that our peers hand off; remove "
            f"peers, or {clashing[0]}"
        )


def owes_delivery(fleet: FleetConfig) -> bool:
    """Whether a request that was preempted with a step under way is computed again rather than end with it.

    It has lost its blocks, so a prompt that such a step ends could not be stored.
    """
    return fleet.role is Role.PREFILL
