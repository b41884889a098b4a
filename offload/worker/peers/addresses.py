"""Where peers are: names that are looked up again, and files that are read again when they change."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from offload.fleet_config import Address, read_address, read_peer_file

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 30.0
_UNKNOWN_SECONDS = 5.0
"""The same of a name of which no address is known."""
MOST_FILE_BYTES = 1 << 20

Resolve = Callable[[str], Sequence[str]]
"""The IP addresses of a name. Raises OSError."""


def resolve(host: str) -> list[str]:
    """Those that the system's resolver knows, in an order that stays. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]) for each in found})


class Addresses:
    """Of all peers as they are named in the configuration, for one rank. For one thread.

    What cannot be looked up or read stays as it was known. One line says so, until it can.
    """

    def __init__(
        self,
        peers: Sequence[str],
        rank: int,
        *,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look nothing up yet.

        Args:
            peers: as ``FleetConfig`` has them, checked.
            rank: that has this rank's KV has this port behind the named one.
            resolve: finds the addresses of a name.
            clock: in seconds.
        """
        self._peers = peers
        self._rank = rank
        self._resolve = resolve
        self._clock = clock
        self._files: dict[str, tuple[object, tuple[Address, ...]]] = {}  # by path: a stamp, and what it says
        self._names: dict[str, tuple[float, tuple[str, ...]]] = {}  # by name: since when, and its addresses
        self._failing: set[str] = set()

    def look(self) -> list[Address]:
        """As they are now, each once, with this rank's port. May take as long as a lookup does."""
        found: dict[Address, None] = {}
        named = [each for peer in self._peers for each in self._in(peer)]
        for host, port in named:
            for address in self._of(host):
                if port + self._rank <= 65535:
                    found[Address(address, port + self._rank)] = None
        self._names = {host: self._names[host] for host, _ in named if host in self._names}
        return list(found)

    def check_invariants(self) -> None:
        """Nothing is known of a file that is not named."""
        assert self._files.keys() <= {peer[1:] for peer in self._peers}, f"files: {list(self._files)}"

    def _in(self, peer: str) -> Sequence[Address]:
        if not peer.startswith("@"):
            return [read_address(peer)]
        path = peer[1:]
        stamp, known = self._files.get(path, (None, ()))
        try:
            status = os.stat(path)
            now = (status.st_mtime_ns, status.st_size, status.st_ino)
            if now != stamp:
                with open(path, encoding="utf-8") as file:
                    known = read_peer_file(file.read(MOST_FILE_BYTES))
                self._files[path] = (now, known)
            self._works(path)
        except (OSError, ValueError) as error:
            self._fails(path, f"the file of peers {path} cannot be read ({error})")
        return known

    def _of(self, host: str) -> Sequence[str]:
        since, known = self._names.get(host, (-LOOKUP_SECONDS, ()))
        now = self._clock()
        if now >= since + (LOOKUP_SECONDS if known else _UNKNOWN_SECONDS):
            try:
                known = tuple(self._resolve(host))
                self._works(host)
            except (OSError, UnicodeError) as error:
                self._fails(host, f"the name {host} of peers cannot be looked up ({error})")
            self._names[host] = (now, known)
        return known

    def _works(self, what: str) -> None:
        self._failing.discard(what)

    def _fails(self, what: str, text: str) -> None:
        if what not in self._failing:
            self._failing.add(what)
            logger.warning("%s; what was known before stays, and it is tried again", text)
