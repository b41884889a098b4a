"""A network within one process: virtual engines that listen, and seeded harm to what goes between them."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.config import OffloadConfig
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.tier import TierLimits, make_peers
from offload.testing.media.inline import InlineRunner
from offload.testing.media.links import JoinedLink
from offload.vllm.hand_offs import listen_plan
from offload.vllm.peers import FETCH, PROBE, fetch_plan, peer_lanes_of
from offload.vllm.places import Place
from offload.worker.media.lane import PoolParts
from offload.worker.media.peers import PeerMedium
from offload.worker.peers.fetching import peer_medium
from offload.worker.peers.link import LostError
from offload.worker.peers.listener import Listener, ListenPlan, OpenDoor
from offload.worker.peers.shown import Shown, Standing

if TYPE_CHECKING:
    from offload.messages import TierFacts
    from offload.testing.virtual.engine import VirtualEngine


@dataclass(frozen=True, slots=True)
class Harm:
    """How often what happens, to each piece of bytes on its way, or to each call.

    Attributes:
        refuse: of calls: nobody answers.
        cut: the connection is lost.
        truncate: the rest of the piece is lost, and the connection with it.
        corrupt: a bit of it is another one.
        duplicate: it comes twice.
        reorder: it changes places with the one behind it.
        stall: nothing comes, until whoever waits gives up.
        split: it comes in several pieces.
    """

    refuse: float = 0.0
    cut: float = 0.0
    truncate: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    stall: float = 0.0
    split: float = 0.0


@dataclass(slots=True, eq=False)
class _Door:
    """What a virtual rank is reached through."""

    network: "VirtualNetwork"
    where: tuple[str, int]
    shown: Shown
    key: bytes
    links: list[JoinedLink] = field(default_factory=list)

    def standings(self) -> list[Standing]:
        return []

    def close(self, seconds: float) -> bool:
        if self.network.doors.get(self.where) is self:
            del self.network.doors[self.where]
        for link in self.links:
            link.hang_up()
        return True


class VirtualNetwork:
    """Where virtual engines listen, and call each other. The protocol is the product's own.

    Attributes:
        doors: by address and port.
        cut_off: addresses that nobody reaches, and that reach nobody.
        harm: what happens by itself.
        counts: of what has happened.
        engines: that have met here, also those that are over.
        media: through which engines fetch, in the order in which their ranks were made.
        during: called before each piece of bytes that a peer sends.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        harm: Harm = Harm(),
        *,
        is_far: bool = True,
    ) -> None:
        """Nobody listens. ``is_far``: nobody can look into another's pool."""
        self.rng = random.Random(0) if rng is None else rng
        self.harm = harm
        self._is_far = is_far
        self.doors: dict[tuple[str, int], _Door] = {}
        self.cut_off: set[tuple[str, int]] = set()
        self.counts: Counter[str] = Counter()
        self.media: list[PeerMedium] = []
        self.engines: list[VirtualEngine] = []
        self.during: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        return f"VirtualNetwork(harm={self.harm})"

    @property
    def is_disturbed(self) -> bool:
        """Whether something was done to what went over it, or to what any engine has."""
        done = [self.counts[each] for each in ("corrupt", "duplicate", "reorder", "truncate")]
        done += [engine.counts["rot"] for engine in self.engines]
        done += [copier.num_faults for engine in self.engines for copier in engine.copiers]
        return any(done)

    # What engines are made with

    def listener(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
    ) -> Listener | None:
        """As ``offload.vllm.hand_offs.listener_of``."""
        plan = listen_plan(vllm_config, kv_cache_config, config)
        return None if plan is None else Listener(plan, self._bind)

    def places(
        self,
        limits: TierLimits,
        extent_bytes: int,
        clock: Callable[[], float],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: OffloadConfig,
    ) -> list[Place]:
        """As ``offload.vllm.peers.peer_places``."""
        if not config.fleet.peers:
            return []
        plan = fetch_plan(vllm_config, kv_cache_config, config)

        def make_flows(common: Common, facts: "Sequence[TierFacts]") -> Below:
            wait_seconds = config.fleet.peer_wait_seconds
            return make_peers(FETCH, PROBE, common, facts, limits, extent_bytes, wait_seconds)

        def make_lanes(pool: PoolParts) -> Any:
            return peer_lanes_of(plan, pool, partial(self._medium, clock))

        return [Place(make_flows, make_lanes)]

    def tend(self) -> None:
        """Engines call whom they have not reached, if it is time to."""
        self.media = [medium for medium in self.media if not medium.fleet.is_closed]
        for medium in self.media:
            medium.fleet.tend()

    def check_invariants(self) -> None:
        """Those through which engines fetch agree with themselves."""
        for medium in self.media:
            medium.check_invariants()

    # Private

    def _bind(self, plan: ListenPlan) -> OpenDoor:
        where = (plan.address.host, plan.address.port + plan.rank)

        def open_door(shown: Shown) -> _Door:
            if self._is_far:
                shown.memory = None
            self.doors[where] = _Door(self, where, shown, plan.key)
            return self.doors[where]

        return open_door

    def _medium(self, clock: Callable[[], float], plan: Any, *parts: Any) -> PeerMedium:
        medium = peer_medium(
            plan,
            *parts,
            make_runner=InlineRunner,
            clock=clock,
            call=self._call,
            resolve=lambda host: [host],
            has_threads=False,
        )
        self.media.append(medium)
        return medium

    def _call(self, host: str, port: int) -> JoinedLink:
        door = self.doors.get((host, port))
        if door is None or (host, port) in self.cut_off or self._happens("refuse"):
            raise ConnectionRefusedError("nobody listens there")
        later: list[bytes] = []
        link = JoinedLink(
            door.shown,
            door.key,
            to_peer=lambda sent: self._carry(door, sent, []),
            from_peer=lambda sent: self._carry(door, sent, later),
        )
        door.links.append(link)
        self.counts["calls"] += 1
        return link

    def _carry(self, door: _Door, sent: bytes, later: list[bytes]) -> list[bytes]:
        """What arrives of a piece. Raises LostError, TimeoutError."""
        self.during()
        if door.where in self.cut_off or self._happens("stall"):
            raise TimeoutError("nothing comes any more")
        if self.doors.get(door.where) is not door or self._happens("cut"):
            raise LostError("the connection is lost")
        self.counts["bytes"] += len(sent)
        if sent and self._happens("corrupt"):
            at = self.rng.randrange(len(sent))
            sent = sent[:at] + bytes([sent[at] ^ 1 << self.rng.randrange(8)]) + sent[at + 1 :]
        if sent and self._happens("truncate"):
            sent = sent[: self.rng.randrange(len(sent))]
            for link in door.links:
                link.hang_up()
        pieces = [*later, sent]
        later.clear()
        if self._happens("duplicate"):
            pieces.append(sent)
        if self._happens("reorder"):
            later.append(pieces.pop())
            pieces.reverse()
        if len(sent) > 1 and self._happens("split"):
            at = self.rng.randrange(1, len(sent))
            pieces = [part for piece in pieces for part in (piece[:at], piece[at:])]
        return pieces

    def _happens(self, what: str) -> bool:
        chance = getattr(self.harm, what)
        if not chance or self.rng.random() >= chance:
            return False
        self.counts[what] += 1
        return True


def _nothing() -> None:
    """Nobody does anything meanwhile."""
