"""What can be compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.trace_replay.replay import OurPool, Pool, TraceClock
from evictor import UnknownPolicyError, available_policies, make_policy
from offload.config import DEFAULT_POLICY

__all__ = ["DEFAULT", "LRU", "NATIVE", "OPTIMA", "OPTIMAL", "Policy", "find_policy", "known_names"]

LRU = "lru"
"""What all are compared with: our leaf-LRU."""
DEFAULT = "default"
OPTIMAL = "optimal"
OPTIMA = {OPTIMAL: True, "optimal-no-bypass": False}
"""Whether the optimum may decline to hold a request's blocks."""
NATIVE: dict[str, tuple[str, str | None]] = {
    "vllm-lru": ("lru", None),
    "vllm-arc": ("arc", None),
    "vllm-hazard": ("HazardCachePolicy", "offload.vllm.native_policy"),
}
"""Cache policies in vLLM's own manager: the name, and the module of one that is not vLLM's own."""

_ANY_NATIVE = "vllm-native:"
_ALL = "-all"


@dataclass(frozen=True, slots=True)
class Policy:
    """One that can be replayed, or an optimum.

    Attributes:
        name: what it was asked for by.
        real_name: another one that names the same.
        make_pool: for a capacity in blocks and a clock; None for an optimum.
    """

    name: str
    real_name: str
    make_pool: Callable[[int, TraceClock], Pool] | None


def known_names() -> list[str]:
    """Those that are compared if none are asked for."""
    return [*available_policies(), DEFAULT, *NATIVE, OPTIMAL]


def find_policy(name: str) -> Policy:
    """The one of that name: see ``benchmarks.trace_replay``. Imports vLLM only for its own.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    if name in OPTIMA:
        return Policy(name, name, None)
    if name.removesuffix(_ALL) in NATIVE:
        return _native(name, *NATIVE[name.removesuffix(_ALL)], offers_hits=name.endswith(_ALL))
    if name.startswith(_ANY_NATIVE):
        policy, _, module = name.removeprefix(_ANY_NATIVE).partition("@")
        return _native(name, policy, module or None)
    real_name = DEFAULT_POLICY if name == DEFAULT else name
    if real_name not in available_policies():
        more = (f"{each}{_ALL}" for each in NATIVE)
        names = ", ".join([*known_names(), *list(OPTIMA)[1:], *more, f"{_ANY_NATIVE}CLASS@MODULE"])
        raise UnknownPolicyError(f"{name!r} is unknown; there are {names}")
    return Policy(name, real_name, partial(_ours, real_name))


def _ours(name: str, capacity: int, clock: TraceClock) -> Pool:
    return OurPool(capacity, make_policy(name, capacity, clock))


def _native(name: str, policy: str, module: str | None, offers_hits: bool = False) -> Policy:
    try:
        from benchmarks.trace_replay.native import NativePool, check_policy
    except ImportError as error:
        raise ValueError(f"{name!r} needs vLLM: {error}") from None
    try:
        check_policy(policy, module)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return Policy(
        name, name, lambda capacity, clock: NativePool(capacity, policy, module, offers_hits=offers_hits)
    )
