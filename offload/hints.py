"""What a single request may ask for, through ``kv_transfer_params``."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from evictor import KeepHints, Worth

logger = logging.getLogger(__name__)

LONGEST_PIN = 24 * 3600.0
"""Seconds. A longer pin is one of that length."""

_PREFIX = "cpu_offload_"
_PRIORITIES = {"low": Worth.LOW, "normal": Worth.NORMAL, "high": Worth.HIGH}
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints, by their names without the prefix ``cpu_offload_``.

    Attributes:
        store: keep this request's KV in the pool.
        load: restore KV from the pool for this request.
        priority: "low" goes before what is "normal", "high" after it.
        ttl_seconds: its KV goes first once it has not been used for that long; None: never for that.
        keep: False: its KV takes room only that nobody wants, and goes first, whatever else it asks for.
        pin_seconds: its KV is not evicted for that long after the request's start; None: not pinned.
    """

    store: bool = True
    load: bool = True
    priority: str = "normal"
    ttl_seconds: float | None = None
    keep: bool = True
    pin_seconds: float | None = None

    def to_keep(self, now: float) -> KeepHints | None:
        """What the pool is told about a request that starts ``now``; None for nothing."""
        if not self.keep:
            return KeepHints(Worth.UNWANTED)
        if self.priority == "normal" and self.ttl_seconds is None and self.pin_seconds is None:
            return None
        return KeepHints(
            _PRIORITIES[self.priority],
            math.inf if self.ttl_seconds is None else self.ttl_seconds,
            -math.inf if self.pin_seconds is None else now + self.pin_seconds,
        )


_DEFAULTS = RequestHints()


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _is_priority(value: object) -> bool:
    return isinstance(value, str) and value in _PRIORITIES


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e9  # nan is not


_BOOLEAN = _is_boolean, "true or false"
_DURATION = _is_duration, "a number of seconds above 0, 1e9 at most"
_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "store": _BOOLEAN,
    "load": _BOOLEAN,
    "priority": (_is_priority, ", ".join(f'"{name}"' for name in _PRIORITIES)),
    "ttl_seconds": _DURATION,
    "keep": _BOOLEAN,
    "pin_seconds": _DURATION,
}
assert list(_RULES) == [field.name for field in fields(RequestHints)]


def read_hints(params: object) -> RequestHints:
    """Read ``{"cpu_offload_store": false, "cpu_offload_priority": "low"}``.

    Keys of others are left alone. A key of ours that is unknown, or has a value that it cannot have, is
    ignored with one warning per kind for the life of the process; the request is served.
    """
    if not params:
        return _DEFAULTS
    if not isinstance(params, Mapping):
        _warn_once("not an object", f"ignored: {params!r} is not an object of keys and values")
        return _DEFAULTS
    accepted: dict[str, Any] = {}
    for key, value in params.items():
        if not isinstance(key, str) or not key.startswith(_PREFIX):
            continue
        name = key.removeprefix(_PREFIX)
        if name not in _RULES:
            known = ", ".join(_PREFIX + name for name in _RULES)
            _warn_once("unknown key", f"ignored: {key!r} is unknown; known are {known}")
            continue
        is_valid, values = _RULES[name]
        if not is_valid(value):
            _warn_once(key, f"ignored: {key!r} is {value!r}; use {values}")
        elif name == "pin_seconds" and value > LONGEST_PIN:
            _warn_once("long pin", f"shortened: {key!r} is {value!r}; the longest pin is {LONGEST_PIN:.0f}")
            accepted[name] = LONGEST_PIN
        else:
            accepted[name] = value
    return RequestHints(**accepted) if accepted else _DEFAULTS


def _warn_once(kind: str, problem: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("in kv_transfer_params, here and from now on, %s", problem)
