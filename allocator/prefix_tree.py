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

The tree moves positions, nothing else: slots, policy and jobs are the allocator's.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from allocator.slot_pool import Slots

STRIDE = 16
"""Every so manieth position of a chain is marked."""


class Node:
    """A segment: consecutive chain positions without a branch between them. Compared by identity."""

    __slots__ = ("_buffer", "children", "hashes", "parent", "pins", "resident", "start")

    def __init__(self, parent: "Node | None", start: int, hashes: list[bytes], slots: Slots) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.children: dict[bytes, Node] = {}  # by their first hash
        self.pins: frozenset[Pin] = frozenset()  # most have none, and share that
        self.resident = 0
        self._buffer = slots

    def __len__(self) -> int:
        return len(self.hashes)

    def __repr__(self) -> str:
        return f"<Node [{self.start}..{self.end}) resident={self.resident} pins={len(self.pins)}>"

    @property
    def end(self) -> int:
        """The chain position after the last one here."""
        return self.start + len(self.hashes)

    @property
    def slots(self) -> Slots:
        """Slots by position and column, ``int64[len(self), columns]``; -1 where a column is absent."""
        return self._buffer[: len(self.hashes)]

    @property
    def is_evictable(self) -> bool:
        """Whether its tail may go: a leaf, unpinned, with nothing on its way into it."""
        return not self.children and not self.pins and 0 < self.resident == len(self.hashes)

    def extend(self, hashes: Sequence[bytes], slots: Slots) -> None:
        """Append positions; amortized O(new positions)."""
        size = len(self.hashes)
        needed = size + len(hashes)
        if needed > len(self._buffer):
            grown = np.empty((max(needed, 2 * size), self._buffer.shape[1]), dtype=np.int64)
            grown[:size] = self._buffer[:size]
            self._buffer = grown
        self._buffer[size:needed] = slots
        self.hashes.extend(hashes)

    def truncate(self, size: int) -> "Removed":
        """Keep the first ``size`` positions and return the others."""
        if not size:
            removed = Removed(self, self.start, self.hashes, self.slots, self.resident)
            self.hashes, self._buffer, self.resident = [], self._buffer[:0], 0
            return removed
        hashes, slots = self.hashes[size:], self.slots[size:].copy()
        removed = Removed(self, self.start + size, hashes, slots, max(0, self.resident - size))
        del self.hashes[size:]
        self.resident = min(self.resident, size)
        if size * 4 < len(self._buffer):
            self._buffer = self._buffer[:size].copy()
        return removed

    def behead(self, size: int) -> None:
        """Give up the first ``size`` positions, which somebody else took over."""
        self._buffer = self._buffer[size : len(self.hashes)].copy()
        del self.hashes[:size]
        self.start += size
        self.resident = max(0, self.resident - size)


class Pin:
    """A promise that ``slots``, of positions that end where ``node`` ends, stay what they are.

    Pins hang, like children, at the end of a node: nothing before them is evictable. Splits carry them
    along; a cut leaves them at the end of what is left, and with no ``node`` when nothing is.
    """

    __slots__ = ("node", "slots", "start")

    def __init__(self, node: Node, slots: Slots) -> None:
        self.node: Node | None = node
        self.slots = slots
        self.start = node.end - len(slots)
        node.pins |= {self}


class Place(NamedTuple):
    """A point in the tree: the first ``depth`` positions of some chain, the deepest of them in ``node``."""

    node: Node
    depth: int


_Border = tuple[Place, bytes | None, bytes | None]
"""A place where the known part of a chain ends, and the hashes before it and after it."""


class Removed(NamedTuple):
    """Positions from ``start`` on that left ``node``: ``resident`` ones first, the others were filling."""

    node: Node
    start: int
    hashes: list[bytes]
    slots: Slots
    resident: int


