"""The prefix tree: which chain positions have a slot, as segments rather than single blocks.

    root ── [0..99] ──┬── [100..179]        one node = one run of consecutive positions
                      └── [100..131] ── [132..140]

A node covers chain positions ``start <= p < end``. Its leading ``resident`` positions have complete
bytes, or are hollow, the rest is filling; below a filling position nothing is resident.

What is cut off is *dead* at once: nobody finds it. Its nodes hang where they hung until ``trim`` takes them
away one after the other. So a cut of a million positions need not be done in one go.

The tree moves positions, nothing else: slots, policy and jobs are the allocator's.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from allocator.bags import Checkpoint
from allocator.checkpoints import Checkpoints
from allocator.errors import ChainError
from allocator.index import STRIDE, PositionIndex
from allocator.node import NO_PINS, NOBODY, Node, Place, Removed
from allocator.node_table import NodeTable
from allocator.slot_pool import Slots


class PrefixTree:
    """Segments, their checkpoints and their index.

    Columns: slots per chain position, one for models with one cache group. ``has_checkpoints``: of models
    with windows or states. *Hollow* positions have a hash and no slot: all of them without columns, and
    some with one column once the tree ``is_gapped``.
    """

    def __init__(self, columns: int = 1, stride: int = STRIDE, has_checkpoints: bool = False) -> None:
        self.columns = columns
        self.has_checkpoints = has_checkpoints
        self.is_gapped = False
        self._width: int | None = None  # bytes per prefix hash, all of one length
        self._table = NodeTable(columns)
        self._index = PositionIndex(self._table, stride)
        self.checkpoints = Checkpoints(self._table)

    @property
    def root(self) -> Node:
        """Has no position; all chains begin below it."""
        return self._table.root

    @property
    def has_dead(self) -> bool:
        """Whether anything that was cut off is yet to be taken away."""
        return self._table.has_dead

    @property
    def num_cuts(self) -> int:
        """Cuts that are yet to be taken away. That is done in their order, one after the other."""
        return self._table.num_dead

    def find(self, chain: Sequence[bytes], stop: int) -> Place:
        """The longest known part of the first ``stop`` positions of ``chain``, resident or filling. O(log n).

        While something dead is yet to be taken away, it is O(log n) times O(segments).
        """
        return self._index.find(chain, stop)

    def node_at(
        self, hashes: Sequence[bytes], start: int, position: int, lead: Sequence[bytes] = ()
    ) -> Node | None:
        """The node that holds ``position`` of a chain; None if it is unknown.

        ``hashes`` are those of positions ``start, start + 1, ...``, and ``lead`` what comes before.
        """
        return self._index.node_at(hashes, start, position, lead)

    def lead(self, chain: Sequence[bytes], start: int) -> list[bytes]:
        """Hashes right before ``start``: what ``node_at`` may need, and always that of ``start - 1``."""
        return self._index.lead(chain, start)

    def resident_part(self, place: Place) -> Place:
        """The resident part of the chain that leads to ``place``. O(segments being filled)."""
        node, depth = place
        while node.parent is not None:
            depth = min(depth, node.start + node.resident)
            if depth > node.start:
                break
            node = node.parent
        return Place(node, depth)

    def slotted_part(self, place: Place, beyond: int = 0) -> Place:
        """The resident part of that chain up to the first hollow position that is not before ``beyond``.

        As ``resident_part``. Where there are gaps, it is O(1) array work per position behind ``beyond``, too.
        """
        node, depth = place = self.resident_part(place)
        if self.is_gapped:
            is_hollow = self.slots_of(place, beyond)[:, 0] < 0
            if is_hollow.any():
                depth = beyond + int(is_hollow.argmax())
                while node.parent is not None and node.start >= depth:
                    node = node.parent
        return Place(node, depth)

    def last_checkpoint(self, place: Place, beyond: int = 0) -> Checkpoint | None:
        """The deepest complete one up to ``place`` that is deeper than ``beyond``. O(log n + segments)."""
        node, depth = place
        while node.parent is not None and node.end > beyond:
            found = None if node.bags is None else node.bags.last_complete(depth)
            if found is not None:
                return found if found.depth > beyond else None
            node = node.parent
        return None

    def bite(self, leaf: Node, num_slots: int, slack: int) -> int:
        """How many of the last positions of ``leaf`` to evict so that so many slots become free.

        It may be all there are. Without checkpoints it is ``slack`` positions more. With them it is back to a
        checkpoint. O(checkpoints that go).
        """
        if not self.has_checkpoints:
            return -(-num_slots // self.columns) + slack
        num_freed = 0
        for checkpoint in () if leaf.bags is None else reversed(leaf.bags):
            size = leaf.end - checkpoint.depth
            if size and num_freed + size * self.columns >= num_slots:
                return size
            num_freed += len(checkpoint.slots)
        return len(leaf)

    def num_loose(self, leaf: Node) -> int:
        """How many of the last positions of ``leaf`` are behind its last checkpoint. O(log n)."""
        last = None if leaf.bags is None else leaf.bags.last_complete(leaf.end)
        return len(leaf) if last is None else leaf.end - last.depth

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

    def set_slots(self, place: Place, positions: Slots, slots: Slots) -> None:
        """``positions``, ascending and before ``place.depth``, have these slots now. O(segments)."""
        node, stop = place.node, len(positions)
        while stop and node.parent is not None:
            start = int(np.searchsorted(positions[:stop], node.start))
            node.slots[positions[start:stop] - node.start, 0] = slots[start:stop]
            node, stop = node.parent, start

    def hashes_before(self, place: Place, num_positions: int) -> list[bytes]:
        """Those of up to so many positions right before ``place.depth``, in chain order. O(segments)."""
        hashes: list[bytes] = []
        (node, stop), start = place, max(0, place.depth - num_positions)
        while stop > start and node.parent is not None:
            hashes[:0] = node.hashes_of(range(max(start - node.start, 0), stop - node.start))
            node, stop = node.parent, node.start
        return hashes

    def nodes(self) -> Iterator[Node]:
        """Every node but the root that is not dead, parents before children."""
        return self._table.below(self.root)

    @property
    def num_ids(self) -> int:
        """Ids of nodes, from 0 on."""
        return self._table.num_ids

    def by_id(self, node_id: int) -> Node | None:
        """The node with that id, if there is one now."""
        return self._table.get(node_id)

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

        A childless node that ``may_grow`` does so in place. So a chain that is only ever extended stays one
        segment. A pinned one does not grow: its pins end where it ends. ``data``: ``packed(hashes)``.
        """
        node, depth = place
        assert depth == node.end, f"{place} is not at the end of its node; split first"
        before = node
        if node.parent is None or node.child or node.pins or not may_grow:
            node = self._table.make(node, depth, data, slots.copy())
            self._index.point_first(node)
        else:
            node.extend(data, slots)
        if before.bags is not None:
            self.checkpoints.continued(before, depth)
        self._index.point(hashes, depth, node)
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
        limit = size // self._index.stride + 1
        is_head_larger = self._work((len(node) - size) // self._index.stride, node, limit) < limit
        return self._split_off_tail(node, size) if is_head_larger else self._split_off_head(node, size)

    def join(self, path: Sequence[Node]) -> Node:
        """Make one node of neighbours, the last of a chain first; return which of them it is.

        Each but the first has the one before it as its only child, and no pins. That with most to re-point
        remains. O(1) array work per position, and O(nodes).
        """
        last, top = path[0], path[-1]
        works = [len(node) // self._index.stride for node in path]
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
        self._index.join(path, heir)
        parts = [(node.end, node.bags) for node in reversed(path)] if self.has_checkpoints else []
        heir.absorb(path[::-1])
        if parts:
            self.checkpoints.joined(heir, parts)
        for node in path:
            if node is not heir:
                self._table.end(node)
        return heir

    def settle(self, last: Node, start: int, stop: int) -> bool:
        """Make filling positions ``start <= p < stop`` resident, if everything before them is.

        ``last`` is the node of the last of them, or of the one before them if there are none. Returns whether
        it was done. O(segments).
        """
        if start == stop:
            return last.start + last.resident >= start
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
        entries = self._index.entries(node, left)
        removed = node.truncate(left)
        if node.pins:
            for pin in node.pins:
                pin.kept = max(0, node.end - pin.start)
        self._index.remove(entries, node)
        if removed.bags is not None:
            self.checkpoints.trimmed(node, removed.bags)
        if not left:
            self._table.remove(node)
        return removed

    def kill(self, node: Node) -> None:
        """Cut off ``node`` and all below it; the root: all there is. Nobody finds it from now on. O(1).

        It is taken away by ``trim`` of ``next_dead``; until then it keeps what is before it from eviction.
        """
        self._table.kill(node)
        self._index.begin_anew()

    def next_dead(self) -> Node | None:
        """A childless dead node, until there are none. O(1) amortized over the nodes removed."""
        return self._table.next_dead()

    def check_invariants(self) -> None:
        """Index, links and borders agree."""
        self._table.check_invariants()
        for node in (*self.nodes(), *self.dead_nodes()):
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
            self.checkpoints.check_node(node)
        self.checkpoints.check_invariants()
        self._index.check_invariants()

    # Private

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
        if part.bags is not None:
            self.checkpoints.split_tail(node, tail, part.bags)
        self._index.point_all(tail)
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
        if node.bags is not None:
            self.checkpoints.split_head(head, node, node.bags)
        self._index.point_all(head)
        self._index.point_first(node)
        return head
