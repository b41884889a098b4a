"""What several settings have in common: sizes, and what is written to a tier."""

from enum import StrEnum

from offload.errors import ConfigError

GIB = 1 << 30
"""Bytes."""

_MOST_GIB = 1 << 30
"""An exbibyte: no machine has that, and all sizes below fit into 64 bits."""


class Admit(StrEnum):
    """What is written to a tier."""

    ALL = "all"
    """All that requests leave in the pool, at once."""
    POLICY = "policy"
    """The same while the tier has room. Then what the pool is about to evict, where the tier's own eviction
    policy thinks it worth more than what would go."""
    SECOND_USE = "second-use"
    """What was asked for before."""


def is_size(value: object) -> bool:
    """Whether it is a positive number of GiB that a machine could have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_GIB


def check_wait_seconds(what: str, seconds: object) -> None:
    """Refuse what is no time to wait for the answers of ``what``.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 10:
        raise ConfigError(f"wait_seconds of {what} is {seconds!r}; give 0 to 10, such as 0.02")


def read_admit(value: object) -> Admit:
    """What ``admit`` of a store says.

    Raises:
        ConfigError: it is nothing that a store knows.
    """
    if value not in (Admit.ALL, Admit.SECOND_USE):
        raise ConfigError(
            f'admit of a store is {value!r}; use "all" or "second-use": a store decides itself what it evicts'
        )
    return Admit(str(value))
