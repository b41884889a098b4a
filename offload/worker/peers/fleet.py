"""All peers of a rank: found, connected and asked beside each other, none of which can hold up another."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from offload.fleet_config import Address
from offload.peer_messages import PeerLife, Unused
from offload.worker.media.base import AbsentError
from offload.worker.peers.addresses import Addresses
from offload.worker.peers.peer import Caller, Peer, PeerStatus

logger = logging.getLogger(__name__)

_PING_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""So often files of peers are looked at. Names are looked up less often."""
_TURN_SECONDS = 0.5
_LONG_SECONDS = 0.2
"""A peer that is at one question for so long is not asked another, until it has answered."""
_MOST_GIVEN = 64
"""Things to do that wait for a peer's thread."""

T = TypeVar("T")


class Fleet:
    """With a thread for each peer, which connects and asks, and one that finds out where peers are.

    Without threads, for runs that must be the same every time, ``tend`` does what they would do.
    """

    def __init__(
        self,
        addresses: Addresses,
        caller: Caller,
        *,
        clock: Callable[[], float] = time.monotonic,
        has_threads: bool = True,
    ) -> None:
        """Begin to look for them.

        Args:
            addresses: where they are.
            caller: how they are called.
            clock: in seconds.
            has_threads: else nothing happens by itself.
        """
        self._addresses = addresses
        self._caller = caller
        self._clock = clock
        self._peers: dict[Address, Peer] = {}
        self._threads: dict[Address, _PeerThread] = {}
        self._has_threads = has_threads
        self._closing = threading.Event()
        self._lookout: threading.Thread | None = None
        if has_threads:
            self._lookout = threading.Thread(target=self._look_out, name="kv-offload-fleet", daemon=True)
            self._lookout.start()

    @property
    def peers(self) -> list[Peer]:
        """All that are known, reached or not."""
        return list(self._peers.values())

    @property
    def is_closed(self) -> bool:
        """Whether nobody is asked any more."""
        return self._closing.is_set()

    def up(self, suffix: bytes) -> list[Peer]:
        """Those that may be asked for names with that suffix, each once."""
        found: dict[str, Peer] = {}
        for peer in self.peers:
            if peer.is_up and peer.suffix == suffix:
                found.setdefault(peer.life.peer, peer)
        return list(found.values())

    def of(self, life: PeerLife) -> Peer:
        """The one that is meant. Asks it if it is not known to be in that life.

        Raises:
            AbsentError: there is none, or it cannot be asked, or it is in another life.
        """
        known = [peer for peer in self.peers if peer.life.peer == life.peer]
        if not known:
            raise AbsentError(f"no peer has the id {life.peer}", Unused.UNKNOWN_PEER)
        up = [peer for peer in known if peer.is_up]
        for peer in up:
            if life.epoch in ("", peer.life.epoch):
                return peer
        self.ask(up, lambda peer: peer.ask(lambda client: client.ping()), _PING_SECONDS)
        for peer in up:  # it may be in another life than when it was asked last
            if life.epoch == peer.life.epoch:
                return peer
        if up:
            raise AbsentError(f"the peer {life.peer} was started again, or reset", Unused.OLD_EPOCH)
        raise AbsentError(f"the peer {life.peer} is {known[0].state.value}", Unused.UNREACHABLE)

    def ask(self, peers: Iterable[Peer], work: Callable[[Peer], T], seconds: float) -> list[tuple[Peer, T]]:
        """Do that with all of these at once, and wait for so long at most. Those that fail are left out."""
        if not self._has_threads:
            tried = [(peer, _tried(peer, work)) for peer in peers]
            return [(peer, answer) for peer, answer in tried if answer is not None]
        answers: queue.SimpleQueue[tuple[Peer, T | None]] = queue.SimpleQueue()
        waits_for, until = 0, time.monotonic() + seconds
        for peer in peers:
            thread = self._threads.get(peer.address)
            waits_for += thread is not None and thread.give(
                lambda peer: answers.put((peer, _tried(peer, work)))
            )
        found: list[tuple[Peer, T]] = []
        for _ in range(waits_for):
            try:
                peer, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if answer is not None:
                found.append((peer, answer))
        return found

    def tend(self) -> None:
        """Look for peers, and connect or ask those that it is time for. May wait as long as that takes."""
        self._meet(self._addresses.look())
        if not self._has_threads:
            for peer in self.peers:
                peer.tend()

    def statuses(self) -> list[PeerStatus]:
        """What there is to tell of all of them."""
        return [peer.status() for peer in self.peers]

    def close(self, seconds: float) -> bool:
        """Close all connections. Returns whether all threads have ended, after so long at most."""
        self._closing.set()
        until = time.monotonic() + seconds
        threads = list(self._threads.values())
        for peer in self.peers:
            peer.close()
        for each in threads:
            each.stop()
        waits = [each.thread for each in threads]
        if self._lookout is not None:
            waits.append(self._lookout)
        for thread in waits:
            thread.join(max(0.0, until - time.monotonic()))
        if self._caller.landing is not None:
            self._caller.landing.close()
        return not any(thread.is_alive() for thread in waits)

    def check_invariants(self) -> None:
        """Each peer is known by its address, and has a thread if any has."""
        for address, peer in list(self._peers.items()):
            assert peer.address == address, f"{peer.address} is known as {address}"
            peer.check_invariants()
        assert not self._has_threads or self._threads.keys() >= self._peers.keys(), "a peer without a thread"
        self._addresses.check_invariants()

    # Private

    def _look_out(self) -> None:
        while not self._closing.is_set():
            try:
                self.tend()
            except Exception as error:  # whatever it is, peers that are known stay
                logger.warning("peers cannot be looked for: %r", error)
            self._closing.wait(LOOK_SECONDS)

    def _meet(self, addresses: Iterable[Address]) -> None:
        """There are these now, and no others."""
        wanted = dict.fromkeys(addresses)
        if self._closing.is_set():
            return
        for address in wanted.keys() - self._peers.keys():
            peer = Peer(address, self._caller, self._clock)
            if self._has_threads:
                self._threads[address] = _PeerThread(peer)
            self._peers[address] = peer
        for address in self._peers.keys() - wanted.keys():
            self._peers.pop(address).close()
            if address in self._threads:
                self._threads.pop(address).stop()
        if self._closing.is_set():  # meanwhile
            for peer in self.peers:
                peer.close()
            for thread in self._threads.values():
                thread.stop()


