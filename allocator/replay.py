"""A request from begin to end, as the connector serves it, for simulations and tests."""

from collections.abc import Sequence
from typing import NamedTuple

from allocator.block_allocator import CpuOffloadingBlockAllocator
from evictor import KeepHints


class Served(NamedTuple):
    """What became of a request.

    Attributes:
        depth: leading positions that were resident.
        evicted: positions evicted for the others.
        turn: its number, for ``ended``.
    """

    depth: int
    evicted: int
    turn: int


def serve(
    allocator: CpuOffloadingBlockAllocator,
    chain: Sequence[bytes],
    hints: KeepHints | None = None,
    limit: int | None = None,
) -> Served:
    """Look ``chain`` up, use it and store what is missing, all at once.

    Args:
        allocator: what it stores is resident when this returns.
        chain: prefix hashes of full blocks.
        hints: how to keep all of the chain.
        limit: store at most that many positions at a time, until nothing is left to store or no slot is left;
            None for one store of what is missing, as far as that pays.
    """
    num_evicted = allocator.num_evicted
    depth = allocator.resident_depth(chain)
    turn = allocator.touch(chain, hints)
    while (plan := allocator.plan_store(chain, len(chain), limit, hints)) is not None:
        allocator.commit(plan)
        if limit is None:
            break
    return Served(depth, allocator.num_evicted - num_evicted, turn)
