"""What is known of nodes that more, or less, is claimed for than by plain use."""

from typing import Any, Final

from evictor.hints import Claims, Worth
from evictor.order import Key
from evictor.untracked import untrack

CANDIDATE: Final = "candidate"
"""The ``mark`` of a plain node between ``enter`` and ``leave``. That of other plain nodes is None."""


class Mark:
    """What is claimed for a node, its last use by a request that hints mattered to, and where it is filed."""

    __slots__ = (
        "claims",
        "due",
        "high",
        "is_candidate",
        "key",
        "last_use",
        "num_protected",
        "serial",
        "stamp",
        "state",
    )

    def __init__(
        self, claims: Claims, serial: int, stamp: int, last_use: float, *, is_candidate: bool
    ) -> None:
        untrack(self)
        self.claims = claims
        self.serial = serial  # nodes have no order
        self.stamp = stamp
        self.last_use = last_use
        self.is_candidate = is_candidate
        self.state: Worth | None = Worth.NORMAL  # None while pinned
        self.num_protected = 0
        self.key: Key | None = None
        self.high: Key | None = None
        self.due: Key | None = None


def mark_of(node: Any) -> Mark | None:
    """None for a plain node."""
    mark = node.mark
    return mark if type(mark) is Mark else None