class _PeerThread:
    """Tends a peer, and does with it what is given, one after the other."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._given: queue.SimpleQueue[Callable[[Peer], Any] | None] = queue.SimpleQueue()
        self._since: float | None = None  # when it began what it is at
        name = f"kv-offload-peer-{peer.address.shown}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def give(self, work: Callable[[Peer], Any]) -> bool:
        """Do that in its turn; False: it is at one thing for long, or has too much to do."""
        since = self._since
        is_late = since is not None and time.monotonic() > since + _LONG_SECONDS
        if is_late or self._given.qsize() >= _MOST_GIVEN:
            return False
        self._given.put(work)
        return True

    def stop(self) -> None:
        self._given.put(None)

    def _run(self) -> None:
        while True:
            try:
                work = self._given.get(timeout=_TURN_SECONDS if self._peer.is_up else 0.05)
            except queue.Empty:
                work = Peer.tend
            if work is None:
                return
            self._since = time.monotonic()
            try:
                work(self._peer)
            except Exception as error:  # a fault of ours: it is asked again, and the thread goes on
                logger.warning("the peer %s cannot be asked: %r", self._peer.address.shown, error)
            self._since = None


def _tried(peer: Peer, work: Callable[[Peer], T]) -> T | None:
    try:
        return work(peer)
    except (OSError, AbsentError):
        return None
