"""The policies over single blocks, slow and obvious: lists, and a look at everything for each victim."""

from collections.abc import Callable
from typing import Any


class Blocks:
    """Blocks with a rank each. Only those without a block after them are evicted: the lowest rank first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.now = 0
        self.parents: dict[bytes, bytes | None] = {}  # of those that are here
        self.ranks: dict[bytes, Any] = {}

    def request(self, chain: list[bytes]) -> int:
        """Ask for ``chain`` and store what is missing; return how many of its blocks were here."""
        self.now += 1
        depth = next((depth for depth, block in enumerate(chain) if block not in self.parents), len(chain))
        self.use(chain[:depth], chain[depth:])
        for position in range(depth, len(chain)):
            block, before = chain[position], chain[position - 1] if position else None
            if len(self.parents) == self.capacity:
                leaves = self.parents.keys() - self.parents.values() - {before}
                if not leaves:
                    break
                victim = self.victim(leaves, block)
                self.evict(victim)
                del self.parents[victim]
            self.parents[block] = before
            self.store(block)
        return depth

    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        raise NotImplementedError

    def store(self, block: bytes) -> None:
        raise NotImplementedError

    def victim(self, leaves: set[bytes], newcomer: bytes) -> bytes:
        ranks = [self.ranks[leaf] for leaf in leaves]
        assert len(set(ranks)) == len(ranks), "an ambiguous model"
        return min(leaves, key=self.ranks.__getitem__)

    def evict(self, block: bytes) -> None:
        del self.ranks[block]


class FifoBlocks(Blocks):
    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        pass

    def store(self, block: bytes) -> None:
        self.ranks[block] = self.now


class LruBlocks(Blocks):
    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        self.ranks.update(dict.fromkeys(path, self.now))

    def store(self, block: bytes) -> None:
        self.ranks[block] = self.now


class LfuBlocks(Blocks):
    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        for block in path:
            self.ranks[block] = self.ranks[block][0] + 1, self.now

    def store(self, block: bytes) -> None:
        self.ranks[block] = 1, self.now


class ArcBlocks(Blocks):
    """A rank is whether it is in T2, and the last use. B1 and B2 in order of eviction."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        self.ghosts: tuple[list[bytes], list[bytes]] = [], []

    @property
    def num_once(self) -> int:
        return sum(not again for again, _ in self.ranks.values())

    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        self.ranks.update(dict.fromkeys(path, (True, self.now)))
        b1, b2 = self.ghosts
        for block in missing:
            if block in b1:
                self.target = min(self.capacity, self.target + max(1, len(b2) / len(b1)))
            elif block in b2:
                self.target = max(0, self.target - max(1, len(b1) / len(b2)))
            else:
                break

    def store(self, block: bytes) -> None:
        self.ranks[block] = any(block in ghosts for ghosts in self.ghosts), self.now
        for ghosts in self.ghosts:
            if block in ghosts:
                ghosts.remove(block)
        self.trim()

    def victim(self, leaves: set[bytes], newcomer: bytes) -> bytes:
        from_t2 = self.num_once <= self.target
        if newcomer in self.ghosts[1] and self.num_once == self.target:
            from_t2 = False
        return super().victim({leaf for leaf in leaves if self.ranks[leaf][0] == from_t2} or leaves, newcomer)

    def evict(self, block: bytes) -> None:
        again, _ = rank = self.ranks.pop(block)
        self.ghosts[again].append(block)
        if (before := self.parents[block]) is not None:
            self.ranks[before] = max(self.ranks[before], rank)  # worth no less than what continued it
        self.trim()

    def trim(self) -> None:
        """T1 and B1 are no more than the pool has room for, nor are B1 and B2."""
        b1, b2 = self.ghosts
        del b1[: max(0, len(b1) + self.num_once - self.capacity)]
        del b2[: max(0, len(b1) + len(b2) - self.capacity)]


class S3FifoBlocks(Blocks):
    """Queues are lists, whose turn it is first; a rank is the number of uses.

    For chains of one block: of others, blocks with the same past would have to move on together.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.num_small = max(1, capacity // 10)
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghosts: list[bytes] = []

    def use(self, path: list[bytes], missing: list[bytes]) -> None:
        for block in reversed(path):
            self.ranks[block] = min(self.ranks[block] + 1, 3)
            if block in self.small and self.ranks[block] == 2:
                self.small.remove(block)
                self.main.append(block)
                self.ranks[block] = 0

    def store(self, block: bytes) -> None:
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)
        self.ranks[block] = 0

    def victim(self, leaves: set[bytes], newcomer: bytes) -> bytes:
        small = [block for block in self.small if block in leaves]
        if small and (len(self.small) >= self.num_small or not leaves & set(self.main)):
            return small[0]
        while True:
            block = next(block for block in self.main if block in leaves)
            if not self.ranks[block]:
                return block
            self.ranks[block] -= 1
            self.main.remove(block)
            self.main.append(block)

    def evict(self, block: bytes) -> None:
        del self.ranks[block]
        if block in self.small:
            self.small.remove(block)
            self.ghosts.append(block)
            del self.ghosts[: max(0, len(self.ghosts) - (self.capacity - self.num_small))]
        else:
            self.main.remove(block)


MODELS: dict[str, Callable[[int], Blocks]] = {
    "arc": ArcBlocks,
    "fifo": FifoBlocks,
    "lfu": LfuBlocks,
    "lru": LruBlocks,
}
"""By name of the policy, those that do the same with single blocks as with segments."""
