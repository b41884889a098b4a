"""The index of the prefix tree: which node holds a position, and where the known part of a chain ends.

The known part of a chain is found by a binary search, not by walking: prefix hashes lead to nodes. Not all of
them do. Every ``stride``-th position is *marked* and has an entry. It is counted from the start of its chain,
so the same positions are marked in all chains that share them. From the last marked one the rest of the way
goes from node to node, at most ``stride - 1`` positions. A stride of 16 makes the index, and all work on it,
16 times smaller. Without it the growth of the dict stalled the engine in pools of millions of blocks.

The first position of each segment has an entry, too: a child is found by its hash.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat

from allocator.node import NOBODY, Node, Place
from allocator.node_table import NodeTable
from evictor.untracked import untrack

STRIDE = 16
"""One position in STRIDE of a chain is marked."""

_Border = tuple[Place, bytes | None, bytes | None]
"""A place where the known part of a chain ends, and the hashes before it and after it."""


class PositionIndex:
    """Prefix hashes of marked and of first positions, and their nodes.

    What is dead is not found. Its entries stay until ``remove``, or until what is known anew takes them over.
    """

    def __init__(self, table: NodeTable, stride: int) -> None:
        """Nothing is known; ``table`` has the nodes."""
        self.stride = stride
        self._table = table
        self._ids: dict[bytes, int] = {}  # of nodes; see evictor.untracked
        untrack(self._ids)
        self._no_border: _Border = Place(table.root, 0), None, None
        self._border: _Border = self._no_border

    def find(self, chain: Sequence[bytes], stop: int) -> Place:
        """The longest known part of the first ``stop`` positions of ``chain``, resident or filling.

        Membership along a chain is a run of yes and then a run of no. So a binary search finds the border
        in O(log n) probes, a few where all of it or none of it is known. A request is looked up several
        times before anything changes, so the border found last is tried first. While something dead is
        yet to be taken away, each probe costs O(segments before it).
        """
        size = min(stop, len(chain))
        place, before, after = self._border
        depth = place.depth
        is_before_here = depth <= size and (not depth or chain[depth - 1] == before)
        if is_before_here and (depth == size or chain[depth] == after):
            return place
        place = self._search(chain, size)
        depth = place.depth
        self._border = place, chain[depth - 1] if depth else None, chain[depth] if depth < size else None
        return place

    def node_at(
        self, hashes: Sequence[bytes], start: int, position: int, lead: Sequence[bytes] = ()
    ) -> Node | None:
        """The node that holds ``position`` of a chain; None if it is unknown.

        ``hashes`` are those of positions ``start, start + 1, ...``, and ``lead`` what comes before.
        """
        mark = position - position % self.stride
        if mark < start:
            hashes, start = [*lead, *hashes[: self.stride]], start - len(lead)
        node = self._marked_node(hashes[mark - start])
        if node is None:
            return None
        place = self._descend(node, hashes, start, mark + 1, position + 1)
        return place.node if place.depth > position else None

    def lead(self, chain: Sequence[bytes], start: int) -> list[bytes]:
        """Hashes right before ``start``: what ``node_at`` may need, and always that of ``start - 1``."""
        return list(chain[max(start - 1, 0) // self.stride * self.stride : start])

    def entries(self, node: Node, index: int = 0) -> list[bytes]:
        """Hashes that have an entry for ``node``, of its positions from ``index`` on. O(entries)."""
        hashes = self._marked(node, index)
        if not index and node.start % self.stride:
            hashes.append(node.hash_at(0))
        return hashes

    def point(self, hashes: Sequence[bytes], start: int, node: Node) -> None:
        """``node`` holds the positions of ``hashes``, from ``start`` on. O(marked ones)."""
        self.forget_border()
        self._ids.update(zip(hashes[-start % self.stride :: self.stride], repeat(node.id)))

    def point_first(self, node: Node) -> None:
        """``node`` begins where it does."""
        self._ids[node.hash_at(0)] = node.id

    def point_all(self, node: Node) -> None:
        """``node`` holds all its positions. O(entries)."""
        self.forget_border()
        self._ids.update(zip(self.entries(node), repeat(node.id)))

    def join(self, path: Sequence[Node], heir: Node) -> None:
        """``heir`` holds the positions of all nodes of ``path``, the last of a chain first. O(entries)."""
        self.forget_border()
        for node in path:
            if node is not heir:
                self._ids.update(zip(self._marked(node), repeat(heir.id)))
            if node is not path[-1] and node.start % self.stride:
                del self._ids[node.hash_at(0)]
        self._ids[path[-1].hash_at(0)] = heir.id

    def remove(self, hashes: Sequence[bytes], node: Node) -> None:
        """``node`` lost the positions of these ``entries``."""
        self.forget_border()
        if self._table.has_dead:  # what is dead may be known anew
            hashes = [each for each in hashes if self._ids.get(each) == node.id]
        deque(map(self._ids.__delitem__, hashes), maxlen=0)

    def forget_border(self) -> None:
        """Where a chain ended when it was looked up last may be wrong now."""
        self._border = self._no_border

    def begin_anew(self) -> None:
        """The table has another root: nothing is known."""
        self._no_border = Place(self._table.root, 0), None, None
        self.forget_border()

    def check_invariants(self) -> None:
        """Every marked and every first position leads to its node; nothing else has an entry."""
        (node, depth), before, _ = self._border
        assert not depth or node.hash_at(depth - 1 - node.start) == before, (
            f"no border at {depth} of {node!r}"
        )
        known: dict[bytes, Node] = {}
        for node in self._table.below(self._table.root):
            known.update(zip(self.entries(node), repeat(node)))
        for prefix_hash, node in known.items():
            found = self._table.get(self._ids.get(prefix_hash, NOBODY))
            assert found is node, f"index says {found!r} for a hash of {node!r}"
        num_dead = sum(
            self._ids.get(each) == node.id for node in self._table.dead_nodes() for each in self.entries(node)
        )
        assert len(known) + num_dead == len(self._ids), f"{len(known)} marked, {len(self._ids)} in the index"

    # Private

    def _search(self, chain: Sequence[bytes], size: int) -> Place:
        ids, stride = self._ids, self.stride
        is_known: Callable[[bytes], bool] = self._is_live if self._table.has_dead else ids.__contains__
        if size < 1 or not is_known(chain[0]):
            return Place(self._table.root, 0)
        last = (size - 1) // stride
        if not is_known(chain[last * stride]):
            last = bisect_left(range(1, last), True, key=lambda mark: not is_known(chain[mark * stride]))
            size = (last + 1) * stride
        return self._descend(self._table.node(ids[chain[last * stride]]), chain, 0, last * stride + 1, size)

    def _descend(self, node: Node, hashes: Sequence[bytes], first: int, depth: int, stop: int) -> Place:
        """The longest known part up to ``stop`` of a chain whose first ``depth`` positions are known.

        ``node`` holds the last of these, ``hashes`` begin at position ``first``.
        """
        while depth < stop:
            start, end = node.start, node.end
            if depth == end:
                child = self._table.get(self._ids.get(hashes[depth - first], NOBODY))
                if child is None or child.parent is not node or child.is_dead:
                    break
                node = child
                continue
            if end > stop:
                end = stop
            if node.hash_at(end - 1 - start) == hashes[end - 1 - first]:
                depth = end
            else:
                rest, offset = range(depth - start, end - 1 - start), start - first
                hash_at = node.hash_at
                depth += bisect_left(rest, True, key=lambda i: hash_at(i) != hashes[i + offset])
                break
        return Place(node, depth)

    def _marked(self, node: Node, index: int = 0) -> list[bytes]:
        """Hashes of the marked ones of a node's positions from ``index`` on."""
        return node.hashes_of(range(index + -(node.start + index) % self.stride, len(node), self.stride))

    def _marked_node(self, prefix_hash: bytes) -> Node | None:
        """The node that holds a marked position; None if it is unknown."""
        node = self._table.get(self._ids.get(prefix_hash, NOBODY))
        return None if node is None or self._table.is_dead(node) else node

    def _is_live(self, prefix_hash: bytes) -> bool:
        return self._marked_node(prefix_hash) is not None
