"""Which segments leases keep, and how many slots their positions have together."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from allocator.node import Node, Pin


class Covered:
    """Segments at or before the end of a lease, with how many leases keep each. Others cost nothing.

    Its owner says what splits, joins, and changes its size.
    """

    def __init__(self) -> None:
        """Nothing is leased."""
        self._counts: dict[Node, int] = {}
        self._weights: dict[Node, int] = {}
        self.num_slots = 0
        """Of positions of all of them."""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, node: Node) -> bool:
        """Whether a lease keeps that segment."""
        return node in self._counts

    def add(self, node: Node) -> None:
        """A lease ends where ``node`` does. O(segments before it)."""
        while node.parent is not None:
            self._counts[node] = self._counts.get(node, 0) + 1
            self._weigh(node)
            node = node.parent

    def remove(self, node: Node) -> None:
        """One of those that end there is over. O(segments before it)."""
        while node.parent is not None:
            self._counts[node] -= 1
            if not self._counts[node]:
                self._forget(node)
            node = node.parent

    def split(self, node: Node, new: Node) -> None:
        """``new`` is the head or the tail of what was ``node``."""
        if node in self._counts:
            self._counts[new] = self._counts[node]
            self._weigh(node)
            self._weigh(new)

    def joined(self, heir: Node, parts: Sequence[Node]) -> None:
        """``heir``, one of ``parts``, has taken over all of them. The same leases keep them all, or none."""
        if parts[0] in self._counts:
            num = self._counts[parts[0]]
            for part in parts:
                self._forget(part)
            self._counts[heir] = num
            self._weigh(heir)

    def resized(self, node: Node) -> None:
        """It has lost positions, perhaps all."""
        if node in self._counts:
            if len(node):
                self._weigh(node)
            else:
                self._forget(node)

    def check_invariants(self, nodes: Iterable[Node], leases: Collection[Pin]) -> None:
        """It has the segments of ``nodes`` that ``leases`` keep, each as often as it should."""
        counts: Counter[Node] = Counter()
        for lease in leases:
            node = lease.node
            while node is not None and node.parent is not None:
                counts[node] += 1
                node = node.parent
        assert counts == self._counts, f"leases keep {counts}, counted are {self._counts}"
        assert set(counts) <= set(nodes), "a lease keeps what is out of the tree"
        weights = {node: node.slots.size for node in counts}
        assert weights == self._weights, f"leased nodes have {weights} slots, counted are {self._weights}"
        assert self.num_slots == sum(weights.values()), f"{self.num_slots} slots are counted as leased"

    # Private

    def _weigh(self, node: Node) -> None:
        weight: int = node.slots.size
        self.num_slots += weight - self._weights.get(node, 0)
        self._weights[node] = weight

    def _forget(self, node: Node) -> None:
        self._counts.pop(node, None)
        self.num_slots -= self._weights.pop(node, 0)
