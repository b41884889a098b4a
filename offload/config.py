"""The user's settings, checked before anything is built."""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from evictor import available_policies
from offload.errors import ConfigError
from offload.fleet_config import FLEET_KEYS, NO_FLEET, FleetConfig, Role
from offload.mooncake_config import MooncakeConfig
from offload.operator.directory import MOST_DIRECTORY_BYTES
from offload.pool_config import SharedMemoryConfig, read_pool
from offload.restore_config import RestoreWhen
from offload.settings import GIB
from offload.tier_config import DiskConfig, TierConfig, read_tiers

DEFAULT_POLICY = "hazard"
AUTO = "auto"
_MOST_GIB = 1 << 16
"""Half of what a process can address on x86-64."""


class Verify(StrEnum):
    """Which of the blocks that a load brings up are checked against the checksum of their slot."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class StoreWhen(StrEnum):
    """Whether full blocks are copied into the pool at once, or once the GPU is about to evict them."""

    EAGER = "eager"
    LAZY = "lazy"
    AUTO = "auto"


MOST_TIMES = 4
"""So many times as large as the GPU's cache a pool may be for "auto" to be lazy. A larger one has nearly all
that both could have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What ``kv_connector_extra_config`` may say.

    Attributes:
        cpu_gib: host memory for the pool in GiB, of the whole engine: its ranks share it evenly.
        store_decode_blocks: also store blocks of generated tokens, not only of prompts: True, False, or
            "auto" to learn whether later prompts have them; see ``answers``.
        eviction_policy: which leaf is evicted when the pool is full; see ``evictor.available_policies()``.
        verify_loads: which blocks are checked against their checksums when they are restored: "always",
            "sampled" (one in 16, others each time) or "never".
        hinted_share: the part of the pool, 0 to 1, that requests together may have protected by asking for
            a high priority or a pin.
        record_trace: a file to write prefix hashes of finished requests to, for ``kv-offload size``; None
            for none. See ``recorder``.
        huge_pages: whether to ask the kernel for transparent huge pages. True: for the pool and the KV cache
            of a CPU engine; "auto": for that cache only; False: for neither.
        tiers: what is below the pool, asked in this order; see ``tier_config``.
        operator_socket: the directory of operator sockets; None: the user's runtime directory.
        pool: where its memory lies; None: in private memory, which ends with the engine. See ``pool_config``.
        fetch_gpu_share: the part of the GPU's blocks, 0 to 1, that restores may hold while a tier still
            brings what they wait for; others begin once it is in the pool.
        restore: when what the pool has is brought back: "always"; "auto" where that is over sooner than
            computing it, by what is measured; or "never". See ``scheduler.choice``.
        store: when full blocks are copied into the pool: "eager", at once; "lazy", once the GPU is about to
            evict them; or "auto", by the sizes of both. See ``stores_lazily``.
        cpu_gib_max: what the pool may grow to while the engine runs, in GiB; None: ``cpu_gib``.
        shrink_under_pressure: the pool gives memory back by itself where its control group runs short of it.
        fleet: engines that hand KV to each other. Its keys stand among the others; see ``fleet_config``.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    cpu_gib: float
    store_decode_blocks: bool | str = True
    eviction_policy: str = DEFAULT_POLICY
    verify_loads: Verify = Verify.SAMPLED
    hinted_share: float = 0.25
    record_trace: str | None = None
    huge_pages: bool | str = AUTO
    tiers: tuple[TierConfig, ...] = ()
    operator_socket: str | None = None
    pool: SharedMemoryConfig | None = None
    fetch_gpu_share: float = 0.1
    restore: RestoreWhen = RestoreWhen.AUTO
    store: StoreWhen = StoreWhen.AUTO
    cpu_gib_max: float | None = None
    shrink_under_pressure: bool = False
    fleet: FleetConfig = NO_FLEET

    def __post_init__(self) -> None:
        size = self.cpu_gib
        if isinstance(size, bool) or not isinstance(size, int | float):
            raise ConfigError(f"cpu_gib is {size!r}; give the pool size in GiB as a number, such as 8")
        if not size > 0 or size == math.inf:  # nan is not greater either; an int may exceed every float
            raise ConfigError(
                f"cpu_gib is {size!r}; the pool size in GiB must be a positive number, such as 8"
            )
        store = self.store_decode_blocks
        if not isinstance(store, bool) and store != AUTO:
            raise ConfigError(f'store_decode_blocks is {store!r}; use true, false or "auto"')
        if not isinstance(self.huge_pages, bool) and self.huge_pages != AUTO:
            raise ConfigError(f'huge_pages is {self.huge_pages!r}; use true, false or "auto"')
        if self.eviction_policy not in available_policies():
            names = ", ".join(available_policies())
            raise ConfigError(f"eviction_policy is {self.eviction_policy!r}; use one of: {names}")
        if self.verify_loads not in tuple(Verify):
            names = ", ".join(Verify)
            raise ConfigError(f"verify_loads is {self.verify_loads!r}; use one of: {names}")
        object.__setattr__(self, "verify_loads", Verify(self.verify_loads))
        if self.restore not in tuple(RestoreWhen):
            names = ", ".join(RestoreWhen)
            raise ConfigError(f"restore is {self.restore!r}; use one of: {names}")
        object.__setattr__(self, "restore", RestoreWhen(self.restore))
        if self.restore is RestoreWhen.NEVER and self.fleet.role is Role.DECODE:
            raise ConfigError(
                f"restore is {self.restore.value!r} and role is {self.fleet.role.value!r}: it would compute "
                f"every prompt again; leave out one of them"
            )
        object.__setattr__(self, "tiers", read_tiers(self.tiers))
        object.__setattr__(self, "pool", read_pool(self.pool))
        self._check_store()
        _check_share("hinted_share", self.hinted_share, "the pool", 0.25)
        _check_share("fetch_gpu_share", self.fetch_gpu_share, "the GPU's blocks", 0.1)
        self._check_sizes()
        if self.operator_socket is not None:
            _check_socket_directory(self.operator_socket)
        if self.record_trace is not None and (
            not isinstance(self.record_trace, str) or not self.record_trace
        ):
            raise ConfigError(
                f'record_trace is {self.record_trace!r}; name a file to write, such as "/tmp/trace.jsonl"'
            )

    def _check_store(self) -> None:
        if self.store not in tuple(StoreWhen):
            names = ", ".join(StoreWhen)
            raise ConfigError(f"store is {self.store!r}; use one of: {names}")
        object.__setattr__(self, "store", StoreWhen(self.store))
        if self.store is StoreWhen.LAZY and (reason := self.eager_because) is not None:
            raise ConfigError(
                f"store is {self.store.value!r}, and {reason}: they would not find what only the GPU has; "
                f'leave out one of them, or use "eager"'
            )

    def _check_sizes(self) -> None:
        if (most := self.cpu_gib_max) is not None:
            if isinstance(most, bool) or not isinstance(most, int | float):
                raise ConfigError(
                    f"cpu_gib_max is {most!r}; give the largest size of the pool in GiB, such as 16"
                )
            if not self.cpu_gib <= most:
                raise ConfigError(f"cpu_gib_max is {most!r}; give cpu_gib, {self.cpu_gib!r}, or more")
            if most > _MOST_GIB:
                raise ConfigError(
                    f"cpu_gib_max is {most!r}; give at most {_MOST_GIB:,}, as addresses are kept for it"
                )
        if not isinstance(self.shrink_under_pressure, bool):
            raise ConfigError(f"shrink_under_pressure is {self.shrink_under_pressure!r}; use true or false")
        name = "cpu_gib_max" if most is not None else "shrink_under_pressure"
        if (most is not None or self.shrink_under_pressure) and (reason := self.fixed_because) is not None:
            raise ConfigError(f"{name} is set, and {reason}; remove one of them")

    @property
    def fixed_because(self) -> str | None:
        """Why the pool keeps its size while the engine runs; None: it need not."""
        if self.pool is not None:
            return "pool keeps the memory for later engines, which look for a pool of one size"
        if self.fleet.listen is not None:
            return "listen shows the pool to other engines, which map a pool of one size"
        if any(isinstance(tier, MooncakeConfig) for tier in self.tiers):
            return "a mooncake tier has the pool's memory registered as a whole"
        return None

    @property
    def eager_because(self) -> str | None:
        """Who needs blocks in the pool as soon as they are full; None: nobody does."""
        if self.pool is not None:
            return "pool is read by later engines, and by siblings"
        if self.fleet.listen is not None:
            return "listen shows the pool to other engines"
        return None

    def stores_lazily(self, num_slots: int, num_gpu_blocks: int, *, is_read: bool = False) -> bool:
        """Whether blocks wait in the GPU's cache until it is about to evict them.

        ``is_read``: whether others need chains in the pool from their beginning on.
        """
        if self.store is StoreWhen.AUTO:
            is_free = self.eager_because is None and not is_read
            return is_free and num_slots <= MOST_TIMES * num_gpu_blocks
        return self.store is StoreWhen.LAZY

    @property
    def most_gib(self) -> float:
        """What the pool may have at most, in GiB."""
        return self.cpu_gib if self.cpu_gib_max is None else self.cpu_gib_max

    @property
    def is_resizing_meant(self) -> bool:
        """Whether the configuration says that the pool may have another size."""
        return self.cpu_gib_max is not None or self.shrink_under_pressure

    @property
    def fetches_from_nobody(self) -> bool:
        """Whether it is to decode what others prefill, and can have their KV from nowhere."""
        has_siblings = self.pool is not None and self.pool.siblings
        has_store = any(not isinstance(tier, DiskConfig) for tier in self.tiers)
        return self.fleet.role is Role.DECODE and not (self.fleet.peers or has_store or has_siblings)

    @property
    def restore_when(self) -> RestoreWhen:
        """When it restores. What others have prefilled for it is never computed again by choice."""
        is_learned = self.restore is RestoreWhen.AUTO and self.fleet.role is not Role.DECODE
        return self.restore if is_learned or self.restore is RestoreWhen.NEVER else RestoreWhen.ALWAYS

    @property
    def cpu_bytes(self) -> int:
        """The pool's size in bytes, all ranks together."""
        return int(self.cpu_gib * GIB)

    @property
    def store_answers(self) -> bool | None:
        """Whether blocks of generated tokens are stored; None: that is learned."""
        return self.store_decode_blocks if isinstance(self.store_decode_blocks, bool) else None

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "OffloadConfig":
        """Read ``kv_connector_extra_config``.

        Raises:
            ConfigError: unknown or missing keys, or values the class refuses.
        """
        known = [*(field.name for field in fields(cls) if field.name != "fleet"), *FLEET_KEYS]
        for key in settings:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config; {hint}")
        if "cpu_gib" not in settings:
            raise ConfigError(
                'kv_connector_extra_config lacks "cpu_gib", the pool size in GiB; add, say, "cpu_gib": 8'
            )
        fleet = FleetConfig(**{key: settings[key] for key in FLEET_KEYS if key in settings})
        return cls(**{key: settings[key] for key in settings if key not in FLEET_KEYS}, fleet=fleet)


