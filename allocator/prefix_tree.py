"""The prefix tree: which chain positions have a slot, as segments rather than single blocks.

    root ── [0..99] ──┬── [100..179]        one node = one run of consecutive positions
                      └── [100..131] ── [132..140]

A node covers chain positions ``start <= p < end``. Its leading ``resident`` positions have complete
bytes, the rest is filling; below a filling position nothing is resident.

The known part of a chain is found by a binary search, not by walking: ``index`` maps prefix hashes to
nodes. Not all of them: every ``stride``-th position is *marked* and has an entry, counted from the start
of its chain, so that the same positions are marked in all chains that share them. From the last marked
one the rest of the way goes from node to node, at most ``stride - 1`` positions. A stride of 16 makes the
index, and all work on it, 16 times smaller; it is what kept a pool of millions of blocks from stalling
the engine each time the dict grew.

The first position of each segment has an entry, too: a child is found by its hash.

What is cut off is *dead* at once: nobody finds it. Its nodes hang where they hung until ``trim`` takes them
away one after the other, so that a cut of a million positions need not be done in one go.

The tree moves positions, nothing else: slots, policy and jobs are the allocator's.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from allocator.errors import ChainError
from allocator.node import NO_PINS, NOBODY, Node, Removed
from allocator.node_table import NodeTable
from allocator.slot_pool import Slots
from evictor.untracked import untrack

STRIDE = 16
"""Every so manieth position of a chain is marked."""


class Place(NamedTuple):
    """A point in the tree: the first ``depth`` positions of some chain, the deepest of them in ``node``."""

    node: Node
    depth: int


_Border = tuple[Place, bytes | None, bytes | None]
"""A place where the known part of a chain ends, and the hashes before it and after it."""


class PrefixTree:
    """Segments and their index. Columns: slots per chain position, one for models with one cache group."""

    def __init__(self, columns: int = 1, stride: int = STRIDE) -> None:
        self.columns = columns
        self.stride = stride
        self._width: int | None = None  # bytes per prefix hash, all of one length
        self._index: dict[bytes, int] = {}  # ids of nodes; see evictor.untracked
        untrack(self._index)
        self._table = NodeTable(columns)
        self._no_border: _Border = Place(self.root, 0), None, None
        self._border: _Border = self._no_border

    @property
    def root(self) -> Node:
        """Has no position; all chains begin below it."""
        return self._table.root

    @property
    def has_dead(self) -> bool:
        """Whether anything that was cut off is yet to be taken away."""
        return self._table.has_dead

    def find(self, chain: Sequence[bytes], stop: int) -> Place:
        """The longest known part of the first ``stop`` positions of ``chain``, resident or filling.

        Membership along a chain is a run of yes and then a run of no, so a binary search finds the
        border in O(log n) probes; both common cases, all of it and none of it, take a few. A request is
        looked up several times before anything changes, so the border found last is tried first. While
        something dead is yet to be taken away, each probe costs O(segments before it).
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

    def resident_part(self, place: Place) -> Place:
        """The resident part of the chain that leads to ``place``. O(segments being filled)."""
        node, depth = place
        while node.parent is not None:
            depth = min(depth, node.start + node.resident)
            if depth > node.start:
                break
            node = node.parent
        return Place(node, depth)

    def slots_of(self, place: Place, start: int) -> Slots:
        """Slots of positions ``start <= p < place.depth``, as a fresh array of one row per position."""
        parts = []
        node, stop = place
        while stop > start:
            parts.append(node.slots[max(start - node.start, 0) : stop - node.start])
            stop = node.start
            if node.parent is None:
                break
            node = node.parent
        parts.reverse()
        return np.concatenate(parts) if parts else np.empty((0, self.columns), dtype=np.int64)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root that is not dead, parents before children."""
        return self._table.below(self.root)

    def below(self, node: Node) -> Iterator[Node]:
        """``node``, unless it is a root, and all below it but what is dead, parents before children."""
        if node.parent is not None:
            yield node
        yield from self._table.below(node)

    def dead_nodes(self) -> Iterator[Node]:
        """Every node that was cut off and is yet to be taken away."""
        return self._table.dead_nodes()

    def children(self, node: Node) -> Iterator[Node]:
        """Those that hang at its end, dead ones too."""
        return self._table.children(node)

    def is_dead(self, node: Node) -> bool:
        """Whether it was cut off, or hangs on what was. O(segments before it), O(1) if nothing was."""
        return self._table.is_dead(node)

    def is_only_child(self, node: Node) -> bool:
        """Whether nothing hangs beside it."""
        return node.next == NOBODY and node.previous == NOBODY

    def path(self, node: Node) -> list[Node]:
        """``node`` and its ancestors but the root, upwards. O(segments)."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def append(
        self, place: Place, hashes: Sequence[bytes], data: bytes, slots: Slots, may_grow: bool = True
    ) -> Node:
        """Hang filling positions below ``place``, which must be the end of its node.

        A childless node that ``may_grow`` does so in place, so a chain that is only ever extended stays one
        segment; not a pinned one, whose pins end where it ends. ``data``: ``packed(hashes)``.
        """
        node, depth = place
        assert depth == node.end, f"{place} is not at the end of its node; split first"
        if node.parent is None or node.child or node.pins or not may_grow:
            node = self._table.make(node, depth, data, slots.copy())
            self._index[hashes[0]] = node.id
        else:
            node.extend(data, slots)
        self._point(self._marked(hashes, depth), node)
        return node

    def packed(self, hashes: Sequence[bytes]) -> bytes:
        """``hashes`` one after the other.

        Raises:
            ChainError: they are of another length than those stored before.
        """
        data = b"".join(hashes)
        width = len(hashes[0]) if self._width is None else self._width
        if len(data) != width * len(hashes):
            raise ChainError(f"prefix hashes must all have {width} bytes; {len(hashes)} have {len(data)}")
        self._width = width
        return data

    def split(self, place: Place) -> Node:
        """Cut ``place.node`` in two at ``place.depth``, strictly inside it; return the new node.

        The side with less to re-point gets the new node, so over any history of splits a position is
        re-pointed O(log n) times.
        """
        node, depth = place
        size = depth - node.start
        assert 0 < size < len(node), f"{place} is not inside its node"
        limit = size // self.stride + 1
        is_head_larger = self._work((len(node) - size) // self.stride, node, limit) < limit
        return self._split_off_tail(node, size) if is_head_larger else self._split_off_head(node, size)

    def join(self, path: Sequence[Node]) -> Node:
        """Make one node of neighbours, the last of a chain first; return which of them it is.

        Each but the first has the one before it as its only child, and no pins. That with most to re-point
        remains. O(1) array work per position, and O(nodes).
        """
        last, top = path[0], path[-1]
        works = [len(node) // self.stride for node in path]
        works[0] = self._work(works[0], last, max(works) + 1)
        heir = path[works.index(max(works))]
        if heir is not top:
            assert top.parent is not None
            parent = top.parent
            self._table.unlink(top)
            self._table.unlink(heir)
            self._table.link(heir, parent)
        if heir is not last:
            for child in self.children(last):
                child.parent = heir
            heir.child, last.child = last.child, NOBODY
            heir.pins, last.pins = last.pins, NO_PINS
            for pin in heir.pins:
                pin.node = heir
        for node in path:
            if node is not heir:
                self._point(node.hashes_of(self._marks(node.start, len(node))), heir)
            if node is not top and node.start % self.stride:
                del self._index[node.hash_at(0)]
        self._index[top.hash_at(0)] = heir.id
        heir.absorb(path[::-1])
        for node in path:
            if node is not heir:
                self._table.end(node)
        return heir

    def settle(self, last: Node, start: int, stop: int) -> bool:
        """Make filling positions ``start <= p < stop`` resident, if everything before them is.

        ``last`` is the node of the last of them. Returns whether it was done. O(segments).
        """
        node, full = last, []
        while node.start > start and node.parent is not None:
            node = node.parent
            full.append(node)
        before = node.parent if node.start == start and node.parent is not None else node
        if before.start + before.resident < start:
            return False
        for node in full:
            node.resident = len(node)
        last.resident = stop - last.start
        return True

    def trim(self, node: Node, num_positions: int) -> Removed:
        """Remove up to so many of the last positions of a childless node, and itself when nothing is left.

        Pins keep what is left of their positions.
        """
        assert not node.child, f"{node!r} has children"
        size = len(node)
        left = max(0, size - num_positions)
        marks = node.hashes_of(self._marks(node.start + left, size - left, node.start))
        if not left and node.start % self.stride:
            marks.append(node.hash_at(0))
        removed = node.truncate(left)
        if node.pins:
            for pin in node.pins:
                pin.kept = max(0, node.end - pin.start)
        self._border = self._no_border
        if self.has_dead:  # what is dead may be known anew
            marks = [each for each in marks if self._index.get(each) == node.id]
        deque(map(self._index.__delitem__, marks), maxlen=0)
        if not left:
            self._table.remove(node)
        return removed

    def kill(self, node: Node) -> None:
        """Cut off ``node`` and all below it; the root: all there is. Nobody finds it from now on. O(1).

        It is taken away by ``trim`` of ``next_dead``; until then it keeps what is before it from eviction.
        """
        self._table.kill(node)
        self._no_border = Place(self.root, 0), None, None
        self._border = self._no_border

    def next_dead(self) -> Node | None:
        """A childless dead node, until there are none. O(1) amortized over the nodes removed."""
        return self._table.next_dead()

    def check_invariants(self) -> None:
        """Index, links and borders agree."""
        self._table.check_invariants()
        (node, depth), before, _ = self._border
        assert not depth or node.hash_at(depth - 1 - node.start) == before, (
            f"no border at {depth} of {node!r}"
        )
        known: dict[bytes, Node] = {}
        for node in self.nodes():
            self._check_node(node)
            known.update(zip(self._marked(node.hashes, node.start), repeat(node)))
            known[node.hash_at(0)] = node
        for prefix_hash, node in known.items():
            found = self._table.get(self._index.get(prefix_hash, NOBODY))
            assert found is node, f"index says {found!r} for a hash of {node!r}"
        dead = list(self.dead_nodes())
        for node in dead:
            self._check_node(node)
            for prefix_hash in [*self._marked(node.hashes, node.start), node.hash_at(0)]:
                if self._index.get(prefix_hash) == node.id:
                    known[prefix_hash] = node
        assert len(known) == len(self._index), f"{len(known)} marked, {len(self._index)} in the index"

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert len(node), f"{node!r} is empty"
        assert parent is not None
        assert node.start == parent.end, f"{node!r} hangs below {parent!r}"
        assert 0 <= node.resident <= len(node), f"{node!r} has its border outside"
        if parent.parent is not None and parent.resident < len(parent):
            assert node.resident == 0, f"{node!r} is resident below filling {parent!r}"
        assert node.slots.shape == (len(node), self.columns), f"{node!r} has slots {node.slots.shape}"
        assert len(node.data) == len(node) * (self._width or 0), (
            f"{node!r} has {len(node.data)} bytes of hashes"
        )
        for pin in node.pins:
            assert pin.node is node, f"a pin of {node!r} says it hangs on {pin.node!r}"

    # Private

    def _search(self, chain: Sequence[bytes], size: int) -> Place:
        index, stride = self._index, self.stride
        is_known: Callable[[bytes], bool] = self._is_live if self.has_dead else index.__contains__
        if size < 1 or not is_known(chain[0]):
            return Place(self.root, 0)
        last = (size - 1) // stride
        if not is_known(chain[last * stride]):
            last = bisect_left(range(1, last), True, key=lambda mark: not is_known(chain[mark * stride]))
            size = (last + 1) * stride
        return self._descend(self._table.node(index[chain[last * stride]]), chain, 0, last * stride + 1, size)

    def _descend(self, node: Node, hashes: Sequence[bytes], first: int, depth: int, stop: int) -> Place:
        """The longest known part up to ``stop`` of a chain whose first ``depth`` positions are known.

        ``node`` holds the last of these, ``hashes`` begin at position ``first``.
        """
        while depth < stop:
            start, end = node.start, node.end
            if depth == end:
                child = self._table.get(self._index.get(hashes[depth - first], NOBODY))
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

    def _marked_node(self, prefix_hash: bytes) -> Node | None:
        """The node that holds a marked position; None if it is unknown."""
        node = self._table.get(self._index.get(prefix_hash, NOBODY))
        return None if node is None or self._table.is_dead(node) else node

    def _is_live(self, prefix_hash: bytes) -> bool:
        return self._marked_node(prefix_hash) is not None

    def _work(self, num_marks: int, node: Node, limit: int) -> int:
        """What it takes to re-point so many marks and the children of ``node``; ``limit`` if it is more."""
        if num_marks >= limit:
            return limit
        return num_marks + sum(1 for _ in islice(self.children(node), limit - num_marks))

    def _split_off_tail(self, node: Node, size: int) -> Node:
        part = node.truncate(size)
        children = node.child
        node.child = NOBODY
        tail = self._table.make(node, node.end, part.data, part.slots)
        tail.resident = part.resident
        tail.child = children
        tail.pins, node.pins = node.pins, NO_PINS
        for child in self.children(tail):
            child.parent = tail
        for pin in tail.pins:
            pin.node = tail
        self._point_all(tail)
        return tail

    def _split_off_head(self, node: Node, size: int) -> Node:
        parent = node.parent
        assert parent is not None
        num_bytes = len(node.data) // len(node) * size
        self._table.unlink(node)
        head = self._table.make(parent, node.start, bytes(node.data[:num_bytes]), node.slots[:size].copy())
        head.resident = min(node.resident, size)
        node.behead(size)
        self._table.link(node, head)
        self._point_all(head)
        self._index[node.hash_at(0)] = node.id
        return head

    def _marks(self, start: int, num_positions: int, first: int | None = None) -> range:
        """Which of so many positions from ``start`` on are marked, counted from ``first`` or ``start`` on."""
        offset = start - (start if first is None else first)
        return range(offset + -start % self.stride, offset + num_positions, self.stride)

    def _marked(self, hashes: Sequence[bytes], start: int) -> Sequence[bytes]:
        """Those of consecutive positions from ``start`` on that are marked."""
        return hashes[-start % self.stride :: self.stride]

    def _point_all(self, node: Node) -> None:
        self._point(node.hashes_of(self._marks(node.start, len(node))), node)
        self._index[node.hash_at(0)] = node.id

    def _point(self, marked: Sequence[bytes], node: Node) -> None:
        self._border = self._no_border
        self._index.update(zip(marked, repeat(node.id)))
