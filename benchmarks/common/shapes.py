"""Cache groups of known models, as vLLM deals their layers into groups."""

from __future__ import annotations

from collections.abc import Mapping

from offload.testing.virtual.groups import STATE, WINDOW, Group

__all__ = ["SHAPES", "SMALL_STATES"]

_BLOCK = 16
_STATE_BLOCK = 544
"""A block of attention that holds as many bytes as a state, in tokens."""


def _mamba(block_size: int) -> tuple[Group, ...]:
    return (Group(block_size=block_size), *[Group(kind=STATE, block_size=block_size)] * 3)


SHAPES: Mapping[str, tuple[Group, ...]] = {
    "gemma-3": (Group(block_size=_BLOCK), *[Group(kind=WINDOW, reach=1024, block_size=_BLOCK)] * 5),
    "gpt-oss": (Group(block_size=_BLOCK), Group(kind=WINDOW, reach=128, block_size=_BLOCK)),
    "qwen3-next": _mamba(_STATE_BLOCK),
}
"""By name: five groups of windows and a full one; one of each; three of states and a full one."""

SMALL_STATES = _mamba(_BLOCK)
"""No known model has states this small; as many positions for as many tokens as with windows."""
