"""The prefix tree: which chain positions have a slot, as segments rather than single blocks.

    root ── [0..99] ──┬── [100..179]        one node = one run of consecutive positions
                      └── [100..131] ── [132..140]

A node covers chain positions ``start <= p < end``. Its leading ``resident`` positions have complete
bytes, the rest is filling; below a filling position nothing is resident. ``index`` maps the prefix hash
of every position to its node, so the known part of a chain is found by galloping, not by walking.

The tree moves positions, nothing else: slots, policy and jobs are the allocator's.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from allocator.slot_pool import Slots


class Node:
    """A segment: consecutive chain positions without a branch between them. Compared by identity."""

    __slots__ = ("_buffer", "children", "hashes", "parent", "pins", "resident", "start")

    def __init__(self, parent: "Node | None", start: int, hashes: list[bytes], slots: Slots) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.children: set[Node] = set()
        self.pins: set[Pin] = set()
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
        """Slots by position and column, ``int32[len(self), columns]``; -1 where a column is absent."""
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
            grown = np.empty((max(needed, 2 * size), self._buffer.shape[1]), dtype=np.int32)
            grown[:size] = self._buffer[:size]
            self._buffer = grown
        self._buffer[size:needed] = slots
        self.hashes.extend(hashes)

    def truncate(self, size: int) -> "Removed":
        """Keep the first ``size`` positions and return the others."""
        removed = Removed(self, self.hashes[size:], self.slots[size:].copy(), max(0, self.resident - size))
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

    __slots__ = ("node", "slots")

    def __init__(self, node: Node, slots: Slots) -> None:
        self.node: Node | None = node
        self.slots = slots
        node.pins.add(self)


class Place(NamedTuple):
    """A point in the tree: the first ``depth`` positions of some chain, the deepest of them in ``node``."""

    node: Node
    depth: int


class Removed(NamedTuple):
    """Positions that left ``node``: the first ``resident`` of them were resident, the others filling."""

    node: Node
    hashes: list[bytes]
    slots: Slots
    resident: int


class PrefixTree:
    """Segments and their index. Columns: slots per chain position, one for models with one cache group."""

    def __init__(self, columns: int = 1) -> None:
        self.root = Node(None, 0, [], np.empty((0, columns), dtype=np.int32))
        self.columns = columns
        self._index: dict[bytes, Node] = {}

    def __len__(self) -> int:
        """Positions with a slot, resident or filling."""
        return len(self._index)

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._index

    def find(self, chain: Sequence[bytes], stop: int) -> Place:
        """The longest known part of the first ``stop`` positions of ``chain``, resident or filling.

        Membership along a chain is a run of yes and then a run of no, so a binary search finds the
        border in O(log n) probes; both common cases, all of it and none of it, take one or two.
        """
        index = self._index
        size = min(stop, len(chain))
        if size < 1 or chain[0] not in index:
            return Place(self.root, 0)
        if chain[size - 1] in index:
            return Place(index[chain[size - 1]], size)
        depth = bisect_left(range(1, size - 1), True, key=lambda i: chain[i] not in index) + 1
        return Place(index[chain[depth - 1]], depth)

    def resident_part(self, place: Place) -> Place:
        """The resident part of the chain that leads to ``place``. O(segments being filled)."""
        node, depth = place
        while node.parent is not None:
            depth = min(depth, node.start + node.resident)
            if depth > node.start:
                break
            node = node.parent
        return Place(node, depth)

    def is_resident(self, prefix_hash: bytes, position: int) -> bool:
        """Whether the position with that hash is resident."""
        node = self._index.get(prefix_hash)
        return node is not None and position < node.start + node.resident

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
        return np.concatenate(parts) if parts else np.empty((0, self.columns), dtype=np.int32)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def append(self, place: Place, hashes: Sequence[bytes], slots: Slots) -> Node:
        """Hang filling positions below ``place``, which must be the end of its node.

        A childless node grows in place, so a chain that is only ever extended stays one segment; not a
        pinned one, whose pins end where it ends.
        """
        node, depth = place
        assert depth == node.end, f"{place} is not at the end of its node; split first"
        if node.parent is None or node.children or node.pins:
            child = Node(node, depth, list(hashes), slots.copy())
            node.children.add(child)
            node = child
        else:
            node.extend(hashes, slots)
        self._index.update(zip(hashes, repeat(node)))
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
        self._index.update(zip(new.hashes, repeat(new)))
        return new

    def settle(self, last_hash: bytes, start: int, stop: int) -> Node:
        """Filling positions ``start <= p < stop`` are resident now, as is everything before them.

        Returns the node of the last of them, whose hash is ``last_hash``. O(segments).
        """
        last = node = self._index[last_hash]
        node.resident = stop - node.start
        while node.start > start and node.parent is not None:
            node = node.parent
            node.resident = len(node)
        return last

    def trim(self, node: Node, num_positions: int) -> Removed:
        """Remove the last positions of a childless node, and the node itself when nothing is left."""
        assert not node.children, f"{node!r} has children"
        removed = node.truncate(len(node) - num_positions)
        self._forget(removed.hashes)
        if not node.hashes:
            self._unlink(node)
        return removed

    def cut(self, place: Place) -> list[Removed]:
        """Remove everything from chain position ``place.depth`` on: that part of the node, all below it.

        Pins keep what is left of their positions. ``Place(root, 0)`` empties the tree.
        """
        node, depth = place
        pruned = list(node.children)
        for below in pruned:
            pruned.extend(below.children)
        node.children = set()
        removed = [below.truncate(0) for below in pruned]
        if depth < node.end:
            removed.append(node.truncate(depth - node.start))
        for part in removed:
            self._forget(part.hashes)
        left = node if node.hashes or node.parent is None else node.parent
        self._hand_pins(removed, left)
        for below in pruned:
            below.parent = None
        if left is not node:
            self._unlink(node)
        return removed

    def place_of(self, prefix_hash: bytes) -> Place | None:
        """The place before the position with that hash, or None if it is unknown. O(segment)."""
        node = self._index.get(prefix_hash)
        return None if node is None else Place(node, node.start + node.hashes.index(prefix_hash))

    def check_invariants(self) -> None:
        """Index, links and borders agree."""
        seen = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and node in parent.children, f"{node!r} is not its parent's child"
            assert node.hashes, f"{node!r} is empty"
            assert node.start == parent.end, f"{node!r} hangs below {parent!r}"
            assert 0 <= node.resident <= len(node), f"{node!r} has its border outside"
            if parent is not self.root and parent.resident < len(parent):
                assert node.resident == 0, f"{node!r} is resident below filling {parent!r}"
            assert node.slots.shape == (len(node), self.columns), f"{node!r} has slots {node.slots.shape}"
            for prefix_hash in node.hashes:
                found = self._index.get(prefix_hash)
                assert found is node, f"index says {found!r} for a hash of {node!r}"
            for pin in node.pins:
                assert pin.node is node, f"a pin of {node!r} says it hangs on {pin.node!r}"
            seen += len(node)
        assert seen == len(self._index), f"{seen} positions in nodes, {len(self._index)} in the index"

    def _split_off_tail(self, node: Node, size: int) -> Node:
        part = node.truncate(size)
        tail = Node(node, node.end, part.hashes, part.slots)
        tail.resident = part.resident
        tail.children, node.children = node.children, {tail}
        tail.pins, node.pins = node.pins, set()
        for child in tail.children:
            child.parent = tail
        for pin in tail.pins:
            pin.node = tail
        return tail

    def _split_off_head(self, node: Node, size: int) -> Node:
        parent = node.parent
        assert parent is not None
        head = Node(parent, node.start, node.hashes[:size], node.slots[:size].copy())
        head.resident = min(node.resident, size)
        head.children = {node}
        parent.children.remove(node)
        parent.children.add(head)
        node.behead(size)
        node.parent = head
        return head

    def _forget(self, hashes: list[bytes]) -> None:
        deque(map(self._index.__delitem__, hashes), maxlen=0)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.remove(node)
        node.parent = None

    def _hand_pins(self, removed: list[Removed], left: Node) -> None:
        """Pins of nodes that lost their end hang at the end of ``left``, unless that is the root."""
        pins = {pin for part in removed for pin in part.node.pins}
        for part in removed:
            part.node.pins = set()
        for pin in pins:
            pin.node = None if left is self.root else left
        if left is not self.root:
            left.pins |= pins
