"""Policies by name, so that a configuration can say ``eviction_policy="lru"``."""

from collections.abc import Callable
from typing import Any

from evictor.lru import LruPolicy
from evictor.policy import EvictionPolicy

_FACTORIES: dict[str, Callable[[], EvictionPolicy[Any]]] = {"lru": LruPolicy}


class UnknownPolicyError(ValueError):
    """A policy name that nobody registered; the message lists the names there are."""


def register_policy(name: str, factory: Callable[[], EvictionPolicy[Any]]) -> None:
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


def make_policy(name: str) -> EvictionPolicy[Any]:
    """Make a fresh policy.

    Raises:
        UnknownPolicyError: no policy has that name.
    """
    try:
        factory = _FACTORIES[name]
    except KeyError:
        names = ", ".join(available_policies())
        raise UnknownPolicyError(f"eviction policy {name!r} is unknown; use one of: {names}") from None
    return factory()
