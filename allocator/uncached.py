"""The list of uncached blocks: full on the GPU, no copy below."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from allocator.plans import UncachedRun
from allocator.prefix_tree import PrefixTree


class _FullBlocks(NamedTuple):
    chain: Sequence[bytes]
    stop: int


class UncachedBlocks:
    """Who holds full GPU blocks that may still need a copy.

    Only the number of full blocks is remembered. Where the uncached part begins is asked of the tree
    each time, because eviction moves it: a cursor would go stale.
    """

    def __init__(self) -> None:
        self._full: dict[Hashable, _FullBlocks] = {}

    def __len__(self) -> int:
        """Owners that may hold uncached blocks."""
        return len(self._full)

    def note(self, owner: Hashable, chain: Sequence[bytes], num_full: int) -> None:
        """``owner`` holds full blocks for the first ``num_full`` positions of ``chain``. O(1)."""
        self._full[owner] = _FullBlocks(chain, num_full)

    def forget(self, owner: Hashable) -> None:
        """``owner`` no longer holds its blocks, or all of them have a copy. O(1)."""
        self._full.pop(owner, None)

    def clear(self) -> None:
        """Nobody holds anything."""
        self._full.clear()

    def runs(self, tree: PrefixTree) -> list[UncachedRun]:
        """What is uncached now, deepest shared prefix first; owners without any are forgotten.

        Under pressure the first runs get the slots. The longer the prefix a run continues, the more is
        already invested in it. A fresh chain without its beginning is worth nothing. O(owners x log blocks).
        """
        runs = []
        for owner, (chain, stop) in list(self._full.items()):
            start = tree.find(chain, stop).depth
            if start < stop:
                runs.append(UncachedRun(owner, chain, start, stop))
            else:
                del self._full[owner]
        runs.sort(key=lambda run: -run.start)
        return runs

    def check_invariants(self) -> None:
        """Nobody holds more full blocks than there are prefix hashes."""
        for owner, (chain, stop) in self._full.items():
            assert 0 <= stop <= len(chain), f"{owner!r} holds {stop} full blocks of {len(chain)}"
