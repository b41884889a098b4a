"""Options of ``kv-offload proxy``, checked before it listens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from offload.errors import ProxyError
from offload.fleet_config import Address, TlsFiles, read_address

__all__ = [
    "ROLES",
    "KvSource",
    "ProxySettings",
    "check_near",
    "engine_url",
    "fleet_address",
    "kv_source",
    "read_key",
]

ROLES = ("prefill", "decode", "both")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class KvSource(NamedTuple):
    """Where an engine publishes KV events, and where it sends those again that were missed; None: nowhere."""

    endpoint: str
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """All of them; times in seconds.

    Attributes:
        engines: URL and role of each.
        host, port: to listen at; port 0: any that is free.
        admin_host, admin_port: for the admin endpoints; None: they have no port.
        admin_key: that admin requests must have; None: none is asked for, and there is an admin port.
        policy: a name, or ``module:Class``.
        is_sequential: a decode leg begins when its prefill leg has ended.
        min_prefill_tokens: prompts of which less is to be computed are not prefilled elsewhere.
        drain_seconds: that requests may go on at an engine which drains.
        connect_seconds: to connect to an engine.
        first_byte_seconds: to the first byte of an answer.
        answer_seconds: to the end of an answer that is no stream.
        stall_seconds: between two bytes of an answer, or of a request.
        prefill_seconds: of a prefill leg that a decode leg waits for.
        health_seconds: between two looks at an engine's health.
        eject_failures: failures in a row after which an engine is left alone; a refused connection is enough.
        eject_seconds: that it is left alone; then one request tries it.
        max_attempts: engines that one request may try to decode at; 0: all.
        max_requests: at one time; further POST requests are refused with 429.
        max_body_bytes: of a request.
        max_answer_bytes: of an answer that is no stream, and of one event of a stream.
        max_header_bytes: of one header of a request.
        history_tokens: up to which it is remembered which engine has which prompts.
        tokenized_tokens: token ids of prompts that are kept.
        tokenize_seconds: that the policy waits for an engine to tokenize a prompt.
        locate_seconds: that the policy waits for engines to say how much of it they have.
        fleet: where rank 0 of engines listens for the fleet, by URL: these can be asked.
        fleet_key: of the fleet; empty: it has none.
        fleet_tls: with what questions to engines are encrypted; None: they are in clear.
        kv_events: where engines publish them, by URL: policies know by these what engines have.
        index_blocks: of each engine that are known by events.
        passed: further paths that are passed on to engines.
    """

    engines: tuple[tuple[str, str], ...]
    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    admin_key: str | None = None
    policy: str = "least_load"
    is_sequential: bool = False
    min_prefill_tokens: int = 256
    drain_seconds: float = 30.0
    connect_seconds: float = 2.0
    first_byte_seconds: float = 600.0
    answer_seconds: float = 3600.0
    stall_seconds: float = 120.0
    prefill_seconds: float = 120.0
    health_seconds: float = 2.0
    eject_failures: int = 3
    eject_seconds: float = 10.0
    max_attempts: int = 0
    max_requests: int = 4096
    max_body_bytes: int = 64 << 20
    max_answer_bytes: int = 256 << 20
    max_header_bytes: int = 32 << 10
    history_tokens: int = 64 << 20
    tokenized_tokens: int = 4 << 20
    tokenize_seconds: float = 0.2
    locate_seconds: float = 0.1
    fleet: tuple[tuple[str, Address], ...] = ()
    fleet_key: bytes = b""
    fleet_tls: TlsFiles | None = None
    kv_events: tuple[tuple[str, KvSource], ...] = ()
    index_blocks: int = 1 << 18
    passed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ProxyError with the value and what to do."""
        urls = [url for url, _ in self.engines]
        for url, role in self.engines:
            if role not in ROLES:
                raise ProxyError(f"role {role!r} of {url} is not known; use one of {', '.join(ROLES)}")
            if urls.count(url) > 1:
                raise ProxyError(f"{url} is given more than once; an engine of two roles is --both {url}")
        if not any(role != "prefill" for _, role in self.engines):
            raise ProxyError("no engine decodes; give at least one --decode URL or --both URL")
        for name, port in (("--port", self.port), ("--admin-port", self.admin_port)):
            if port is not None and not 0 <= port < 1 << 16:
                raise ProxyError(f"{name} {port} is no port; use one from 0 to 65535")
        if self.admin_port and self.admin_port == self.port:
            raise ProxyError(
                f"--admin-port {self.port} is --port; give it another, or --admin-key-file alone"
            )
        if self.admin_port is not None and self.admin_key is None and self.admin_host not in LOOPBACK:
            raise ProxyError(
                f"--admin-host {self.admin_host} can be reached from elsewhere; use 127.0.0.1, or give "
                f"--admin-key-file"
            )
        for name in (
            "connect",
            "first_byte",
            "answer",
            "stall",
            "prefill",
            "health",
            "eject",
            "tokenize",
            "locate",
        ):
            seconds = getattr(self, f"{name}_seconds")
            if not 0 < seconds <= 86400:
                raise ProxyError(
                    f"--{name.replace('_', '-')}-seconds {seconds:g} is out of range; use more than 0, and "
                    f"86400 at most"
                )
        if not 0 <= self.drain_seconds <= 86400:
            raise ProxyError(f"--drain-seconds {self.drain_seconds:g} is out of range; use 0 to 86400")
        self._check_fleet(urls)
        for name, least, most in (
            ("min_prefill_tokens", 0, 1 << 30),
            ("eject_failures", 1, 1000),
            ("max_attempts", 0, 10_000),
            ("max_requests", 1, 1_000_000),
            ("max_body_bytes", 1 << 10, 1 << 31),
            ("max_answer_bytes", 1 << 16, 1 << 32),
            ("max_header_bytes", 1 << 10, 1 << 20),
            ("history_tokens", 0, 1 << 40),
            ("tokenized_tokens", 0, 1 << 40),
            ("index_blocks", 1, 1 << 30),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ProxyError(f"--{name.replace('_', '-')} {value} is out of range; use {least} to {most}")
        for path in self.passed:
            if not path.startswith("/") or any(each in path for each in " ?#"):
                raise ProxyError(f"--pass {path!r} is no path; give one such as /v1/audio/speech")

    def _check_fleet(self, urls: list[str]) -> None:
        for name, given, one in (
            ("--fleet", self.fleet, "address"),
            ("--kv-events", self.kv_events, "endpoint"),
        ):
            for url, _ in given:
                if url not in urls:
                    raise ProxyError(
                        f"{name} {url} is none of the engines; give it as --prefill, --decode or --both"
                    )
            if len(dict(given)) < len(given):
                raise ProxyError(
                    f"{name} is given more than once for an engine; give one {one}, of its rank 0"
                )
        for _, address in self.fleet:
            check_near(address, self.fleet_key, "--fleet")


def engine_url(text: str) -> str:
    """An engine's address, without a slash at its end. Raises ProxyError."""
    remedy = "give one such as http://10.0.0.1:8000"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ProxyError(f"{text[:200]!r} is no URL; {remedy}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProxyError(f"{text[:200]!r} is no URL of an engine; {remedy}")
    if parts.username or parts.password or parts.query or parts.fragment or port == 0:
        raise ProxyError(f"the URL of {parts.hostname} has more than scheme, host, port and path; {remedy}")
    return text.rstrip("/")


def fleet_address(text: str, name: str) -> Address:
    """Where an engine listens for its fleet; ``name``: of what says so. Raises ProxyError."""
    try:
        return read_address(text)
    except ValueError as error:
        raise ProxyError(
            f"{name} {text[:200]!r}: {error}; give host:port, as the engine has it in listen"
        ) from None


def kv_source(texts: Sequence[str], name: str) -> KvSource:
    """Where an engine publishes KV events; ``name``: of what says so. Raises ProxyError."""
    remedy = "give tcp://host:port or ipc:///path of the engine's --kv-events-config, and its replay_endpoint"
    if not 1 <= len(texts) <= 2:
        raise ProxyError(f"{name} has {len(texts)} endpoints; {remedy}")
    for text in texts:
        scheme, _, rest = text.partition("://")
        host, _, port = rest.rpartition(":")
        is_port = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
        is_tcp = scheme == "tcp" and is_port and host != "" and "*" not in host
        is_plain = len(text) <= 1000 and text.isprintable() and " " not in text
        if not is_plain or not (is_tcp or (scheme == "ipc" and rest)):
            raise ProxyError(f"{name} {text[:200]!r} is no endpoint that can be connected to; {remedy}")
    return KvSource(*texts)


def check_near(address: Address, key: bytes, name: str) -> None:
    """Without a key only this machine is asked. Raises ProxyError."""
    if not key and not address.is_loopback:
        raise ProxyError(
            f"{name} {address.shown} is on another machine; give --fleet-key-file, with the file that "
            f"engines have as fleet_key_file"
        )


def read_key(path: Path) -> str:
    """The key in a file. Raises ProxyError."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ProxyError(
            f"--admin-key-file {path} cannot be read ({error}); give a file with a key"
        ) from None
    if len(key) < 16 or not key.isascii() or not key.isprintable():
        raise ProxyError(
            f"--admin-key-file {path} has {len(key)} characters; put 16 printable ones or more into it, as "
            f"`openssl rand -hex 32` makes them"
        )
    return key
