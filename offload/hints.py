"""What a single request may ask for, through ``kv_transfer_params``."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from types import NoneType
from typing import Any

from evictor import KeepHints, Worth

logger = logging.getLogger(__name__)

LONGEST_PIN = 24 * 3600.0
"""Seconds. A longer pin is one of that length."""

MAX_OTHER_KEYS = 64
"""Keys of a request, beside the known ones, that are looked at to find misspelt ones."""

MAX_QUOTED = 80
"""Characters of a client's key or value that a warning quotes."""

_PREFIX = "cpu_offload_"
_PRIORITIES = {"low": Worth.LOW, "normal": Worth.NORMAL, "high": Worth.HIGH}
_UNKNOWN_KEY = "unknown key"
_MAX_BITS = 256  # of an integer that is written out: 78 digits
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
    return isinstance(value, str) and value in tuple(_PRIORITIES)  # which hashes no long text


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
_KNOWN = {_PREFIX + name: name for name in _RULES}
_ABSENT = object()


def read_hints(params: object) -> RequestHints:
    """Read ``{"cpu_offload_store": false, "cpu_offload_priority": "low"}``.

    A key of ours that is unknown, or has a value that it cannot have, is ignored with one warning per kind
    for the life of the process; the request is served. Keys of others are left alone.

    O(1), however much a client sends: one lookup per known key, then a look at ``MAX_OTHER_KEYS`` other keys.
    Warnings quote no more than ``MAX_QUOTED`` characters of what a client sent.
    """
    if not params:
        return _DEFAULTS
    if not isinstance(params, Mapping):
        _warn_once("not an object", f"ignored: {_quoted(params)} is not an object of keys and values")
        return _DEFAULTS
    accepted: dict[str, Any] = {}
    for key, name in _KNOWN.items():
        value = params.get(key, _ABSENT)
        if value is _ABSENT:
            continue
        is_valid, values = _RULES[name]
        if not is_valid(value):
            _warn_once(key, f"ignored: {key!r} is {_quoted(value)}; use {values}")
        elif name == "pin_seconds" and value > LONGEST_PIN:
            _warn_once(
                "long pin", f"shortened: {key!r} is {_quoted(value)}; the longest pin is {LONGEST_PIN:.0f}"
            )
            accepted[name] = LONGEST_PIN
        else:
            accepted[name] = value
    if len(params) > len(accepted):
        _warn_of_unknown_keys(params)
    return RequestHints(**accepted) if accepted else _DEFAULTS


def _warn_of_unknown_keys(params: Mapping[object, object]) -> None:
    """Warn of a misspelt key. A client may send any number of keys, so not all are looked at."""
    if _UNKNOWN_KEY in _warned:
        return
    others = (key for key in params if key not in _KNOWN)
    for key in islice(others, MAX_OTHER_KEYS):
        if isinstance(key, str) and key.startswith(_PREFIX):
            _warn_once(_UNKNOWN_KEY, f"ignored: {_quoted(key)} is unknown; known are {', '.join(_KNOWN)}")
            return


def _quoted(value: object) -> str:
    """Type and text of what a client sent, for one line of a log.

    Never the ``repr`` of all of it: that takes time without bound and raises for deep nesting and huge
    integers. The ``repr`` of a short text has no line breaks or control characters in it.
    """
    kind = type(value)
    name = kind.__name__[:MAX_QUOTED]
    if kind is str:
        assert isinstance(value, str)
        return f"{name} {repr(value[:MAX_QUOTED])[:MAX_QUOTED]}"
    if kind is int:
        assert isinstance(value, int)
        bits = value.bit_length()
        return f"{name} {value}" if bits <= _MAX_BITS else f"{name} of {bits} bits"
    if kind in (bool, float, NoneType):
        return f"{name} {value}"
    return name


def _warn_once(kind: str, problem: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("in kv_transfer_params, here and from now on, %s", problem)
