"""Policies by name, so that a configuration can say ``eviction_policy="lru"``."""

import time
from collections.abc import Callable
from typing import Any

from evictor.arc import ArcPolicy
from evictor.fifo import FifoPolicy
from evictor.hazard import HazardPolicy
from evictor.lfu import LfuPolicy
from evictor.lru import LruPolicy
from evictor.policy import EvictionPolicy
from evictor.s3fifo import S3FifoPolicy

Clock = Callable[[], float]
"""Seconds since some moment, never going back."""

Factory = Callable[[int, Clock], EvictionPolicy[Any]]
"""Makes a policy for a pool of so many slots that reads the time there."""

_FACTORIES: dict[str, Factory] = {
    "arc": lambda capacity, clock: ArcPolicy(capacity),
    "fifo": lambda capacity, clock: FifoPolicy(),
    "hazard": lambda capacity, clock: HazardPolicy(capacity, clock),
    "lfu": lambda capacity, clock: LfuPolicy(),
    "lru": lambda capacity, clock: LruPolicy(),
    "s3fifo": lambda capacity, clock: S3FifoPolicy(capacity),
}


class UnknownPolicyError(ValueError):
    """A policy name that is not registered; the message lists the registered names."""


def register_policy(name: str, factory: Factory) -> None:
    """Make ``factory`` available under ``name``.

    Raises:
        ValueError: the name is taken. Policies are never replaced silently.
    """
    if name in _FACTORIES:
        raise ValueError(f"eviction policy {name!r} is already registered; choose another name")
    _FACTORIES[name] = factory


def available_policies() -> list[str]:
    """The registered names, sorted."""
    return sorted(_FACTORIES)


def make_policy(name: str, capacity: int, clock: Clock = time.monotonic) -> EvictionPolicy[Any]:
    """Make a fresh policy.

    Args:
        name: one of ``available_policies()``.
        capacity: slots of the pool; what a policy remembers of the past is in proportion to it.
        clock: the time, for policies that learn how long it takes until something is used again.

    Raises:
        UnknownPolicyError: no policy has that name.
    """
    try:
        factory = _FACTORIES[name]
    except KeyError:
        names = ", ".join(available_policies())
        raise UnknownPolicyError(f"eviction policy {name!r} is unknown; use one of: {names}") from None
    return factory(capacity, clock)