def _check_socket_directory(path: object) -> None:
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise ConfigError(
            f'operator_socket is {path!r}; name a directory for sockets from "/" on, such as '
            f'"/run/user/1000/kv"'
        )
    num_bytes = len(path.encode(errors="surrogatepass"))
    if num_bytes > MOST_DIRECTORY_BYTES:
        raise ConfigError(
            f"operator_socket is {path!r}, of {num_bytes} bytes; name a directory of at most "
            f"{MOST_DIRECTORY_BYTES}: a socket's path is short"
        )


def _check_share(name: str, share: object, whole: str, example: float) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"{name} is {share!r}; give a part of {whole} from 0 to 1, such as {example}")


def check_record_trace(config: OffloadConfig) -> None:
    """Refuse a trace that cannot be written where this process runs.

    Raises:
        ConfigError: ``config.record_trace`` is in no directory, or in one that may not be written to.
    """
    if config.record_trace is None:
        return
    reason = unwritable(Path(config.record_trace), beside=True)
    if reason is not None:
        raise ConfigError(
            f"record_trace is {config.record_trace!r}: {reason}; name a file in a directory that the "
            f"engine may write to"
        )


def unwritable(path: Path, *, beside: bool = False) -> str | None:
    """Why no file can be written at ``path``, or under a new name ``beside`` it; None if it can."""
    if "\0" in str(path):
        return "it has a NUL character"  # which pathlib takes for a file that is not there
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
        target = path if path.exists() and not beside else path.parent
        return None if os.access(target, os.W_OK) else f"{target} may not be written to"
    except (OSError, ValueError) as error:
        return str(error)
