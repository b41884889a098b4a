"""What a single request may ask for, through ``kv_transfer_params``."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields

logger = logging.getLogger(__name__)

_PREFIX = "cpu_offload_"
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints, by their names without the prefix ``cpu_offload_``.

    Attributes:
        store: keep this request's KV in the pool.
        load: restore KV from the pool for this request.
    """

    store: bool = True
    load: bool = True


_DEFAULTS = RequestHints()
_NAMES = tuple(field.name for field in fields(RequestHints))


def read_hints(params: object) -> RequestHints:
    """Read ``{"cpu_offload_store": false, "cpu_offload_load": false}``.

    Keys of others are left alone. A key of ours that is unknown or no boolean is ignored with one
    warning per kind for the life of the process; the request is served.
    """
    if not params:
        return _DEFAULTS
    if not isinstance(params, Mapping):
        _warn_once("not an object", f"{params!r} is not an object of keys and values")
        return _DEFAULTS
    accepted: dict[str, bool] = {}
    for key, value in params.items():
        if not isinstance(key, str) or not key.startswith(_PREFIX):
            continue
        name = key.removeprefix(_PREFIX)
        if name not in _NAMES:
            known = ", ".join(_PREFIX + name for name in _NAMES)
            _warn_once("unknown key", f"{key!r} is unknown; known are {known}")
        elif not isinstance(value, bool):
            _warn_once(key, f"{key!r} is {value!r}; use true or false")
        else:
            accepted[name] = value
    return RequestHints(**accepted) if accepted else _DEFAULTS


def _warn_once(kind: str, problem: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("ignored in kv_transfer_params, here and from now on: %s", problem)
