"""What the user says of engines that hand KV to each other, checked before anything is built."""

import ipaddress
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError
from offload.transfer_params import NAME_BYTES

LONGEST_LEASE, LONGEST_WAIT = 24 * 3600.0, 3600.0
"""Seconds."""
MAX_PEERS = 1024
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
IN_CLEAR = (
    "fleet_tls is not set: KV, which encodes prompts, crosses the network in clear. Set fleet_tls, or see "
    "that nobody else reads this network"
)
"""The warning for engines that reach beyond their own machine."""
_MAX_HOST_CHARACTERS = 253
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_MACHINE_ID = Path("/etc/machine-id")


class Role(StrEnum):
    """What an engine does in a fleet."""

    PREFILL = "prefill"
    """It hands off every prompt."""
    DECODE = "decode"
    """It hands off none."""
    BOTH = "both"
    """It hands off the prompts of requests that say so."""


class PeerTransport(StrEnum):
    """How KV comes from peers on other machines. On one machine it comes from memory."""

    TCP = "tcp"
    NIXL = "nixl"
    """By NIXL where both sides say so, else over TCP."""


class Address(NamedTuple):
    """Where an engine listens.

    Attributes:
        host: an IP address without brackets, or a DNS name.
        port: of its rank 0. Rank r has ``port + r``.
    """

    host: str
    port: int

    @property
    def shown(self) -> str:
        """As users write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant. No name is looked up: ``localhost`` alone is."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def read_address(value: object) -> Address:
    """Read ``host:port`` or ``[IPv6]:port``.

    Raises:
        ValueError: it is neither; the text says what is wrong.
    """
    if not isinstance(value, str):
        raise ValueError("it is no text")
    host, colon, port = value.rpartition(":")
    if not colon:
        raise ValueError("it has no port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise ValueError("its port is no number from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("there is no IPv6 address between its brackets") from None
    elif len(host) > _MAX_HOST_CHARACTERS or not _HOST.fullmatch(host):
        raise ValueError("its host is no name, no IPv4 address and no IPv6 address in brackets")
    return Address(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of PEM with which peers know each other.

    Attributes:
        cert_file: this engine's certificate, and those between it and the authority.
        key_file: its private key.
        ca_file: certificates of the authority that signs all of the fleet's.
    """

    cert_file: str
    key_file: str
    ca_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What ``kv_connector_extra_config`` may say of hand-offs.

    Attributes:
        role: which prompts are handed off.
        listen: ``host:port`` at which peers may fetch; rank r of the engine listens at ``port + r``. None:
            nobody can.
        peers: from whom to fetch: ``host:port``, or ``@`` and a file with one of these in a line, which is
            read again when it changes. Names are looked up again every 30 seconds.
        fleet_key_file: a file with the secret that all engines of a fleet have; None: there is none, and
            peers are on this machine only.
        fleet_tls: with what connections are encrypted; None: they are in clear.
        lease_seconds: for which KV that was handed off stays in the pool, unless a peer has it before.
        lease_share: the part of the pool, 0 to 1, that hand-offs may have at once; None: a half for
            ``prefill``, else a quarter.
        peer_wait_seconds: a request waits at least so long for progress at the peer that is said to have its
            prompt, even if computing it would be faster.
        peer_transport: how KV comes from peers on other machines, and may be fetched from this engine.

    Raises:
        ConfigError: a value of the wrong type or out of range, or one that leaves KV open to strangers.
    """

    role: Role = Role.BOTH
    listen: str | None = None
    peers: tuple[str, ...] = ()
    fleet_key_file: str | None = None
    fleet_tls: TlsFiles | None = None
    lease_seconds: float = 60
    lease_share: float | None = None
    peer_wait_seconds: float = 0
    peer_transport: PeerTransport = PeerTransport.TCP

    def __post_init__(self) -> None:
        if self.role not in tuple(Role):
            raise ConfigError(f"role is {self.role!r}; use one of: {', '.join(Role)}")
        object.__setattr__(self, "role", Role(self.role))
        if self.listen is not None:
            _check_address("listen", self.listen)
        object.__setattr__(self, "peers", _read_peers(self.peers))
        if self.fleet_key_file is not None:
            _check_path("fleet_key_file", self.fleet_key_file, "/etc/kv-offload/fleet.key")
        object.__setattr__(self, "fleet_tls", _read_tls(self.fleet_tls))
        _check_lease(self.lease_seconds, self.lease_share)
        _check_wait(self.peer_wait_seconds)
        self._check_transport()
        if self.fleet_key_file is None:
            self._refuse_strangers()
        if self.role is Role.PREFILL and self.listen is None:
            raise ConfigError(
                'role is "prefill", and nobody can fetch what this engine hands off; give listen, as in '
                '"listen": "127.0.0.1:7100", or leave role out'
            )

    @property
    def listens_at(self) -> Address | None:
        """Where rank 0 of the first engine listens; None: nobody does."""
        return None if self.listen is None else read_address(self.listen)

    @property
    def share(self) -> float:
        """The part of the pool that leases may have."""
        if self.lease_share is not None:
            return self.lease_share
        return 0.5 if self.role is Role.PREFILL else 0.25

    @property
    def is_used(self) -> bool:
        """Whether this engine has to do with others at all."""
        return self.listen is not None or bool(self.peers)

    @property
    def has_nixl(self) -> bool:
        """Whether NIXL is to be used, by those that fetch from others and others from it."""
        return self.is_used and self.peer_transport is PeerTransport.NIXL

    @property
    def is_in_clear(self) -> bool:
        """Whether KV crosses a network without being encrypted. A file's peers may be anywhere."""
        if self.fleet_tls is not None:
            return False
        listens_at = self.listens_at
        if listens_at is not None and not listens_at.is_loopback:
            return True
        return any(peer.startswith("@") or not read_address(peer).is_loopback for peer in self.peers)

    def _check_transport(self) -> None:
        if self.peer_transport not in tuple(PeerTransport):
            known = ", ".join(PeerTransport)
            raise ConfigError(f"peer_transport is {self.peer_transport!r}; use one of: {known}")
        object.__setattr__(self, "peer_transport", PeerTransport(self.peer_transport))
        if self.peer_transport is PeerTransport.NIXL and self.fleet_tls is not None:
            raise ConfigError(
                'peer_transport is "nixl" beside fleet_tls, and NIXL does not encrypt: KV, which encodes '
                "prompts, would cross the network in clear. Leave one of the two out"
            )

    def _refuse_strangers(self) -> None:
        far = [self.listen] if self.listen is not None else []
        far = [each for each in (*far, *self.peers) if each[0] != "@" and not read_address(each).is_loopback]
        if far:
            name = "listen" if far[0] == self.listen else "peers"
            raise ConfigError(
                f"{name} has {far[0]!r}, beyond this machine, and fleet_key_file is not set: whoever reaches "
                f"a port could read KV, which encodes prompts, or send false KV. Set fleet_key_file to a "
                f"file with a secret that all engines of the fleet have, or use a loopback address, such as "
                f'"127.0.0.1:7100"'
            )


