"""A peer as this rank knows it: its connections, whether it answers, and what it has brought."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from offload.fleet_config import Address
from offload.messages import PeerLife, Unused
from offload.peering.talk import RefusedError
from offload.worker.media.base import AbsentError, PoolSlots
from offload.worker.peers.client import Client, Dial
from offload.worker.peers.landing import Landing, NixlPool
from offload.worker.peers.near import NearPool
from offload.worker.peers.nixl import NixlError
from offload.worker.peers.protocol import About
from offload.worker.peers.shortcuts import Shortcuts

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE, REFUSED_PAUSE = 0.1, 5.0, 30.0
PING_SECONDS = 2.0
MOST_WRONG = 3
_MOST_IDLE = 8

T = TypeVar("T")


class PeerState(StrEnum):
    """What a peer is to this rank."""

    NEW = "connecting"
    """It has not been reached yet."""
    UP = "connected"
    GONE = "gone"
    """It was tried, and does not answer."""
    REFUSED = "refused"
    """One of the two has a reason not to have to do with the other."""
    SELF = "this engine"


class Transport(StrEnum):
    """How a peer's bytes come."""

    MEMORY = "memory"
    TCP = "tcp"
    TLS = "tls"
    NIXL = "nixl"


class PeerStatus(NamedTuple):
    """What there is to tell of a peer; plain data.

    Attributes:
        address: of its rank.
        peer: its id, 16 hexadecimal digits; "" if it is not known yet.
        epoch: names its life; the same.
        state: of ``PeerState``.
        reason: why it is not connected; "" if it is.
        transport: of ``Transport``; "" if it is not connected.
        nbytes: of slots that it has brought, and that were right.
        seconds: that this took.
        gets: times that it was asked for slots.
        probes: times that it was asked for names.
        misses: extents that it was asked for and had not.
        errors: times that it failed, or that what it brought was wrong.
    """

    address: str
    peer: str
    epoch: str
    state: str
    reason: str
    transport: str
    nbytes: int
    seconds: float
    gets: int
    probes: int
    misses: int
    errors: int


class Caller(NamedTuple):
    """How peers are called.

    Attributes:
        dial: connects.
        key: the fleet's; empty: there is none.
        about: what they must have in common with this rank.
        pool: whose slots they fill.
        is_tls: whether connections are encrypted.
        landing: where bytes arrive that NIXL reads; None: it is not used.
    """

    dial: Dial
    key: bytes
    about: About
    pool: PoolSlots
    is_tls: bool = False
    landing: Landing | None = None


@dataclass(slots=True)
class Count:
    """What became of asking a peer; see ``PeerStatus``."""

    nbytes: int = 0
    seconds: float = 0.0
    gets: int = 0
    probes: int = 0
    misses: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class _Idle:
    """Connections that nobody uses, and all of them."""

    clients: list[Client] = field(default_factory=list)
    all: set[Client] = field(default_factory=set)


