"""What ranks tell of a tier, as tests write it down."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from offload.messages import SUFFIX_BYTES, Ids, TierFacts
from offload.naming import ROOT, rows
from offload.scheduler.tiers.directory import Writing

SLOTS = 4
"""Of an extent."""


class Told(NamedTuple):
    """An extent as one rank tells of it."""

    place: int
    generation: int
    name: bytes
    parent: bytes = ROOT
    num_slots: int = SLOTS
    suffix: bytes = b""


def name(label: str) -> bytes:
    """An extent's, that tests can read."""
    return label.encode().ljust(32, b".")


def facts(
    told: Iterable[Told], *, num_places: int = 8, epoch: int = 1, part: int = 0, num_parts: int = 1
) -> TierFacts:
    """Of one rank."""
    told = list(told)
    return TierFacts(
        epoch,
        num_places,
        SLOTS,
        np.array([each.place for each in told], dtype=np.int64),
        np.array([each.generation for each in told], dtype=np.int64),
        np.array([each.num_slots for each in told], dtype=np.int64),
        rows([each.name for each in told]),
        rows([each.parent for each in told]),
        np.array([list(each.suffix.ljust(SUFFIX_BYTES, b"\0")) for each in told], dtype=np.uint8).reshape(
            -1, SUFFIX_BYTES
        ),
        part,
        num_parts,
    )


def starts(writing: Writing) -> Ids:
    """Where its extents begin, all of them whole."""
    return np.arange(len(writing.places) + 1) * SLOTS
