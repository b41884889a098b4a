"""A small tree that talks to a policy as the protocol says, and checks the answers."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from evictor import Admission, EvictionPolicy, HintedPolicy, Newcomer, available_policies, make_policy
from evictor.caller import Caller

CONTRACTORS = [*available_policies(), "hinted(lru)"]
"""Names of all that promise what policies promise."""


def policy_named(name: str) -> EvictionPolicy[Any]:
    """A fresh one of CONTRACTORS, for a pool of 64 positions."""
    if name == "hinted(lru)":
        return HintedPolicy(make_policy("lru", 64), 16, lambda: 0.0)
    return make_policy(name, 64)


class Node:
    """Keys in chain order; no order among nodes, no equality but identity."""

    def __init__(self, name: str, parent: "Node | None" = None) -> None:
        self.name = name
        self.parent = parent
        self.keys: list[int] = []
        self.children: list[Node] = []
        self.pinned = False
        self.bag = 0  # slots that belong to none of its keys alone
        self.rank: Any = None
        self.mark: Any = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.keys}>"

    def __len__(self) -> int:
        return len(self.keys)

    def __bool__(self) -> bool:
        return True

    @property
    def weight(self) -> int:
        return len(self.keys) + self.bag

    @property
    def path(self) -> "list[Node]":
        """From this node up to, but without, the root."""
        return [] if self.parent is None else [self, *self.parent.path]

    @property
    def subtree(self) -> "list[Node]":
        """Children before parents, this node last."""
        return [node for child in self.children for node in child.subtree] + [self]

    @property
    def is_evictable(self) -> bool:
        return self.parent is not None and not self.children and not self.pinned


class PolicyDriver(Caller[Node]):
    """Changes a tree of keys, tells ``policy``, and checks what it says."""

    def __init__(self, policy: EvictionPolicy[Any]) -> None:
        super().__init__(policy)
        self.policy = policy
        self.root = Node("root")
        self.last_use: dict[int, int] = {}
        """When each key was used last, for whoever wants to foretell LRU."""
        self._clock = count()
        self._names = count()
        self._keys = count()

    @property
    def nodes(self) -> list[Node]:
        """All but the root, in an order that is the same in every run."""
        return self.root.subtree[:-1]

    @property
    def candidates(self) -> list[Node]:
        return [node for node in self.nodes if node.is_evictable]

    @property
    def victims(self) -> list[Node]:
        """Of which one is to be chosen when room is needed at any price."""
        return self.candidates

    def check(self) -> None:
        self.policy.check_invariants(self.nodes)

    def new_keys(self, num_keys: int) -> list[int]:
        return [next(self._keys) for _ in range(num_keys)]

    def heed(self, node: Node, num_new: int = 0) -> Admission[Node]:
        """A request uses what leads to ``node`` and may store so many keys after it."""
        return self.policy.heed(None, node.path, num_new)

    def grow(self, parent: Node, num_keys: int) -> Node:
        return self.store(parent, self.new_keys(num_keys))

    def store(self, parent: Node, keys: Sequence[int], admission: Admission[Node] | None = None) -> Node:
        """Append keys, new or evicted before, to ``parent``: in place where it is a leaf."""
        node = parent
        self.policy.leave(parent)
        admission = admission or self.heed(parent, len(keys))
        for start, stop in self.stretches(keys):
            assert self.num_alike(keys, start) == stop - start
            part = list(keys[start:stop])
            joins = admission.joins(node, part[0])
            if node is self.root or node.children or node.pinned or not joins:
                node = Node(f"n{next(self._names)}", node)
                assert node.parent is not None
                node.parent.children.append(node)
            node.keys += part
            self._use(node)
            admission.stored(node, part, keys[stop] if stop < len(keys) else None)
        self.refresh(node)
        return node

    def touch(self, node: Node, more: Sequence[int] = ()) -> None:
        """A request uses ``node`` and asks for ``more`` beyond it."""
        self._use(node)
        chain = [key for each in reversed(node.path) for key in each.keys]
        self.policy.used(node.path, [*chain, *more], len(chain))
        self.heed(node)

    def split(self, node: Node, size: int, *, new_head: bool) -> None:
        """Cut ``node`` in two after ``size`` keys; the new node is the head or the tail."""
        assert node.parent is not None
        new = Node(f"n{next(self._names)}")
        head, tail = (new, node) if new_head else (node, new)
        head.keys, tail.keys = node.keys[:size], node.keys[size:]
        if new_head:
            node.parent.children[node.parent.children.index(node)] = new
            new.parent, node.parent = node.parent, new
        else:
            new.children, new.parent, new.pinned, node.pinned = node.children, node, node.pinned, False
            for child in new.children:
                child.parent = new
        head.bag, tail.bag = 0, node.bag
        head.children = [tail]
        self.after_split(node, new)

    def may_join(self, head: Node) -> bool:
        """Whether ``head`` and its child may be one; asked twice."""
        if head is self.root or len(head.children) != 1 or head.pinned:
            return False
        may_join = self.policy.may_join(head, head.children[0])
        assert self.policy.may_join(head, head.children[0]) == may_join
        return may_join

    def join(self, head: Node, *, keep_head: bool) -> Node:
        """Make one of ``head`` and its only child; the other one is gone."""
        [tail] = head.children
        assert head.parent is not None
        keys = head.keys + tail.keys
        self.policy.leave(tail)
        if keep_head:
            node, gone = head, tail
            node.children, node.pinned = tail.children, tail.pinned
            for child in node.children:
                child.parent = node
        else:
            node, gone = tail, head
            head.parent.children[head.parent.children.index(head)] = tail
            tail.parent = head.parent
        node.keys, gone.keys = keys, []
        node.bag, gone.bag = head.bag + tail.bag, 0
        self.after_join(node, [gone])
        return node

    def pin(self, node: Node) -> None:
        node.pinned = True
        self.policy.leave(node)
        self.touch(node)

    def unpin(self, node: Node) -> None:
        node.pinned = False
        self.refresh(node)

    def choose(
        self, newcomer: Newcomer[Node] | None = None, admission: Admission[Node] | None = None
    ) -> Node | None:
        """Ask twice: the answer is a candidate, and asking changes nothing."""
        admission = admission or self.policy
        chosen = admission.choose(newcomer)
        assert admission.choose(newcomer) is chosen
        assert chosen is None or chosen in self.candidates, f"{chosen} is none of {self.candidates}"
        if newcomer is None:
            assert (chosen is None) == (not self.victims)
        return chosen

    def num_alike(self, keys: Sequence[int], start: int) -> int:
        """Ask twice: at least one, at most all, and asking changes nothing."""
        num_alike = self.policy.num_alike(keys, start)
        assert 1 <= num_alike <= len(keys) - start
        assert self.policy.num_alike(keys, start) == num_alike
        return num_alike

    def evict(
        self,
        bite: int,
        newcomer: Newcomer[Node] | None = None,
        admission: Admission[Node] | None = None,
    ) -> list[int]:
        """Take up to ``bite`` keys from the tail of the chosen leaf; return them, the tail last."""
        leaf = self.choose(newcomer, admission)
        if leaf is None:
            return []
        gone = leaf.keys[-bite:]
        del leaf.keys[-bite:]
        heir = self._unlink_if_empty(leaf)
        weight, leaf.bag = len(gone) + leaf.bag, 0
        self.after_eviction(leaf, gone, weight, heir, None if newcomer is None else newcomer.parent)
        return gone

    def resize(self, node: Node, bag: int) -> None:
        """``node`` has so many slots besides one for each key; the tail's share of a split, all of a join."""
        node.bag = bag
        self.policy.resized(node)

    def cut(self, node: Node) -> None:
        """``node`` and all below it go, but not to make room."""
        for each in node.subtree:
            num_keys = len(each.keys)
            each.keys.clear()
            each.bag = 0
            heir = self._unlink_if_empty(each)
            self.after_drop(each, num_keys, heir)

    def _unlink_if_empty(self, node: Node) -> Node | None:
        """Return its parent, unless that is the root."""
        parent = node.parent
        assert parent is not None
        if not node.keys:
            parent.children.remove(node)
        return None if parent is self.root else parent

    def _use(self, node: Node) -> None:
        now = next(self._clock)
        for each in node.path:
            self.last_use.update(dict.fromkeys(each.keys, now))
