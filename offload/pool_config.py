"""What the user says of the pool's memory, checked before anything is built."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.settings import GIB, check_wait_seconds, is_size

SHARED_MEMORY = "shared-memory"
KINDS = (SHARED_MEMORY,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryConfig:
    """A pool that outlives its engine.

    Attributes:
        path: a directory in memory, on a tmpfs; regions lie in ``kv-offload-pool`` there.
        gib: room that all regions of the path take at most, those of engines that run included; None: as much
            as these, and a new region takes the place of those that nobody owns.
        siblings: whether to read what engines beside this one have there, of the same model.
        wait_seconds: a request waits that long at most for what they say, from its first question on.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    path: str
    gib: float | None = None
    siblings: bool = True
    wait_seconds: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not os.path.isabs(self.path) or "\0" in self.path:
            raise ConfigError(
                f'path of the pool is {self.path!r}; name a directory from "/" on, as in "/dev/shm/kv"'
            )
        size = self.gib
        if size is not None and not is_size(size):
            raise ConfigError(f"gib of the pool is {size!r}; give a positive number of GiB, such as 16")
        if not isinstance(self.siblings, bool):
            raise ConfigError(f"siblings of the pool is {self.siblings!r}; use true or false")
        check_wait_seconds("the pool", self.wait_seconds)

    @property
    def root(self) -> Path:
        """The directory that regions of all engines are in."""
        return pool_root(Path(self.path))

    @property
    def num_bytes(self) -> int | None:
        """What all regions may take, in bytes."""
        return None if self.gib is None else int(self.gib * GIB)


def pool_root(path: Path) -> Path:
    """The directory that regions of all engines are in, below the path of a pool."""
    return path / "kv-offload-pool"


def read_pool(value: object) -> SharedMemoryConfig | None:
    """Read ``pool`` of ``kv_connector_extra_config``.

    Raises:
        ConfigError: it is no pool, or not as its kind says.
    """
    if value is None or isinstance(value, SharedMemoryConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'pool is {value!r}; give an object, such as {{"kind": "shared-memory", "path": "/dev/shm/kv"}}'
        )
    settings: dict[str, Any] = dict(value)
    kind = settings.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(f"kind of the pool is {kind!r}; use {', '.join(KINDS)}, or leave pool out")
    known = [field.name for field in fields(SharedMemoryConfig)]
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: kind, {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r} of the pool; {hint}")
    if "path" not in settings:
        raise ConfigError('the pool lacks "path"; give it, as in "path": "/dev/shm/kv"')
    return SharedMemoryConfig(**settings)
