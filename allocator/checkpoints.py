"""All checkpoints of a tree, and which of them go first when room is needed.

    [0 ........ 511 | ..... 1023 | .. 1199]      | = a checkpoint within a node: an *inner* one
                                                 its last one is at the end, where others go on or nobody does

Who goes on from an inner checkpoint leaves the chain between it and the next, which is rarer than going on
from an end. So bags of inner ones are evicted before leaves: of these, the one unused for longest first.
"""

from collections.abc import Sequence
from itertools import count

from allocator.bags import Bags, BagState, Checkpoint
from allocator.node import Node
from allocator.node_table import NodeTable
from allocator.slot_pool import Slots
from evictor.order import Order


class Checkpoints:
    """Adds and removes checkpoints of nodes, and keeps the inner ones in the order of their last use.

    The tree says what splits, joins and goes. A node without checkpoints costs nothing but a look at it.
    """

    def __init__(self, table: NodeTable) -> None:
        """There are none; ``table`` has the nodes."""
        self._table = table
        self._inner: Order[Checkpoint] = Order()
        self._clock = count(1)

    def __len__(self) -> int:
        """Inner ones with a bag that is complete and not empty."""
        return len(self._inner)

    def begin(self, node: Node, depth: int, slots: Slots) -> Checkpoint:
        """A bag is on its way to a checkpoint in ``node``, where there is none."""
        checkpoint = Checkpoint(depth, slots, node.id)
        if node.bags is None:
            node.bags = Bags()
        node.bags.add(checkpoint)
        return checkpoint

    def open(self, node: Node) -> None:
        """More is to come after the end of ``node``, which has no checkpoint there."""
        if node.bags is None:
            node.bags = Bags()
        node.bags.is_open = True

    def close(self, node: Node) -> None:
        """No more is to come there, or it has come."""
        if node.bags is not None:
            node.bags.is_open = False
            node.bags = node.bags or None

    def complete(self, node: Node, depth: int) -> None:
        """The bag at ``depth`` is whole, and all before it is resident. O(log n)."""
        checkpoint = None if node.bags is None else node.bags.at(depth)
        assert node.bags is not None and checkpoint is not None, f"{node!r} has no checkpoint at {depth}"
        node.bags.complete(checkpoint)
        checkpoint.last_use = next(self._clock)
        self._file(node, checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        """Somebody goes on from there. O(log n)."""
        is_inner = checkpoint.key is not None
        self._unfile(checkpoint)
        checkpoint.last_use = next(self._clock)
        if is_inner:
            self._file(self._table.node(checkpoint.node_id), checkpoint)

    def remove(self, checkpoint: Checkpoint) -> Node:
        """It is gone, and nothing else. Returns the node that had it. O(log n)."""
        node = self._table.node(checkpoint.node_id)
        assert node.bags is not None, f"{checkpoint!r} does not hang on {node!r}"
        self._unfile(checkpoint)
        node.bags.remove(checkpoint)
        node.bags = node.bags or None
        return node

    def oldest(self) -> Checkpoint | None:
        """The inner one unused for longest. O(1)."""
        return self._inner.first

    # What happens to nodes

    def continued(self, node: Node, depth: int) -> None:
        """Something was stored behind ``depth``, which was the end of ``node``."""
        if node.bags is not None:
            node.bags.is_open = False
            self._file_at(node, depth)
            node.bags = node.bags or None

    def split_tail(self, head: Node, tail: Node, behind: Bags) -> None:
        """``tail`` is new and gets what was ``behind`` the end of ``head`` when the two were one."""
        tail.bags = behind or None
        behind.belong_to(tail.id)
        self._file_at(head, head.end)
        head.bags = head.bags or None

    def split_head(self, head: Node, tail: Node, bags: Bags) -> None:
        """``head`` is new and gets all but what is behind its end of ``bags``, which ``tail`` had."""
        tail.bags = bags.take_behind(head.end) or None
        head.bags = bags or None
        bags.belong_to(head.id)
        self._file_at(head, head.end)

    def joined(self, heir: Node, parts: Sequence[tuple[int, Bags | None]]) -> None:
        """``heir`` has those of ``parts``: where each ended and what it had, the first of a chain first."""
        whole = Bags()
        for _, bags in parts:
            whole.take_over(bags or Bags())
        whole.belong_to(heir.id)
        heir.bags = whole or None
        for end, _ in parts:
            self._file_at(heir, end)

    def trimmed(self, node: Node, bags: Bags) -> None:
        """``bags`` left the tree with the last positions of ``node``. O(log n) for each."""
        for checkpoint in bags:
            self._unfile(checkpoint)
        self._file_at(node, node.end)
        node.bags = node.bags or None

    def check_node(self, node: Node) -> None:
        """Those of a node lie within it, and are filed if they are inner ones."""
        if node.bags is None:
            return
        node.bags.check_invariants()
        assert node.bags, f"{node!r} has an empty list of checkpoints"
        assert not (node.bags.is_open and node.child), f"{node!r} is open, and something goes on there"
        for each in node.bags:
            assert node.start < each.depth <= node.end, f"{each!r} is not within {node!r}"
            assert self._table.get(each.node_id) is node, f"{each!r} of {node!r} says node {each.node_id}"
            is_complete = each.state is BagState.COMPLETE
            assert not is_complete or each.depth <= node.start + node.resident, f"{each!r} is not resident"
            is_inner = self._is_inner(node, each)
            assert (each.key is not None) == is_inner, f"{each!r} of {node!r} is filed under {each.key}"

    def check_invariants(self) -> None:
        """The order has inner ones only; ``check_node`` says that it has all of them."""
        self._inner.check_invariants()
        for key, checkpoint in self._inner.items():
            node = self._table.get(checkpoint.node_id)
            assert checkpoint.key == key == (checkpoint.last_use,), f"{checkpoint!r} is filed under {key}"
            assert node is not None and node.bags is not None, f"{checkpoint!r} is filed and hangs nowhere"
            assert node.bags.at(checkpoint.depth) is checkpoint, f"{checkpoint!r} does not hang on {node!r}"

    # Private

    def _is_inner(self, node: Node, checkpoint: Checkpoint) -> bool:
        """Whether to evict it gives room, and it is not at the end of ``node``."""
        has_slots = checkpoint.state is BagState.COMPLETE and len(checkpoint.slots) > 0
        return has_slots and checkpoint.depth < node.end

    def _file_at(self, node: Node, depth: int) -> None:
        checkpoint = None if node.bags is None else node.bags.at(depth)
        if checkpoint is not None:
            self._file(node, checkpoint)

    def _file(self, node: Node, checkpoint: Checkpoint) -> None:
        self._unfile(checkpoint)
        if self._is_inner(node, checkpoint):
            checkpoint.key = (checkpoint.last_use,)
            self._inner.add(checkpoint.key, checkpoint)

    def _unfile(self, checkpoint: Checkpoint) -> None:
        if checkpoint.key is not None:
            self._inner.remove(checkpoint.key)
            checkpoint.key = None
