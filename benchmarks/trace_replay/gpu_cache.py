"""A model of the GPU's own prefix cache, as vLLM's block pool keeps it, for requests that follow each other.

vLLM frees the blocks of a request from the last to the first, behind all that are free already, and takes
the first free ones for what is new. So a block that is free belongs to the last request that used it, the
requests stand in the order of their ends, and each loses its tail first. That is all that is modelled here:
a request owns a run of its chain's positions, up to where later requests share it.

Blocks of answers, and the last one of a prompt if it is not full, are not modelled. They are never found
again in a trace. vLLM puts those that are not full before all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["GpuCache", "OwnedRun"]

Chain = Sequence[bytes]


@dataclass(slots=True, eq=False)
class OwnedRun:
    """Positions ``start <= p < stop`` of a chain that the GPU has, and no later request has used.

    ``copied[p]``: whether whoever has the cache has noted a copy of position ``p``.
    """

    chain: Chain
    start: int
    stop: int
    copied: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def num_copied(self) -> int:
        """How many of its positions have a copy. O(positions), in whole arrays."""
        return int(np.count_nonzero(self.copied[self.start : self.stop]))


class GpuCache:
    """Full blocks by prefix hash, the least recently used first, tails before what they continue.

    Args:
        capacity: in blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._runs: dict[OwnedRun, None] = {}
        self._owners: dict[bytes, OwnedRun] = {}

    def __len__(self) -> int:
        """Blocks that it has."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks without a prefix hash."""
        return self.capacity - len(self._owners)

    def depth(self, chain: Chain) -> int:
        """How many leading positions of ``chain`` it has. O(log n): what it has of a chain is a prefix."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._owners:
                low = middle + 1
            else:
                high = middle
        return low

    def touch(self, chain: Chain, depth: int) -> OwnedRun:
        """A request uses the first ``depth`` positions of ``chain``, which are there. It owns them now.

        The run that is returned is the newest. ``extend`` lets it grow. Copies are noted of the same
        positions as before.
        """
        newest = OwnedRun(chain, 0, depth, np.zeros(len(chain), dtype=np.bool_))
        position = 0
        while position < depth:
            run = self._owners[chain[position]]
            stop = self._end_of(run, chain, position + 1, min(run.stop, depth))
            newest.copied[position:stop] = run.copied[position:stop]
            position = run.start = stop
            if not len(run):
                del self._runs[run]
        self._runs[newest] = None
        self._owners.update(dict.fromkeys(chain[:depth], newest))
        return newest

    def extend(self, run: OwnedRun, num_blocks: int) -> None:
        """The newest run grows by so many blocks, for which there is room."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks, {self.num_free} are free"
        new = run.chain[run.stop : run.stop + num_blocks]
        self._owners.update(dict.fromkeys(new, run))
        run.stop += len(new)

    def next_to_go(self, num_blocks: int) -> list[OwnedRun]:
        """The runs that have the next so many blocks to be evicted; the last of them may have others, too."""
        found: list[OwnedRun] = []
        for run in self._runs:
            if num_blocks <= 0:
                break
            num_blocks -= len(run)
            found.append(run)
        return found

    def oldest_first(self) -> Iterator[OwnedRun]:
        """Runs, those that are evicted next first. Nothing else may be called until it ends."""
        return iter(self._runs)

    def newest_first(self) -> Iterator[OwnedRun]:
        """Runs, those that are evicted last first. Nothing else may be called until it ends."""
        return reversed(self._runs)

    def evict(self, num_blocks: int) -> list[OwnedRun]:
        """Take so many blocks, as they stand in the queue. Returns the runs that lost some or all."""
        changed: list[OwnedRun] = []
        while num_blocks > 0:
            run = next(iter(self._runs))
            num_taken = min(num_blocks, len(run))
            for prefix_hash in run.chain[run.stop - num_taken : run.stop]:
                del self._owners[prefix_hash]
            run.stop -= num_taken
            num_blocks -= num_taken
            changed.append(run)
            if not len(run):
                del self._runs[run]
        return changed

    def check_invariants(self) -> None:
        """Every block has one owner, no run is empty, and what it has of a chain is a prefix. O(blocks)."""
        owned = {each: run for run in self._runs for each in run.chain[run.start : run.stop]}
        assert owned == self._owners, "runs and owners differ"
        assert len(owned) == sum(map(len, self._runs)), "two runs own one block"
        assert len(owned) <= self.capacity, f"{len(owned)} blocks, there are {self.capacity}"
        for run in self._runs:
            missing = [each for each in run.chain[: run.start] if each not in owned]
            assert not missing, f"{len(missing)} positions before a run are gone"

    # Private

    def _end_of(self, run: OwnedRun, chain: Chain, low: int, high: int) -> int:
        """Up to where ``run`` owns positions of ``chain``, which may go another way from ``low`` on."""
        while low < high:
            middle = (low + high) // 2
            if self._owners[chain[middle]] is run:
                low = middle + 1
            else:
                high = middle
        return low
