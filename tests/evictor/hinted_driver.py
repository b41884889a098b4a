"""A tree whose nodes are used with hints, and a model of what those mean for each key."""

import math
from collections.abc import Sequence
from typing import Any

from evictor import Admission, HintedPolicy, KeepHints, LruPolicy, Newcomer, Worth
from evictor.marks import CANDIDATE
from tests.evictor.driver import Node, PolicyDriver

UNLIMITED = 1 << 30
UNWANTED, LOW, HIGH = (KeepHints(worth) for worth in (Worth.UNWANTED, Worth.LOW, Worth.HIGH))


def pinned(until: float) -> KeepHints:
    return KeepHints(pinned_until=until)


class Wish:
    """What is wanted of a key: its last use, and the hints of all who used it, as long as they live."""

    def __init__(self) -> None:
        self.asked: list[KeepHints] = []
        self.pinned_until = -math.inf
        self.stamp = 0
        self.last_use = -math.inf

    def use(self, hints: KeepHints, stamp: int, now: float) -> None:
        self.asked = [*self.living(now), hints]
        self.pinned_until = max(self.pinned_until, hints.pinned_until)
        self.stamp, self.last_use = stamp, now

    def living(self, now: float) -> list[KeepHints]:
        """Those whose time to live is not over."""
        return [hints for hints in self.asked if self.last_use + hints.ttl > now]

    def state(self, now: float) -> Worth | None:
        """None while it is pinned."""
        if self.pinned_until > now:
            return None
        return max((hints.worth for hints in self.living(now)), default=Worth.UNWANTED)


class HintedDriver(PolicyDriver):
    """Every use is by a request with ``hints``; ``now`` is the time."""

    policy: HintedPolicy[Any]

    def __init__(self, max_protected: int = UNLIMITED) -> None:
        super().__init__(HintedPolicy(LruPolicy(), max_protected, lambda: self.now))
        self.now = 0.0
        self.hints: KeepHints | None = None
        self.wishes: dict[int, Wish] = {}
        self.num_used_late = 0
        """How often a key was used after the high worth that some had asked for had ended."""
        self._asked = 0

    def heed(self, node: Node, num_new: int = 0) -> Admission[Node]:
        self._asked += 1
        admission = self.policy.heed(self.hints, node.path, num_new)
        for each in node.path:
            self._wish(each.keys)
        return admission

    def store(self, parent: Node, keys: Sequence[int], admission: Admission[Node] | None = None) -> Node:
        node = super().store(parent, keys, admission)
        self.wishes |= {key: Wish() for key in keys}
        self._wish(keys)
        return node

    def _wish(self, keys: Sequence[int]) -> None:
        for wish in [self.wishes[key] for key in keys]:
            was_high = any(hints.worth is Worth.HIGH for hints in wish.asked)
            is_high = any(hints.worth is Worth.HIGH for hints in wish.living(self.now))
            self.num_used_late += was_high and not is_high
            wish.use(self.hints or KeepHints(), self._asked, self.now)

    def grown(self, num_keys: int, hints: KeepHints | None = None, parent: Node | None = None) -> Node:
        """What a request with ``hints`` stores; the driver's own stay as they are."""
        before, self.hints = self.hints, hints
        node = self.grow(parent or self.root, num_keys)
        self.hints = before
        return node

    def use(self, node: Node, hints: KeepHints | None = None) -> None:
        before, self.hints = self.hints, hints
        self.touch(node)
        self.hints = before

    def choose_for(self, hints: KeepHints | None) -> Node | None:
        """For a newcomer of one position."""
        return self.choose(Newcomer(self.root, -1, 1), self.policy.heed(hints, [], 1))

    def state(self, node: Node) -> Worth | None:
        """What a node is worth now, None while it is pinned. One node, one state."""
        (state,) = {self.wishes[key].state(self.now) for key in node.keys}
        return state

    @property
    def victims(self) -> list[Node]:
        return [node for node in self.candidates if self.policy_state(node) is not None]

    def policy_state(self, node: Node) -> Worth | None:
        return Worth.NORMAL if node.mark in (None, CANDIDATE) else node.mark.state

    def order(self) -> list[Node]:
        """Leaves in the order of their going."""
        order = []
        while (leaf := self.choose()) is not None:
            order.append(leaf)
            self.evict(len(leaf))
        return order
