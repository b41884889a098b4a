"""The most hits that any prefix-closed cache could have, if it knew every request to come.

An id stands for its block and all before it. So every request of a descendant is one of its ancestors too,
and an ancestor's next use is never later than its descendant's. MIN keeps the blocks whose next use is
soonest and gives up the one whose next use is farthest. See Belady, A study of replacement algorithms for a
virtual-storage computer, 1966, and Mattson, Gecsei, Slutz and Traiger, Evaluation techniques for storage
hierarchies, 1970. Two blocks with the same next use are in the chain of that request. Let the later position
go first, and what MIN holds is prefix-closed. MIN has the most hits of all caches, prefix-closed or not, so
of these too.

Why it has: a hit is an interval, from one use of a block to its next, kept throughout. Whenever more of them
are open than there is room for, some have to go. The one that ends last is in the way the longest, so giving
it up is never worse (Faigle and Nawijn, Note on scheduling intervals on-line, 1995). That stays true where
the room changes from request to request, as it does without bypass: a request's own chain takes some.

Deviation: blocks are counted, not named. Those held for one coming request are consecutive positions of its
chain. They leave from the tail; and as a deeper position was last used no later than one above it, they come
at the head. So their number says which they are, and when that request comes it is the number of hits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import groupby

__all__ = ["OfflineOptimum"]


class OfflineOptimum:
    """The optimum for a sequence of requests, made ready once for any number of capacities.

    At a request, the leading positions of its chain that are resident are hits. Then the cache may change to
    any prefix-closed part of what it held and the chain, of at most its capacity. *With bypass* that is all;
    *without*, it has to hold the chain now, or as many leading positions of it as there is room for.

    Making it costs O(block accesses).
    """

    __slots__ = ("_lengths", "_next_uses")

    def __init__(self, chains: Sequence[Sequence[Hashable]]) -> None:
        """Take the requests' chains, in order: ids of blocks, equal if they and all before them are equal.

        The chains are not kept.

        Raises:
            ValueError: an id does not always follow the same id, so it does not stand for one prefix.
        """
        _check_prefixes(chains)
        self._lengths = [len(chain) for chain in chains]
        self._next_uses: list[list[tuple[int, int]]] = [[] for _ in chains]
        """For each request, in the order of its chain: a later request, how many blocks it uses next."""
        next_use: dict[Hashable, int] = {}
        for number in reversed(range(len(chains))):
            for later, blocks in groupby(map(next_use.get, chains[number])):
                if later is None:  # never used again, nor is any block after it
                    break
                self._next_uses[number].append((later, sum(1 for _ in blocks)))
            next_use.update(dict.fromkeys(chains[number], number))

    def hits(self, capacity_blocks: int, *, bypass: bool = True) -> list[int]:
        """The hits of each request, in blocks, whose sum no prefix-closed cache exceeds.

        The sum is the optimum; other ways to share it out among the requests may be as good.

        O(block accesses * log(requests)) at worst. It is far less where blocks used together are used
        together again: what counts is each run of a chain's blocks that have the same next use.

        Args:
            capacity_blocks: what the cache holds at most after a request, in blocks.
            bypass: whether it may decline to hold a request's chain.

        Raises:
            ValueError: the capacity is less than one block.
        """
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks={capacity_blocks}: must be at least 1")
        hits: list[int] = []
        held = [0] * len(self._lengths)  # blocks, by the request that uses them next
        held_blocks = 0
        farthest: list[int] = []  # a heap of those requests, negated; may also have past ones

        def keep(blocks: int) -> None:
            """Give up blocks, the farthest next use first, until there are no more than this."""
            nonlocal held_blocks
            while held_blocks > blocks:
                later = -farthest[0]
                gone = min(held[later], held_blocks - blocks)
                held[later] -= gone
                held_blocks -= gone
                if not held[later]:
                    heappop(farthest)

        for number, length in enumerate(self._lengths):
            hits.append(held[number])
            held_blocks -= held[number]
            held[number] = 0
            if not bypass:  # the chain takes its room first, so that only its own tail can be too much
                keep(max(capacity_blocks - length, 0))
            for later, blocks in self._next_uses[number]:
                if not held[later]:
                    heappush(farthest, -later)
                held[later] += blocks
                held_blocks += blocks
            keep(capacity_blocks)
        return hits


def _check_prefixes(chains: Sequence[Sequence[Hashable]]) -> None:
    nothing = object()
    follows: dict[Hashable, object] = {}
    for number, chain in enumerate(chains):
        before: object = nothing
        for position, block in enumerate(chain):
            if follows.setdefault(block, before) != before:
                known = "nothing" if follows[block] is nothing else repr(follows[block])
                found = "nothing" if before is nothing else repr(before)
                raise ValueError(
                    f"request {number}, position {position}: {block!r} follows {found}, but {known} before; "
                    "equal ids must stand for equal prefixes"
                )
            before = block
