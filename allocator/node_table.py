"""All nodes of a tree: by id, with their links, and which of them are dead."""

from collections.abc import Iterator

import numpy as np

from allocator.node import NO_PINS, NOBODY, Node
from allocator.slot_pool import Slots
from evictor.untracked import untrack


class NodeTable:
    """Makes, links and ends nodes. A node is the first child of its parent, or beside another child of it.

    What is cut off is *dead*, from its topmost node on. Dead nodes hang where they hung until ``remove``.
    """

    def __init__(self, columns: int) -> None:
        """With a root for chains of so many ``columns``."""
        self._columns = columns
        self._nodes: list[Node | None] = [None]  # by id
        self._free_ids: list[int] = []
        untrack(self._nodes)
        untrack(self._free_ids)
        self._dead: dict[int, Node] = {}  # the topmost of what was cut off, by id
        self._at: Node | None = None  # where taking it away goes on
        self.root = self._new_root()

    def __del__(self) -> None:
        """What policies keep of nodes may refer back to them."""
        for node in self._nodes:
            if node is not None:
                node.rank = node.mark = None

    @property
    def has_dead(self) -> bool:
        """Whether anything that was cut off is yet to be removed."""
        return bool(self._dead)

    @property
    def num_dead(self) -> int:
        """Topmost nodes of what was cut off."""
        return len(self._dead)

    @property
    def num_ids(self) -> int:
        """Ids that were ever given to nodes, ``NOBODY`` included."""
        return len(self._nodes)

    def get(self, node_id: int) -> Node | None:
        """The node with that id; None for ``NOBODY``."""
        return self._nodes[node_id]

    def node(self, node_id: int) -> Node:
        """The node with that id, which there is."""
        node = self._nodes[node_id]
        assert node is not None
        return node

    def make(self, parent: Node | None, start: int, data: bytes, slots: Slots) -> Node:
        """A node, the first child of ``parent``."""
        node_id = self._free_ids.pop() if self._free_ids else len(self._nodes)
        node = Node(node_id, parent, start, data, slots)
        if node_id == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[node_id] = node
        if parent is not None:
            self.link(node, parent)
        return node

    def link(self, node: Node, parent: Node) -> None:
        """``node``, which hangs nowhere, is the first child of ``parent``."""
        node.parent, node.next = parent, parent.child
        if parent.child != NOBODY:
            self.node(parent.child).previous = node.id
        parent.child = node.id

    def unlink(self, node: Node) -> None:
        """``node`` hangs nowhere."""
        parent = node.parent
        assert parent is not None
        if node.previous != NOBODY:
            self.node(node.previous).next = node.next
        else:
            parent.child = node.next
        if node.next != NOBODY:
            self.node(node.next).previous = node.previous
        node.previous = node.next = NOBODY
        node.parent = None

    def remove(self, node: Node) -> None:
        """``node`` has nothing left and ends. Its pins hang where it hung, or nowhere."""
        parent = node.parent
        assert parent is not None
        if node.pins:
            heir = parent if parent.parent is not None else None
            for pin in node.pins:
                pin.node = heir
            if heir is not None:
                heir.pins |= node.pins
            node.pins = NO_PINS
        if self._at is node:
            self._at = None if node.is_dead else parent
        self._dead.pop(node.id, None)
        self.unlink(node)
        self.end(node)

    def end(self, node: Node) -> None:
        """Nothing refers to ``node`` any more, and it refers to no other."""
        node.parent = node.bags = None
        self._nodes[node.id] = None
        self._free_ids.append(node.id)

    def children(self, node: Node) -> Iterator[Node]:
        """Those that hang at its end, dead ones too."""
        child = node.child
        while child != NOBODY:
            each = self.node(child)
            yield each
            child = each.next

    def below(self, top: Node) -> Iterator[Node]:
        """All below ``top`` but what is dead, parents before children."""
        stack = [child for child in self.children(top) if not child.is_dead]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(child for child in self.children(node) if not child.is_dead)

    # What was cut off

    def kill(self, node: Node) -> None:
        """``node`` and all below it are dead; the root: all there is. O(1)."""
        node.is_dead = True
        self._dead[node.id] = node
        if node is self.root:
            self.root = self._new_root()

    def is_dead(self, node: Node) -> bool:
        """Whether it, or what it hangs on, was cut off. O(segments before it), O(1) if nothing was."""
        if not self._dead:
            return False
        while not node.is_dead:
            if node.parent is None:
                return False
            node = node.parent
        return True

    def next_dead(self) -> Node | None:
        """A childless dead node, until there are none: of what was cut off first, all of that first.

        O(1) amortized over the nodes removed.
        """
        while self._dead:
            node = self._at if self._at is not None else next(iter(self._dead.values()))
            while node.child != NOBODY:
                node = self.node(node.child)
            self._at = node
            if node.parent is not None:
                return node
            self._at = None
            del self._dead[node.id]
            self.end(node)
        return None

    def dead_nodes(self) -> Iterator[Node]:
        """Every node that was cut off and is yet to be removed."""
        tops = [top for top in self._dead.values() if top.parent is None or not self.is_dead(top.parent)]
        stack = list(tops)
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(self.children(node))

    def check_invariants(self) -> None:
        """Links go both ways; every id is that of a node that hangs somewhere, or free."""
        roots = {self.root.id, *(node.id for node in self._dead.values() if node.parent is None)}
        linked = set(roots)
        for node in (self.root, *self.below(self.root), *self.dead_nodes()):
            linked.add(node.id)
            assert self._nodes[node.id] is node, f"{node!r} has the id of {self._nodes[node.id]!r}"
            previous = NOBODY
            for child in self.children(node):
                assert child.parent is node, f"{child!r} is not its parent's child: {child.parent!r}"
                assert child.previous == previous, f"{child!r} comes after {previous}, says {child.previous}"
                previous = child.id
        there = {index for index, node in enumerate(self._nodes) if node is not None}
        assert linked == there, f"nodes {linked ^ there} are not linked, or are gone"
        free = {*range(1, len(self._nodes))} - there
        assert sorted(self._free_ids) == sorted(free), f"ids {self._free_ids} are free, not {free}"

    def _new_root(self) -> Node:
        return self.make(None, 0, b"", np.empty((0, self._columns), dtype=np.int64))