FLEET_KEYS = tuple(field.name for field in fields(FleetConfig))


def read_fleet_key(path: str) -> bytes:
    """The secret in a key file, without white space around it.

    Raises:
        ConfigError: it cannot be read, or is too short or too long.
    """
    try:
        with open(path, "rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"fleet_key_file is {path!r}: {error.strerror}; name a file that the engine may read"
        ) from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"fleet_key_file is {path!r}, with {len(key)} bytes; write {MIN_KEY_BYTES} to {MAX_KEY_BYTES} "
            f"there, as with: openssl rand -hex 32"
        )
    return key


def read_peer_file(text: str) -> tuple[Address, ...]:
    """Addresses in a file of peers: one in a line; empty lines and what follows ``#`` do not count.

    Raises:
        ValueError: a line is no address, or there are too many.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    addresses = tuple(dict.fromkeys(read_address(line) for line in lines if line))
    if len(addresses) > MAX_PEERS:
        raise ValueError(f"it has {len(addresses)} peers; there may be {MAX_PEERS}")
    return addresses


def check_fleet_files(config: FleetConfig) -> None:
    """Refuse files that are not there, where this process runs.

    Raises:
        ConfigError: the key, or a file of fleet_tls, cannot be read. A file of peers may appear later.
    """
    if config.fleet_key_file is not None:
        read_fleet_key(config.fleet_key_file)
    if config.fleet_tls is not None:
        for name in ("cert_file", "key_file", "ca_file"):
            path = getattr(config.fleet_tls, name)
            if not os.access(path, os.R_OK) or not os.path.isfile(path):
                raise ConfigError(
                    f"{name} of fleet_tls is {path!r}, which is no file that can be read; name one, in PEM"
                )


def peer_name(listen: Address) -> bytes:
    """Names the engine that listens there on this machine, ``NAME_BYTES`` long; the same after a restart."""
    try:
        machine = _MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    text = "\0".join((machine, socket.gethostname(), listen.shown))
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()


def _check_address(name: str, value: object) -> None:
    try:
        read_address(value)
    except ValueError as error:
        raise ConfigError(f'{name} is {value!r}: {error}; give it as in "10.0.0.1:7100"') from None


def _read_peers(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(f'peers is {value!r}; give a list, such as ["10.0.0.1:7100", "@/etc/kv/peers"]')
    for peer in value:
        if isinstance(peer, str) and peer.startswith("@"):
            _check_path("a file of peers", peer[1:], "@/etc/kv-offload/peers")
        else:
            _check_address("one of peers", peer)
        if list(value).count(peer) > 1:
            raise ConfigError(f"peers has {peer!r} twice; leave it out once")
    if len(value) > MAX_PEERS:
        raise ConfigError(f"peers has {len(value)} entries; give {MAX_PEERS} at most")
    return tuple(value)


def _read_tls(value: object) -> TlsFiles | None:
    if value is None or isinstance(value, TlsFiles):
        return value
    known = [field.name for field in fields(TlsFiles)]
    example = ", ".join(f'"{name}": "/etc/kv/{name[:-5]}.pem"' for name in known)
    if not isinstance(value, Mapping) or set(value) != set(known):
        raise ConfigError(f"fleet_tls is {value!r}; give an object with just these keys: {{{example}}}")
    settings: dict[str, Any] = dict(value)
    for name, path in settings.items():
        _check_path(f"{name} of fleet_tls", path, f"/etc/kv/{name[:-5]}.pem")
    return TlsFiles(**settings)


def _check_path(name: str, path: object, example: str) -> None:
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise ConfigError(f'{name} is {path!r}; name a file from "/" on, such as "{example}"')


def _check_wait(seconds: object) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= LONGEST_WAIT):  # type: ignore[operator]  # nan is not either
        raise ConfigError(
            f"peer_wait_seconds is {seconds!r}; give seconds from 0 to {LONGEST_WAIT:.0f}, such as 10"
        )


def _check_lease(seconds: object, share: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_LEASE:
        raise ConfigError(
            f"lease_seconds is {seconds!r}; give seconds above 0, {LONGEST_LEASE:.0f} at most, such as 60"
        )
    if share is None:
        return
    if (
        isinstance(share, bool)
        or not isinstance(share, int | float)
        or not 0 <= share <= 1
        or math.isnan(share)
    ):
        raise ConfigError(f"lease_share is {share!r}; give a part of the pool from 0 to 1, such as 0.5")


NO_FLEET = FleetConfig()
"""An engine alone."""
