"""What a single request may ask for: in ``kv_transfer_params``, ``vllm_xargs`` and ``kv_hints``."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple

from evictor import KeepHints, Worth
from offload.scheduler import kv_hints
from offload.scheduler.client_values import quoted, warn_once, was_warned
from offload.scheduler.kv_hints import KvAction
from offload.transfer_params import HAND_OFF_KEYS

LONGEST_PIN = 24 * 3600.0
"""Seconds. A longer pin is one of that length."""

MAX_OTHER_KEYS = 64
"""Keys of a request, beside the known ones, that are looked at to find misspelt ones."""

_PREFIX = "cpu_offload_"
_PRIORITIES = {"low": Worth.LOW, "normal": Worth.NORMAL, "high": Worth.HIGH}
_UNKNOWN_KEY = "unknown key"


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints by their names: ours without the prefix ``cpu_offload_``, then vLLM's own.

    Attributes:
        store: keep this request's KV in the pool.
        load: restore KV from the pool for this request: True whatever it costs, None where that is sooner.
        priority: "low" is evicted before "normal", "high" after it.
        ttl_seconds: its KV is evicted first once it has not been used for that long; None: no such time.
        keep: False: its KV takes only free or expired space and is evicted first, whatever else it asks for.
        pin_seconds: its KV is not evicted for that long after the request's start; None: not pinned.
        report: say in the response what came from where, and why it was not more.
        max_load_tokens: restored at most, behind what the GPU has; None: all there is.
        max_offload_tokens: leading tokens that are stored at most; None: all.
    """

    store: bool = True
    load: bool | None = None
    priority: str = "normal"
    ttl_seconds: float | None = None
    keep: bool = True
    pin_seconds: float | None = None
    report: bool = False
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None

    def may_load(self, block_size: int) -> bool:
        """Whether a block of that many tokens may be restored for the request."""
        return self.load is not False and (self.max_load_tokens is None or self.max_load_tokens >= block_size)

    def may_store(self, block_size: int) -> bool:
        """Whether a block of that many tokens may be stored of the request."""
        return self.store and (self.max_offload_tokens is None or self.max_offload_tokens >= block_size)

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


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # as vLLM has it: true is no count


_BOOLEAN = _is_boolean, "true or false"
_DURATION = _is_duration, "a number of seconds above 0, 1e9 at most"
_COUNT = _is_count, "a whole number of tokens, 0 or more"
_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "store": _BOOLEAN,
    "load": _BOOLEAN,
    "priority": (_is_priority, ", ".join(f'"{name}"' for name in _PRIORITIES)),
    "ttl_seconds": _DURATION,
    "keep": _BOOLEAN,
    "pin_seconds": _DURATION,
    "report": _BOOLEAN,
    "max_load_tokens": _COUNT,
    "max_offload_tokens": _COUNT,
}
assert list(_RULES) == [field.name for field in fields(RequestHints)]
_VLLMS = {name: name for name in _RULES if name.startswith("max_")}
_OURS = {_PREFIX + name: name for name in _RULES if name not in _VLLMS}
_ABSENT = object()


class _Source(NamedTuple):
    """A place in a request where keys are read: which ones, and whether booleans arrive there as 1 and 0."""

    name: str
    keys: Mapping[str, str]
    has_no_booleans: bool


_PARAMS = _Source("kv_transfer_params", _OURS | _VLLMS, has_no_booleans=False)
_XARGS = _Source("vllm_xargs", _OURS, has_no_booleans=True)


def read_hints(params: object, xargs: object = None, actions: Sequence[KvAction] = ()) -> RequestHints:
    """Read ``{"cpu_offload_store": false, "cpu_offload_priority": "low"}``, wherever a request says so.

    A key of ours that is unknown, or has a value that it cannot have, is ignored, and the request is served.
    The log has one warning per kind for the life of the process. Keys of others are left alone.

    O(1), however much a client sends: one lookup per known key and place, then a look at ``MAX_OTHER_KEYS``
    other keys. Warnings quote little of what a client sent.

    Args:
        params: the request's ``kv_transfer_params``, which come first for each key.
        xargs: its ``vllm_xargs``, which come second. vLLM turns true and false into 1 and 0 there.
        actions: those of its ``kv_hints``, which come last.
    """
    accepted: dict[str, Any] = {}
    if params:
        _read_keys(_PARAMS, params, accepted)
    if xargs:
        _read_keys(_XARGS, xargs, accepted)
    if actions:
        for name, value, said in kv_hints.wishes(actions):
            if name not in accepted:
                _accept(accepted, name, value, kv_hints.SOURCE, said)
    return RequestHints(**accepted) if accepted else _DEFAULTS


def _read_keys(source: _Source, said: object, accepted: dict[str, Any]) -> None:
    """Add to ``accepted``, by name, what ``said`` has and ``accepted`` has not."""
    if not isinstance(said, Mapping):
        problem = f"ignored: {quoted(said)} is not an object of keys and values"
        warn_once(source.name, "not an object", problem)
        return
    num_known = 0
    for key, name in source.keys.items():
        value = said.get(key, _ABSENT) if name not in accepted else _ABSENT
        if value is _ABSENT:
            continue
        num_known += 1
        if value is None and name in _VLLMS:  # as vLLM has it: that is no value
            continue
        if source.has_no_booleans and _RULES[name] is _BOOLEAN and type(value) is int and value in (0, 1):
            value = bool(value)
        _accept(accepted, name, value, source.name, key)
    if len(said) > num_known:
        _warn_of_unknown_keys(source.name, said)


def _accept(accepted: dict[str, Any], name: str, value: Any, source: str, said: str) -> None:
    """Add one hint to ``accepted`` unless it cannot have that value; ``said``: what a client wrote."""
    is_valid, values = _RULES[name]
    if not is_valid(value):
        warn_once(source, said, f"ignored: {said!r} is {quoted(value)}; use {values}")
    elif name == "pin_seconds" and value > LONGEST_PIN:
        problem = f"shortened: {said!r} is {quoted(value)}; the longest pin is {LONGEST_PIN:.0f}"
        warn_once(source, "long pin", problem)
        accepted[name] = LONGEST_PIN
    else:
        accepted[name] = value


def _warn_of_unknown_keys(source: str, said: Mapping[object, object]) -> None:
    """Warn of a misspelt key. A client may send any number of keys, so not all are looked at."""
    if was_warned(source, _UNKNOWN_KEY):
        return
    others = (key for key in said if key not in _OURS and key not in HAND_OFF_KEYS)
    for key in islice(others, MAX_OTHER_KEYS):
        if isinstance(key, str) and key.startswith(_PREFIX):
            problem = f"ignored: {quoted(key)} is unknown; known are {', '.join(_OURS)}"
            warn_once(source, _UNKNOWN_KEY, problem)
            return
