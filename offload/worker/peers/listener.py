"""A rank that listens: what its plans say of the pool is shown to peers, and what they say is reported."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from offload.fleet_config import Address, TlsFiles
from offload.messages import StepPlan, WorkerReport
from offload.peer_messages import AskerFacts
from offload.peering.tls import server_context
from offload.worker.media.base import PoolSlots
from offload.worker.peers.handshake import describe_machine, describe_namespace
from offload.worker.peers.locator import HashPrompt, Locator
from offload.worker.peers.nixl import Exposed, expose
from offload.worker.peers.protocol import About, Memory
from offload.worker.peers.server import PeerServer, listen
from offload.worker.peers.shown import Shown, Standing
from offload.worker.pool.segment import machine
from offload.worker.replicas import Share, Sharing

_FACTS_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenPlan:
    """Where a rank listens, and for whom.

    Attributes:
        address: of rank 0; rank r has ``port + r``.
        rank: this one.
        world_size: ranks of the engine.
        namespace: all that must be equal for KV to be usable, as text.
        columns: slots of a position.
        peer: by which others know the engine.
        key: the fleet's; empty: there is none.
        tls: with what connections are encrypted; None: they are in clear.
        hash_prompt: makes prefix hashes of prompts that are asked about; None: another rank is asked.
        has_bags: requests can go on only where there is a bag.
        has_nixl: peers may read the pool by NIXL, too.
    """

    address: Address
    rank: int
    world_size: int
    namespace: str
    columns: int
    peer: bytes
    key: bytes = b""
    tls: TlsFiles | None = None
    hash_prompt: HashPrompt | None = None
    has_bags: bool = False
    has_nixl: bool = False


class Door(Protocol):
    """What peers come through: a server, or what tests have in its place."""

    def standings(self) -> list[Standing]:
        """Who is connected."""

    def close(self, seconds: float) -> bool:
        """Cut all off. Returns whether nothing reads the pool any more."""


OpenDoor = Callable[[Shown], Door]
"""Opens it, once there is something to show."""


def bind(plan: ListenPlan) -> OpenDoor:
    """Take the port, so that nobody else has it when there is something to show.

    Raises:
        ConfigError: it cannot be had, or files of TLS are not as they must be.
    """
    context = None if plan.tls is None else server_context(plan.tls)
    listening = listen(plan.address, plan.rank)
    return lambda shown: PeerServer(listening, shown, plan.key, context)


def about_rank(
    namespace: str, rank: int, world_size: int, share: Share, slot_bytes: int, columns: int, peer: bytes = b""
) -> About:
    """What a rank must have in common with those of other engines that it gives KV to, or takes it from."""
    try:
        here = describe_machine(machine())
    except OSError:  # no /proc: nobody is near
        here = b""
    digests = describe_namespace(namespace)
    return About(
        digests, rank, world_size, share.part, share.num_parts, slot_bytes, columns, machine=here, peer=peer
    )


class Listener:
    """Of one rank. Nothing here waits, but closing it."""

    def __init__(self, plan: ListenPlan, bind: Callable[[ListenPlan], OpenDoor] = bind) -> None:
        """Take the port. Raises ConfigError: it cannot be had."""
        self._plan = plan
        self._open_door = bind(plan)
        self._door: Door | None = None
        self._sharing: Sharing | None = None
        self._executor: Executor | None = None
        self._told: list[AskerFacts] = []
        self._told_at = -math.inf
        self._served_bytes = 0  # of which the scheduler was told
        self._exposed: Exposed | None = None
        self.shown: Shown | None = None
        """What peers are shown, once the pool is there."""

    def open(self, sharing: Sharing, slots: PoolSlots, make_executor: Callable[[], Executor]) -> None:
        """The pool is there. It is shown from the first plan on. ``sharing``: as it was mapped."""
        plan, segment, tables = self._plan, sharing.segment, sharing.tables
        assert segment is not None and tables is not None, "others cannot look into the pool"
        about = about_rank(
            plan.namespace,
            plan.rank,
            plan.world_size,
            sharing.share,
            slots.slot_bytes,
            plan.columns,
            plan.peer,
        )
        where = segment.here
        memory = None
        if sharing.lasting is None:  # files may be shortened, which would end whoever maps them
            memory = Memory(where.pid, where.fd, where.label, where.nbytes, slots.num_slots)
        adopted = None if sharing.lasting is None else sharing.lasting.facts.kept
        self._sharing = sharing
        self._executor = make_executor()
        self.shown = Shown(about, slots, tables, memory, adopted)
        if plan.hash_prompt is not None:
            self.shown.locator = Locator(plan.hash_prompt, plan.columns, plan.has_bags)
        if plan.has_nixl and (exposed := expose(slots)) is not None:
            self._exposed, self.shown.reachable = exposed, exposed.reachable
        self._door = self._open_door(self.shown)

    def tell(self, plan: StepPlan) -> None:
        """What a plan says of the pool is shown, a moment later."""
        if self.shown is None or self._executor is None:
            return
        with suppress(RuntimeError):  # no more threads: peers do without it
            if plan.listening is not None:
                self._executor.submit(self.shown.begin, plan.listening)
            for kept in plan.kept:
                self._executor.submit(self.shown.keep, kept)
            if plan.verdicts:
                self._executor.submit(self.shown.judge, plan.verdicts)

    def report_into(self, report: WorkerReport) -> None:
        """Tips of what peers need no more, by the engine's first rank; and how those that ask stand.

        The second is told twice a second at most, of those of which something has changed.
        """
        if self.shown is None:
            return
        if not self._plan.rank:
            report.released += self.shown.take_released()
        now = time.monotonic()
        if now >= self._told_at + _FACTS_SECONDS:
            before, self._told_at = set(self._told), now
            self._told = self.shown.askers.facts(self._plan.rank)
            report.askers += [each for each in self._told if each not in before]
            served = self.shown.askers.served_bytes
            report.served_bytes += served - self._served_bytes
            self._served_bytes = served

    def standings(self) -> list[Standing]:
        """Who is connected."""
        return [] if self._door is None else self._door.standings()

    def close(self, seconds: float) -> bool:
        """Nobody is shown anything any more. Returns whether nothing reads the pool. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()
        is_closed = self._door is None or self._door.close(seconds)
        if self._exposed is not None:
            self._exposed.close()
        sharing, self._sharing = self._sharing, None
        if sharing is not None and sharing.lasting is None and sharing.segment is not None:
            sharing.segment.close()
        return is_closed
