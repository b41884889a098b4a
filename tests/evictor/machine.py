"""Any order of the calls that a tree may make, under any policy."""

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evictor import Admission, Newcomer
from tests.evictor.driver import Node, PolicyDriver, policy_named


class PolicyMachine(RuleBasedStateMachine):
    """Under the policy named ``policy``. ``seen`` adds up over all runs."""

    policy: ClassVar[str]
    seen: ClassVar[Counter[str]]

    @initialize()
    def make(self) -> None:
        self.driver = PolicyDriver(policy_named(self.policy))
        self.gone: list[list[int]] = []

    @rule(data=st.data(), num_keys=st.integers(1, 4))
    def store(self, data: st.DataObject, num_keys: int) -> None:
        self.driver.grow(self._draw_parent(data), num_keys)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def store_again(self, data: st.DataObject) -> None:
        """What was evicted comes back under its old name."""
        keys = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        self.driver.store(self._draw_parent(data), keys)

    @precondition(lambda self: self.driver.nodes)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        node = self._draw(data, self.driver.nodes)
        self.seen["touch of a candidate"] += node.is_evictable
        self.seen["touch of an inner node"] += bool(node.children)
        self.driver.touch(node)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), num_keys=st.integers(0, 2), shorter=st.integers(0, 2), do_store=st.booleans())
    def ask_for_what_is_missing(
        self, data: st.DataObject, num_keys: int, shorter: int, do_store: bool
    ) -> None:
        """A request for what was evicted, or its first part, and more; stored at once, later or never."""
        parent = self._draw_parent(data)
        gone = self.gone[data.draw(st.integers(0, len(self.gone) - 1))]
        asked = gone[: max(1, len(gone) - shorter)]
        new = self.driver.new_keys(num_keys) if len(asked) == len(gone) else []
        self.driver.touch(parent, [*asked, *new])
        for start in range(len(asked)):
            self.driver.num_alike([*asked, *new], start)
        if do_store:
            self.gone.remove(gone)
            self.gone += [gone[len(asked) :]] if len(asked) < len(gone) else []
            self.driver.store(parent, [*asked, *new])
        self.seen["asked for what is missing, and stored"] += do_store
        self.seen["asked for what is missing, and not stored"] += not do_store

    @precondition(lambda self: self.driver.nodes)
    @rule(data=st.data(), bag=st.sampled_from([0, 1, 7, 40]))
    def resize(self, data: st.DataObject, bag: int) -> None:
        node = self._draw(data, self.driver.nodes)
        self.seen["resized a candidate"] += node.is_evictable
        self.driver.resize(node, bag)

    @precondition(lambda self: any(len(node.keys) > 1 for node in self.driver.nodes))
    @rule(data=st.data(), new_head=st.booleans())
    def split(self, data: st.DataObject, new_head: bool) -> None:
        node = self._draw(data, [node for node in self.driver.nodes if len(node.keys) > 1])
        self.driver.split(node, data.draw(st.integers(1, len(node.keys) - 1)), new_head=new_head)

    @precondition(lambda self: any(map(self.driver.may_join, self.driver.nodes)))
    @rule(data=st.data(), keep_head=st.booleans())
    def join(self, data: st.DataObject, keep_head: bool) -> None:
        head = self._draw(data, [node for node in self.driver.nodes if self.driver.may_join(node)])
        self.driver.join(head, keep_head=keep_head)

    @precondition(lambda self: self.driver.candidates)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.driver.pin(self._draw(data, self.driver.candidates))

    @precondition(lambda self: any(node.pinned for node in self.driver.nodes))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.driver.unpin(self._draw(data, [node for node in self.driver.nodes if node.pinned]))

    @rule(bite=st.integers(1, 3))
    def evict(self, bite: int) -> None:
        self._evict(bite)

    @rule(data=st.data(), bites=st.lists(st.integers(1, 3), max_size=3), num_keys=st.integers(1, 3))
    def make_room(self, data: st.DataObject, bites: list[int], num_keys: int) -> None:
        """The node that a newcomer continues is no candidate meanwhile."""
        parent = self._draw_parent(data)
        keys = self.gone.pop() if self.gone else self.driver.new_keys(num_keys)
        was_pinned, parent.pinned = parent.pinned, True
        self.driver.policy.leave(parent)
        admission = self.driver.heed(parent, len(keys))
        for bite in bites:
            self._evict(bite, Newcomer(parent, keys[0], len(keys)), admission)
        parent.pinned = was_pinned
        self.driver.store(parent, keys, admission)

    @precondition(lambda self: self.driver.nodes)
    @rule(data=st.data(), really=st.booleans())
    def cut(self, data: st.DataObject, really: bool) -> None:
        node = self._draw(data, self.driver.nodes)
        if really:
            self.seen["cut of several nodes"] += bool(node.children)
            self.driver.cut(node)

    @invariant()
    def agrees(self) -> None:
        self.driver.check()
        chosen = self.driver.choose()
        if chosen is not None:
            self.expect_victim(chosen)

    def expect_victim(self, leaf: Node) -> None:
        """Raise AssertionError if this policy must not choose ``leaf``."""

    def _evict(
        self,
        bite: int,
        newcomer: Newcomer[Node] | None = None,
        admission: Admission[Node] | None = None,
    ) -> None:
        keys = self.driver.evict(bite, newcomer, admission)
        if keys:
            self.gone.append(keys)
            self.seen["evicted for a newcomer"] += newcomer is not None
            self.seen["evicted"] += 1

    def _draw_parent(self, data: st.DataObject) -> Node:
        return self._draw(data, [self.driver.root, *self.driver.nodes])

    def _draw(self, data: st.DataObject, nodes: list[Node]) -> Node:
        return data.draw(st.sampled_from(nodes))
