"""What one turn copies: which blocks, into or out of which slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from offload.messages import LOAD, STORE, Ids, Route

__all__ = ["DIRECTIONS", "Moves", "Pairs", "Pattern", "draw"]


class Pattern(StrEnum):
    """How the block ids and slots of a transfer lie."""

    CONTIGUOUS = "contiguous"
    """Each a run of neighbours, as a fresh pool hands out slots."""
    SCATTERED = "scattered"
    """Each drawn at random, as after long use."""


class Pairs(NamedTuple):
    """Block `block_ids[i]` and slot `slots[i]` belong together; `int64[n]` each."""

    block_ids: Ids
    slots: Ids


Moves = Mapping[Route, Pairs]
"""At once, of disjoint blocks and slots."""

DIRECTIONS: Mapping[str, Sequence[Route]] = {
    "down": [STORE],
    "up": [LOAD],
    "both": [STORE, LOAD],
}
"""From the GPU down into the pool, up again, and both at once."""


def draw(
    rng: np.random.Generator,
    pattern: Pattern,
    directions: Sequence[Route],
    num_blocks: int,
    num_places: int,
) -> Moves:
    """Draw so many blocks and slots per direction out of `num_places` of each, none of them twice."""
    chosen = []
    for _ in Pairs._fields:
        if pattern is Pattern.SCATTERED:
            ids = rng.permutation(num_places)[: num_blocks * len(directions)]
        else:
            start = rng.integers(num_places - num_blocks * len(directions) + 1)
            ids = np.arange(start, start + num_blocks * len(directions))
        chosen.append(np.split(ids.astype(np.int64), len(directions)))
    return {way: Pairs(*each) for way, *each in zip(directions, *chosen, strict=True)}
