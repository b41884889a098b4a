"""What the scheduler's and the worker's side tell each other of the pool's memory."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class MemoryFacts(NamedTuple):
    """Where a rank has its part of the pool, for whoever looks at it from outside.

    Attributes:
        machine: the machine since its last boot, and the processes there that see each other; "": not known.
        pid: of the rank.
        address: of its first slot.
        nbytes: of all of its slots.
        node: the NUMA node it was to lie on; None: any.
        is_pinned: by CUDA, so that it cannot be swapped out.
    """

    machine: str
    pid: int
    address: int
    nbytes: int
    node: int | None
    is_pinned: bool


class Resize(NamedTuple):
    """Give memory of the pool back to the system, or take it again.

    Attributes:
        number: counts them.
        starts: first slots of runs of slots, ``int64[n]``. Nothing of a job is in these.
        stops: behind the last slots of them, ``int64[n]``.
        takes: take the memory, all or none of it; else give it back.
    """

    number: int
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    takes: bool


class Resized(NamedTuple):
    """What became of a ``Resize`` on some ranks.

    Attributes:
        num_ranks: ranks where it has ended.
        error: why one of them could not take the memory; "": all could.
    """

    num_ranks: int
    error: str = ""


def merge_resized(one: Mapping[int, Resized], other: Mapping[int, Resized]) -> dict[int, Resized]:
    """What some ranks and others have said, a new one."""
    merged = dict(one)
    for number, (num_ranks, error) in other.items():
        mine = merged.get(number, Resized(0))
        merged[number] = Resized(mine.num_ranks + num_ranks, max(mine.error, error))
    return merged
