"""Values that clients sent, in warnings: quoted briefly, and each kind of warning once."""

import logging
from types import NoneType

logger = logging.getLogger(__name__)

MAX_QUOTED = 80
"""Characters of a client's key or value that a warning quotes."""

_MAX_BITS = 256  # of an integer that is written out: 78 digits
_warned: set[str] = set()


def quoted(value: object) -> str:
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


def was_warned(source: str, kind: str) -> bool:
    """Whether ``warn_once`` has warned of that already."""
    return f"{source}: {kind}" in _warned


def warn_once(source: str, kind: str, problem: str) -> None:
    """Log ``problem`` unless one of that kind was logged for that source before.

    Args:
        source: where the client sent it, such as ``kv_transfer_params``.
        kind: one of a few, which no client can add to: each is remembered for the life of the process.
        problem: the text; what it quotes of a client went through ``quoted``.
    """
    if not was_warned(source, kind):
        _warned.add(f"{source}: {kind}")
        logger.warning("in %s, here and from now on, %s", source, problem)
