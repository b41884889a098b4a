"""A rank that fetches from peers: makes the medium that they are, as a place below the pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from offload.fleet_config import TlsFiles
from offload.peering.tls import client_context
from offload.worker.media.base import PoolSlots
from offload.worker.media.peers import PeerMedium
from offload.worker.media.runner import MakeRunner, Runner
from offload.worker.peers.addresses import Addresses, Resolve, resolve
from offload.worker.peers.client import Dial
from offload.worker.peers.fleet import Fleet
from offload.worker.peers.landing import make_landing
from offload.worker.peers.link import dial
from offload.worker.peers.listener import about_rank
from offload.worker.peers.peer import Caller
from offload.worker.replicas import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """From whom a rank fetches, and who it is.

    Attributes:
        peers: as ``FleetConfig`` has them, checked.
        rank: this one; it fetches from those of the same rank, which listen at the named ports plus this.
        world_size: ranks of the engine.
        namespace: all that must be equal for KV to be usable, as text.
        columns: slots of a position.
        peer: by which others know this engine, so that it does not fetch from itself; empty: it does not
            listen.
        key: the fleet's; empty: there is none.
        tls: with what connections are encrypted; None: they are in clear.
        has_nixl: peers that are elsewhere are read by NIXL if they have it, too.
    """

    peers: tuple[str, ...]
    rank: int
    world_size: int
    namespace: str
    columns: int
    peer: bytes = b""
    key: bytes = b""
    tls: TlsFiles | None = None
    has_nixl: bool = False


def peer_medium(
    plan: FetchPlan,
    slots: PoolSlots,
    share: Share,
    *,
    make_runner: MakeRunner = Runner,
    clock: Callable[[], float] = time.monotonic,
    call: Dial | None = None,
    resolve: Resolve = resolve,
    has_threads: bool = True,
) -> PeerMedium:
    """The pools of these peers. Lanes are those of siblings: ``sibling_lanes(fetch, probe, medium, pool)``.

    Its jobs are those of ``SiblingMedium``: extents by name, of any size, with a suffix. In addition a job
    may name one peer (``life``), and a PROBE may be a release. ``statuses()`` of it tells of each peer.

    For runs that must be the same every time: an inline runner, ``call`` with links that tests carry,
    ``has_threads=False``, and ``fleet.tend()`` of the medium now and then, which connects.

    Args:
        plan: from whom, and for whom.
        slots: the pool's on this rank.
        share: this rank's of what fills the pool.
        make_runner: makes what moves extents.
        clock: in seconds.
        call: connects to a host's port; None: over TCP, with TLS if the plan says so.
        resolve: finds addresses of names.
        has_threads: else nothing is connected by itself.

    Raises:
        ConfigError: files of TLS are not as they must be.
    """
    context = None if plan.tls is None else client_context(plan.tls)
    about = about_rank(
        plan.namespace, plan.rank, plan.world_size, share, slots.slot_bytes, plan.columns, plan.peer
    )
    caller = Caller(
        call or (lambda host, port: dial(host, port, context)),
        plan.key,
        about,
        slots,
        context is not None,
        make_landing(slots.slot_bytes) if plan.has_nixl else None,
    )
    addresses = Addresses(plan.peers, plan.rank, resolve=resolve, clock=clock)
    fleet = Fleet(addresses, caller, clock=clock, has_threads=has_threads)
    return PeerMedium(fleet, slots, make_runner=make_runner, clock=clock)