class PrefixTree:
    """Segments and their index. Columns: slots per chain position, one for models with one cache group."""

    def __init__(self, columns: int = 1, stride: int = STRIDE) -> None:
        self.root = Node(None, 0, [], np.empty((0, columns), dtype=np.int64))
        self.columns = columns
        self.stride = stride
        self._index: dict[bytes, Node] = {}
        self._no_border: _Border = Place(self.root, 0), None, None
        self._border: _Border = self._no_border

    def find(self, chain: Sequence[bytes], stop: int) -> Place:
        """The longest known part of the first ``stop`` positions of ``chain``, resident or filling.

        Membership along a chain is a run of yes and then a run of no, so a binary search finds the
        border in O(log n) probes; both common cases, all of it and none of it, take a few. A request is
        looked up several times before anything changes, so the border found last is tried first.
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
        node = self._index.get(hashes[mark - start])
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
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self, node: Node) -> list[Node]:
        """``node`` and its ancestors but the root, upwards. O(segments)."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def append(self, place: Place, hashes: Sequence[bytes], slots: Slots, may_grow: bool = True) -> Node:
        """Hang filling positions below ``place``, which must be the end of its node.

        A childless node that ``may_grow`` does so in place, so a chain that is only ever extended stays one
        segment; not a pinned one, whose pins end where it ends.
        """
        node, depth = place
        assert depth == node.end, f"{place} is not at the end of its node; split first"
        if node.parent is None or node.children or node.pins or not may_grow:
            child = Node(node, depth, list(hashes), slots.copy())
            node.children[hashes[0]] = child
            node = child
        else:
            node.extend(hashes, slots)
        self._point(hashes, depth, node)
        return node

    def split(self, place: Place) -> Node:
        """Cut ``place.node`` in two at ``place.depth``, strictly inside it; return the new node.

        The smaller side gets the new node, so over any history a position is re-pointed O(log n) times.
        """
        node, depth = place
        size = depth - node.start
        assert 0 < size < len(node), f"{place} is not inside its node"
        assert node.parent is not None
        if size > len(node) - size:
            new = self._split_off_tail(node, size)
        else:
            new = self._split_off_head(node, size)
        self._point(new.hashes, new.start, new)
        return new

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
        """Remove up to so many of the last positions of a childless node, and itself when nothing is left."""
        assert not node.children, f"{node!r} has children"
        left = len(node.hashes) - num_positions
        removed = node.truncate(left if left > 0 else 0)
        self._forget(removed)
        if not node.hashes:
            self._unlink(node, removed.hashes[0])
        return removed

    def cut(self, place: Place) -> list[Removed]:
        """Remove everything from chain position ``place.depth`` on: that part of the node, all below it.

        Pins keep what is left of their positions. ``Place(root, 0)`` empties the tree.
        """
        node, depth = place
        pruned = list(node.children.values())
        for below in pruned:
            pruned.extend(below.children.values())
        node.children = {}
        removed = [below.truncate(0) for below in pruned]
        if depth < node.end:
            removed.append(node.truncate(depth - node.start))
        for part in removed:
            self._forget(part)
        left = node if node.hashes or node.parent is None else node.parent
        self._hand_pins(removed, left)
        for below in pruned:
            below.parent = None
        if left is not node:
            self._unlink(node, removed[-1].hashes[0])
        return removed

    def check_invariants(self) -> None:
        """Index, links and borders agree."""
        (node, depth), before, _ = self._border
        assert not depth or node.hashes[depth - 1 - node.start] == before, f"no border at {depth} of {node!r}"
        marked: dict[bytes, Node] = {}
        for node in self.nodes():
            parent = node.parent
            assert node.hashes, f"{node!r} is empty"
            assert parent is not None and parent.children.get(node.hashes[0]) is node, (
                f"{node!r} is not its parent's child"
            )
            assert node.start == parent.end, f"{node!r} hangs below {parent!r}"
            assert 0 <= node.resident <= len(node), f"{node!r} has its border outside"
            if parent is not self.root and parent.resident < len(parent):
                assert node.resident == 0, f"{node!r} is resident below filling {parent!r}"
            assert node.slots.shape == (len(node), self.columns), f"{node!r} has slots {node.slots.shape}"
            for pin in node.pins:
                assert pin.node is node, f"a pin of {node!r} says it hangs on {pin.node!r}"
            marked.update(zip(self._marked(node.hashes, node.start), repeat(node)))
        for prefix_hash, node in marked.items():
            found = self._index.get(prefix_hash)
            assert found is node, f"index says {found!r} for a hash of {node!r}"
        assert len(marked) == len(self._index), f"{len(marked)} marked, {len(self._index)} in the index"

    def _search(self, chain: Sequence[bytes], size: int) -> Place:
        index, stride = self._index, self.stride
        if size < 1 or chain[0] not in index:
            return Place(self.root, 0)
        last = (size - 1) // stride
        if chain[last * stride] not in index:
            last = bisect_left(range(1, last), True, key=lambda mark: chain[mark * stride] not in index)
            size = (last + 1) * stride
        return self._descend(index[chain[last * stride]], chain, 0, last * stride + 1, size)

    def _descend(self, node: Node, hashes: Sequence[bytes], first: int, depth: int, stop: int) -> Place:
        """The longest known part up to ``stop`` of a chain whose first ``depth`` positions are known.

        ``node`` holds the last of these, ``hashes`` begin at position ``first``.
        """
        while depth < stop:
            mine, start = node.hashes, node.start
            end = start + len(mine)
            if depth == end:
                child = node.children.get(hashes[depth - first])
                if child is None:
                    break
                node = child
                continue
            if end > stop:
                end = stop
            if mine[end - 1 - start] == hashes[end - 1 - first]:
                depth = end
            else:
                rest, offset = range(depth - start, end - 1 - start), start - first
                depth += bisect_left(rest, True, key=lambda i: mine[i] != hashes[i + offset])
                break
        return Place(node, depth)

    def _split_off_tail(self, node: Node, size: int) -> Node:
        part = node.truncate(size)
        tail = Node(node, node.end, part.hashes, part.slots)
        tail.resident = part.resident
        tail.children, node.children = node.children, {tail.hashes[0]: tail}
        tail.pins, node.pins = node.pins, frozenset()
        for child in tail.children.values():
            child.parent = tail
        for pin in tail.pins:
            pin.node = tail
        return tail

    def _split_off_head(self, node: Node, size: int) -> Node:
        parent = node.parent
        assert parent is not None
        head = Node(parent, node.start, node.hashes[:size], node.slots[:size].copy())
        head.resident = min(node.resident, size)
        parent.children[head.hashes[0]] = head
        node.behead(size)
        head.children = {node.hashes[0]: node}
        node.parent = head
        return head

    def _marked(self, hashes: Sequence[bytes], start: int) -> Sequence[bytes]:
        """Those of consecutive positions from ``start`` on that are marked."""
        return hashes[-start % self.stride :: self.stride]

    def _point(self, hashes: Sequence[bytes], start: int, node: Node) -> None:
        self._border = self._no_border
        self._index.update(zip(self._marked(hashes, start), repeat(node)))

    def _forget(self, removed: Removed) -> None:
        self._border = self._no_border
        deque(map(self._index.__delitem__, self._marked(removed.hashes, removed.start)), maxlen=0)

    def _unlink(self, node: Node, first_hash: bytes) -> None:
        assert node.parent is not None
        del node.parent.children[first_hash]
        node.parent = None

    def _hand_pins(self, removed: list[Removed], left: Node) -> None:
        """Pins of nodes that lost their end hang at the end of ``left``, unless that is the root."""
        pins = {pin for part in removed for pin in part.node.pins}
        for part in removed:
            part.node.pins = frozenset()
        for pin in pins:
            pin.node = None if left is self.root else left
        if left is not self.root:
            left.pins |= pins
