"""What the user says of a store that engines share, checked before anything is built."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from offload.errors import ConfigError
from offload.settings import Admit, check_wait_seconds, read_admit

VALKEY, REDIS = "valkey", "redis"
STORES = (VALKEY, REDIS)

_PORT = 6379
_LEAST_KEY_BYTES = 16
_MOST_TTL_SECONDS = 10**9
"""Some 30 years: in milliseconds, and added to the time of day, it fits into a store's 64 bits."""
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}
"""Whether connections are encrypted."""


class StoreAddress(NamedTuple):
    """Where a store listens, and who asks.

    Attributes:
        host: its name; empty: a socket in the file system.
        port: of TCP.
        path: of the socket in the file system.
        is_tls: whether the connection is encrypted.
        user: of the access control list; empty: the default one.
        password: empty: none.
        database: its number.
    """

    host: str = ""
    port: int = _PORT
    path: str = ""
    is_tls: bool = False
    user: str = ""
    password: str = ""
    database: int = 0

    @classmethod
    def of(cls, url: str) -> "StoreAddress":
        """That of ``redis://user:password@host:6379/0``, ``rediss://`` with TLS, or ``unix:///path``.

        Raises:
            ConfigError: it is no such URL. The message has no password.
        """
        remedy = 'give one such as "redis://host:6379/0", "rediss://user:password@host" or "unix:///path"'
        try:
            parts = urlsplit(url)
            port = parts.port or _PORT
        except ValueError:  # its text may have a piece of the password
            raise ConfigError(
                f"url of a store is {_without_secrets(url)!r}, and its host or port cannot be read; "
                f"{remedy}. Write characters such as / ? # @ of a password as %2F %3F %23 %40"
            ) from None
        shown = _without_secrets(url)
        if parts.scheme not in _SCHEMES or parts.query or parts.fragment:
            raise ConfigError(f"url of a store is {shown!r}; {remedy}")
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if parts.scheme == "unix":
            if not parts.path.startswith("/") or parts.hostname:
                raise ConfigError(f"url of a store is {shown!r}, without a path; {remedy}")
            return cls(path=unquote(parts.path), user=user, password=password)
        database = parts.path.strip("/") or "0"
        if not parts.hostname or not (database.isascii() and database.isdigit()):
            raise ConfigError(f"url of a store is {shown!r}; {remedy}")
        return cls(parts.hostname, port, "", _SCHEMES[parts.scheme], user, password, int(database))

    def __str__(self) -> str:
        """Without the password."""
        return f"unix://{self.path}" if self.path else f"{self.host}:{self.port}/{self.database}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A store that engines share, over Valkey's and Redis's protocol.

    Attributes:
        kind: ``valkey`` or ``redis``; the same for both but in names of metrics.
        url: where it listens, and who asks; see ``StoreAddress``.
        admit: what is written: ``Admit.ALL`` or ``Admit.SECOND_USE``.
        ttl_seconds: what nobody uses is kept that long at most.
        wait_seconds: a request waits for the store's answers that long at most, from its first question on.
        ca_file: certificates that the store's own is checked against; None: the system's.
        password_file: has the password, in place of the one in ``url``.
        name_key_file: has a secret that names are keyed with.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    kind: str = VALKEY
    url: str
    admit: Admit = Admit.ALL
    ttl_seconds: float = 86_400.0
    wait_seconds: float = 0.02
    ca_file: str | None = None
    password_file: str | None = None
    name_key_file: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ConfigError(f'url of a store is {self.url!r}; give one such as "redis://host:6379/0"')
        address = StoreAddress.of(self.url)
        seconds = self.ttl_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 1 <= seconds <= _MOST_TTL_SECONDS:
            raise ConfigError(
                f"ttl_seconds of a store is {seconds!r}; give 1 to {_MOST_TTL_SECONDS:,}, such as "
                f"86400 for a day"
            )
        object.__setattr__(self, "admit", read_admit(self.admit))
        check_wait_seconds("a store", self.wait_seconds)
        for name in ("ca_file", "password_file", "name_key_file"):
            check_path(name, getattr(self, name))
        if self.password_file is not None and address.password:
            raise ConfigError("a store has a password in url and a password_file; give one of them")
        if self.ca_file is not None and not address.is_tls:
            raise ConfigError(
                f"a store has a ca_file, and its url begins with {self.url.partition(':')[0]}; "
                f'only connections of "rediss://" are encrypted'
            )

    @property
    def address(self) -> StoreAddress:
        """Where it listens, with the password.

        Raises:
            ConfigError: the file of the password cannot be read.
        """
        address = StoreAddress.of(self.url)
        if self.password_file is None:
            return address
        return address._replace(password=_read(self.password_file, "password_file").decode().strip())

    @property
    def name_key(self) -> bytes | None:
        """The secret that names are keyed with.

        Raises:
            ConfigError: its file cannot be read, or is too short to be one.
        """
        return read_name_key(self.name_key_file)

    @property
    def shown(self) -> str:
        """Where it listens, without secrets."""
        return str(StoreAddress.of(self.url))

    def __str__(self) -> str:
        """Its kind and address, without secrets."""
        return f"{self.kind} at {self.shown}"


def check_path(name: str, path: object) -> None:
    """Refuse what is no path of a file. None is no file."""
    if path is not None and (not isinstance(path, str) or not os.path.isabs(path)):
        raise ConfigError(f'{name} of a store is {path!r}; give a path from "/" on')


def read_name_key(path: str | None) -> bytes | None:
    """The secret in that file; None: there is none.

    Raises:
        ConfigError: the file cannot be read, or is too short to be one.
    """
    if path is None:
        return None
    key = _read(path, "name_key_file").strip()
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"name_key_file {path} has {len(key)} bytes; {_LEAST_KEY_BYTES} or more are a "
            f"secret, such as: openssl rand -hex 32"
        )
    return key


def _without_secrets(url: str) -> str:
    """What may be shown of a URL, however wrong it is: nothing between its scheme and its last ``@``."""
    secret, at, rest = url.rpartition("@")
    rest = rest.partition("?")[0].partition("#")[0]
    return f"{secret.partition(':')[0]}://...@{rest}" if at else rest


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} cannot be read ({error.strerror}); make it readable for the engine's user"
        ) from error
