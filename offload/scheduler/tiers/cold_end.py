"""The cold end of the pool: what it would evict next, and what of that is yet to be written below."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from allocator import CpuOffloadingBlockAllocator
from offload.scheduler.tiers.names import Path

MOST_POOLS = 4
"""Positions of chains that wait, in sizes of the pool."""

_LOOKS = 8
_MARGIN = 4
"""What is evicted next is that part of the pool: 1 / 4."""
_LEAVES = 256
"""Ends of chains looked at in one step."""


@dataclass(slots=True, eq=False)
class Chain:
    """What may be spilled of a request that is over.

    Attributes:
        hashes: its prefix hashes.
        limits: depths within which the last checkpoint is of use.
        num_looks: how often it is looked at although nothing of it is on its way.
        paths: by depth.
    """

    hashes: Sequence[bytes]
    limits: tuple[int, ...]
    num_looks: int = _LOOKS
    paths: dict[int, Path] = field(default_factory=dict)


class ColdEnd:
    """Chains of requests that are over, each until the pool is about to evict its end.

    A chain ends in the pool where its request left off, or as far as it had been stored by then. Where
    there are too many chains, the oldest are forgotten.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator) -> None:
        """``allocator``: of the pool."""
        self._allocator = allocator
        self._chains: OrderedDict[bytes, Chain] = OrderedDict()  # by the hash that it may end with
        self._num_positions = 0  # of these
        self._looked_at = -self._margin

    def add(self, chain: Chain) -> None:
        """Its request is over. O(1)."""
        num_known = self._allocator.known_depth(chain.hashes, len(chain.hashes))
        for end in {num_known, len(chain.hashes)} - {0}:
            self._forget(chain.hashes[end - 1])
            self._chains[chain.hashes[end - 1]] = chain
            self._num_positions += len(chain.hashes)
        while self._num_positions > MOST_POOLS * self._allocator.capacity:
            self._forget(next(iter(self._chains)))

    def due(self) -> list[Chain]:
        """Those whose ends go next; they are no longer here.

        Looks when a quarter of the pool or less is free, and half as much has been stored since the last
        time. Then O(log n) for each of ``_LEAVES`` ends at most.
        """
        allocator = self._allocator
        if not self._chains or allocator.num_free > self._margin:
            return []
        num_stored = allocator.num_evicted + allocator.resizing.num_used
        if num_stored < self._looked_at + self._margin // 2:
            return []
        self._looked_at = num_stored
        found = []
        for name in allocator.coldest(self._margin, _LEAVES):
            chain = self._chains.get(name)
            if chain is not None:
                self._forget(name)
                found.append(chain)
        return found

    def take(self) -> list[Chain]:
        """All of them, what was used last first; none is left here."""
        found = list(dict.fromkeys(reversed(self._chains.values())))
        self.clear()
        return found

    def clear(self) -> None:
        """Nothing is to be written."""
        self._chains.clear()
        self._num_positions = 0

    def check_invariants(self) -> None:
        """All are counted, and can end where they are filed."""
        num_positions = sum(len(chain.hashes) for chain in self._chains.values())
        assert num_positions == self._num_positions, (
            f"{num_positions} positions, {self._num_positions} counted"
        )
        for name, chain in self._chains.items():
            assert name in chain.hashes, f"a chain of {len(chain.hashes)} positions is filed under {name!r}"

    @property
    def _margin(self) -> int:
        return self._allocator.capacity // _MARGIN

    def _forget(self, name: bytes) -> None:
        chain = self._chains.pop(name, None)
        if chain is not None:
            self._num_positions -= len(chain.hashes)