class Peer:
    """One of them. For several threads: it is asked on all, and tended on one.

    A peer that fails is asked no more until a pause is over, which grows. Then it is tried once.
    """

    def __init__(self, address: Address, caller: Caller, clock: Callable[[], float] = time.monotonic) -> None:
        """Not reached yet."""
        self.address = address
        self.count = Count()
        self.state = PeerState.NEW
        self.life = PeerLife("")
        self.suffix = b""
        self._caller = caller
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = _Idle()
        self._reason = ""
        self._pause, self._until = 0.0, 0.0
        self._asked_at = 0.0
        self._shortcuts = Shortcuts(address.shown, caller.pool.slot_bytes, clock)
        self._is_closed = False
        self._num_wrong = 0

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self.state is PeerState.UP

    @property
    def due(self) -> float:
        """When it is to be tended next, by the clock."""
        return self._asked_at + PING_SECONDS if self.is_up else self._until

    def near(self, client: Client) -> NearPool | None:
        """Its pool as that connection knows it, if that is on this machine and can be had."""
        return self._shortcuts.near(client.memory)

    def far(self, client: Client) -> NixlPool | None:
        """The same, to be read by NIXL, if that works."""
        return self._shortcuts.far(client.reachable)

    def give_up_nixl(self, error: NixlError) -> None:
        """It has failed: slots come over TCP for a while."""
        with self._lock:
            self.count.errors += 1
        self._shortcuts.give_up_nixl(error)

    def nixl_works(self) -> None:
        """It has brought what it was to bring."""
        self._shortcuts.nixl_works()

    def tend(self) -> None:
        """Connect, or ask whether it is there, if it is time to. May wait."""
        if self._clock() < self.due or self._is_closed:
            return
        try:
            self.ask(lambda client: client.ping(), is_trial=True)
        except (OSError, AbsentError):
            return  # it is known by now

    def ask(self, work: Callable[[Client], T], *, is_trial: bool = False) -> T:
        """Work with a connection; with a new one if an old one has been closed meanwhile.

        Raises:
            AbsentError: it is not to be asked now.
            OSError: it has failed.
        """
        if not (self.is_up or is_trial):
            raise AbsentError(f"the peer {self.address.shown} is {self.state.value}", Unused.UNREACHABLE)
        try:
            client = self._take()
            if client is not None:
                try:
                    return self._with(client, work)
                except TimeoutError:
                    raise
                except OSError:
                    self._drop_idle()  # these are as old
            if self._is_closed:
                raise ConnectionAbortedError("it is being closed")
            return self._with(self._connect(), work)
        except OSError as error:
            self._lost(error)
            raise

    def judge(self, *, is_wrong: bool) -> None:
        """What it has brought was right or wrong. Who is wrong again and again is not asked for a while."""
        self._num_wrong = self._num_wrong + 1 if is_wrong else 0
        self.count.errors += is_wrong
        if self._num_wrong >= MOST_WRONG:
            self._num_wrong = 0
            self._lost(ConnectionError(f"it has sent wrong bytes {MOST_WRONG} times"))

    def status(self) -> PeerStatus:
        """What there is to tell of it."""
        count, is_up = self.count, self.is_up
        transport = ""
        if is_up:
            over = Transport.TLS if self._caller.is_tls else Transport.TCP
            far = Transport.NIXL if self._shortcuts.is_far else over
            transport = Transport.MEMORY if self._shortcuts.is_near else far
        return PeerStatus(
            self.address.shown,
            self.life.peer,
            self.life.epoch,
            str(self.state),
            "" if is_up else self._reason,
            str(transport),
            *(count.nbytes, count.seconds, count.gets, count.probes, count.misses, count.errors),
        )

    def close(self) -> None:
        """Close all connections, also those on which somebody waits. Idempotent."""
        self._is_closed = True
        with self._lock:
            clients, self._idle = list(self._idle.all), _Idle()
            self.state = PeerState.GONE
        self._shortcuts.close()
        for client in clients:
            client.close()

    def check_invariants(self) -> None:
        """Whoever is idle is known, and pauses are as long as they may be."""
        with self._lock:
            assert set(self._idle.clients) <= self._idle.all, "an idle connection is not known"
            assert len(self._idle.clients) <= _MOST_IDLE, f"{len(self._idle.clients)} idle connections"
        self._shortcuts.check_invariants()
        assert 0.0 <= self._pause <= REFUSED_PAUSE, f"a pause of {self._pause} s"

    # Private

    def _take(self) -> Client | None:
        with self._lock:
            return self._idle.clients.pop() if self._idle.clients else None

    def _with(self, client: Client, work: Callable[[Client], T]) -> T:
        is_good = False
        try:
            found = work(client)
            is_good = True
        finally:
            with self._lock:
                stays = is_good and client in self._idle.all and len(self._idle.clients) < _MOST_IDLE
                if stays:
                    self._idle.clients.append(client)
                else:
                    self._idle.all.discard(client)
            if not stays:
                client.close()
        self._learn(client)
        return found

    def _connect(self) -> Client:
        caller = self._caller
        link = caller.dial(self.address.host, self.address.port)
        client = Client(link, caller.key, caller.about, caller.pool)
        if caller.about.peer and client.about.peer == caller.about.peer:
            client.close()
            raise _SelfError("it is this engine")
        with self._lock:
            if not self._is_closed:
                self._idle.all.add(client)
        if self._is_closed:
            client.close()
            raise ConnectionAbortedError("it is being closed")
        self._shortcuts.map(client.memory)
        if caller.landing is not None and self.near(client) is None:
            try:
                self._shortcuts.meet(client.reach(), caller.landing)
            except BaseException:
                with self._lock:
                    self._idle.all.discard(client)
                client.close()
                raise
        return client

    def _learn(self, client: Client) -> None:
        """It has answered."""
        was = self.state
        with self._lock:
            if self._is_closed:
                return
            self.life, self.suffix, self._asked_at = client.life, client.suffix, self._clock()
            self.state, self._reason, self._pause = PeerState.UP, "", 0.0
        if was is not PeerState.UP:
            logger.info("the peer %s is connected: %s", self.address.shown, self.life.peer)

    def _lost(self, error: OSError) -> None:
        """It has failed; nobody asks it for a while."""
        self.count.errors += 1
        self._drop_idle()
        was = self.state
        with self._lock:
            if isinstance(error, _SelfError):
                self.state, self._pause = PeerState.SELF, REFUSED_PAUSE
            elif isinstance(error, RefusedError):
                self.state, self._pause = PeerState.REFUSED, min(max(2 * self._pause, 1.0), REFUSED_PAUSE)
            else:
                self.state = PeerState.GONE
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._reason = str(error) or type(error).__name__
            self._until = self._clock() + self._pause
            self._shortcuts.unmap()
        if was is not self.state and self.state is not PeerState.SELF and not self._is_closed:
            logger.warning(
                "the peer %s is %s: %s. It is tried again every %g s; requests are served without it",
                *(self.address.shown, self.state.value, self._reason),
                REFUSED_PAUSE if self.state is PeerState.REFUSED else LONGEST_PAUSE,
            )

    def _drop_idle(self) -> None:
        with self._lock:
            clients, self._idle.clients = self._idle.clients, []
            self._idle.all.difference_update(clients)
        for client in clients:
            client.close()


class _SelfError(OSError):
    """This engine has called itself."""
