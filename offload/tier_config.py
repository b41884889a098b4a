"""What the user says of tiers below the pool, checked before anything is built."""

import difflib
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.mooncake_config import MOONCAKE, MooncakeConfig
from offload.settings import GIB, Admit, is_size
from offload.store_config import STORES, StoreConfig

DISK = "disk"
KINDS = (DISK, *STORES, MOONCAKE)
SHUTDOWN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """A tier on a disk.

    Attributes:
        path: a directory on it; what is kept lies in ``kv-offload`` there.
        gib: room that it takes at most, of all engines together that name this path.
        admit: what is written.
        write_gib_per_day: how much is written per day; None: ``gib``. The first fill is free.
        shutdown_seconds: how long a shutdown takes at most to write the best of what is yet to be written.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    path: str
    gib: float
    admit: Admit = Admit.POLICY
    write_gib_per_day: float | None = None
    shutdown_seconds: float = SHUTDOWN_SECONDS

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not os.path.isabs(self.path) or "\0" in self.path:
            raise ConfigError(
                f'path of a disk tier is {self.path!r}; name a directory from "/" on, as in "/var/cache/kv"'
            )
        _check_gib("gib", self.gib)
        if self.write_gib_per_day is not None:
            _check_gib("write_gib_per_day", self.write_gib_per_day)
        seconds = self.shutdown_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigError(
                f"shutdown_seconds of a disk tier is {seconds!r}; give seconds, such as 10, or 0"
            )
        if self.admit not in tuple(Admit):
            names = ", ".join(Admit)
            raise ConfigError(f"admit of a disk tier is {self.admit!r}; use one of: {names}")
        object.__setattr__(self, "admit", Admit(self.admit))

    @property
    def num_bytes(self) -> int:
        """Room that it takes at most."""
        return int(self.gib * GIB)

    @property
    def bytes_per_day(self) -> float:
        """That may be written."""
        return (self.gib if self.write_gib_per_day is None else self.write_gib_per_day) * GIB

    @property
    def root(self) -> Path:
        """The directory that all engines' are in."""
        return root_of(Path(self.path))


TierConfig = DiskConfig | StoreConfig | MooncakeConfig


def root_of(path: Path) -> Path:
    """The directory that those of all engines are in, below the path of a tier."""
    return path / "kv-offload"


def read_tiers(value: object) -> tuple[TierConfig, ...]:
    """Read ``tiers`` of ``kv_connector_extra_config``.

    Raises:
        ConfigError: it is no list of tiers, or a tier is not as its kind says.
    """
    if isinstance(value, tuple) and all(isinstance(each, TierConfig) for each in value):
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(
            f'tiers is {value!r}; give a list, such as [{{"kind": "disk", "path": "/cache", "gib": 500}}]'
        )
    tiers = tuple(_read_tier(each) for each in value)
    paths = [os.path.normpath(tier.path) for tier in tiers if isinstance(tier, DiskConfig)]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"two tiers have the path {path!r}; give each a directory of its own")
    stores = [tier.shown for tier in tiers if not isinstance(tier, DiskConfig)]
    for store in stores:
        if stores.count(store) > 1:
            raise ConfigError(f"two tiers are the same store, {store}; leave one of them out")
    return tiers


def _read_tier(value: object) -> TierConfig:
    if not isinstance(value, Mapping):
        raise ConfigError(f'a tier is {value!r}; give an object, such as {{"kind": "disk", ...}}')
    settings: dict[str, Any] = dict(value)
    kind = settings.pop("kind", None)
    if kind in STORES:
        _check_keys(kind, settings, _names(StoreConfig), {"url": '"redis://host:6379/0"'})
        return StoreConfig(kind=kind, **settings)
    if kind == MOONCAKE:
        needed = {"master_server_address": '"10.0.0.5:50051"'}
        _check_keys(kind, settings, _names(MooncakeConfig), needed)
        return MooncakeConfig(**settings)
    if kind != DISK:
        raise ConfigError(f"kind of a tier is {kind!r}; use one of: {', '.join(KINDS)}")
    _check_keys(kind, settings, _names(DiskConfig), {"path": '"/var/cache/kv"', "gib": "500"})
    return DiskConfig(**settings)


def _names(config: type) -> list[str]:
    return [field.name for field in fields(config) if field.name != "kind"]


def _check_keys(kind: str, settings: Mapping[str, Any], known: list[str], needed: Mapping[str, str]) -> None:
    """Refuse unknown keys, and say which lack. ``needed`` has an example of each."""
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: kind, {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r} of a {kind} tier; {hint}")
    for key in needed:
        if key not in settings:
            example = ", ".join(f'"{name}": {each}' for name, each in needed.items())
            raise ConfigError(f'a {kind} tier lacks "{key}"; give it, as in {example}')


def _check_gib(name: str, value: object) -> None:
    if not is_size(value):
        raise ConfigError(f"{name} of a disk tier is {value!r}; give a positive number of GiB, such as 500")


def short_name(namespace: str) -> str:
    """What operators are shown of a namespace: 16 characters that tell it from others."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:16]
