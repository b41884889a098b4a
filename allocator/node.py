"""The segments of the prefix tree, and the pins that hang on them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from allocator.bags import Bags, Checkpoint
from allocator.slot_pool import Slots
from evictor.untracked import untrack

NOBODY = 0
"""No node has this id."""

NO_PINS: "frozenset[Pin]" = frozenset()
"""Nodes without pins share it: an empty set of its own would be seen by the garbage collector."""


class Node:
    """A segment: consecutive chain positions without a branch between them. Compared by identity.

    It refers to its parent. To its first child, and to its siblings before and after it, it refers only by
    their ids in the tree. So no cycle holds it. Names of positions are one row of bytes, as long as the names
    are. Nodes are out of the garbage collector's sight: the tree says when their life ends.
    """

    __slots__ = (
        "_buffer",
        "_data",
        "_size",
        "bags",
        "child",
        "id",
        "is_dead",
        "mark",
        "next",
        "parent",
        "pins",
        "previous",
        "rank",
        "resident",
        "start",
    )

    def __init__(self, node_id: int, parent: "Node | None", start: int, data: bytes, slots: Slots) -> None:
        """``slots`` is the node's own from now on; ``data``: as many names, one after the other."""
        untrack(self)
        self.id = node_id
        self.parent = parent
        self.child = self.previous = self.next = NOBODY
        self.start = start
        self.pins: frozenset[Pin] = NO_PINS
        self.resident = 0
        self.is_dead = False  # what begins here was cut off and is yet to be taken away
        self.bags: Bags | None = None  # None where there is no checkpoint, as in plain models
        self.rank: Any = None  # what policies keep; see evictor.policy
        self.mark: Any = None
        self._size = len(slots)
        self._data: bytes | bytearray = data
        self._buffer = slots

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Node [{self.start}..{self.end}) resident={self.resident} pins={len(self.pins)}>"

    @property
    def end(self) -> int:
        """The chain position after the last one here."""
        return self.start + self._size

    @property
    def slots(self) -> Slots:
        """Slots by position and column, ``int64[len(self), columns]``; -1 where a column is absent."""
        return self._buffer[: self._size]

    @property
    def hashes(self) -> list[bytes]:
        """Prefix hashes by position. O(positions)."""
        return unpacked(self._data, self._size)

    @property
    def data(self) -> bytes | bytearray:
        """Prefix hashes one after the other."""
        return self._data

    @property
    def weight(self) -> int:
        """Slots of its positions and bags."""
        of_positions: int = self._size * self._buffer.shape[1]
        return of_positions if self.bags is None else of_positions + self.bags.num_slots

    @property
    def is_evictable(self) -> bool:
        """Whether its tail may go: a leaf, unpinned, with nothing on its way into it."""
        if self.child or self.pins or not 0 < self.resident == self._size:
            return False
        return self.bags is None or not self.bags.num_filling

    @property
    def is_loose(self) -> bool:
        """Whether it is such a leaf that does not end at a checkpoint, and nobody goes on with it.

        Of models with windows or states: what is behind the last checkpoint serves no hit.
        """
        bags = self.bags
        return self.is_evictable and (bags is None or not (bags.is_open or bags.is_complete_at(self.end)))

    def hash_at(self, index: int) -> bytes:
        """The prefix hash of one of its positions."""
        width = len(self._data) // self._size
        return bytes(self._data[index * width : (index + 1) * width])

    def hashes_of(self, indices: range) -> list[bytes]:
        """The prefix hashes of some of its positions."""
        return chosen(self._data, self._size, indices)

    def extend(self, data: bytes, slots: Slots) -> None:
        """Append positions; amortized O(new positions)."""
        size = self._size
        needed = size + len(slots)
        if needed > len(self._buffer):
            grown = np.empty((max(needed, 2 * size), self._buffer.shape[1]), dtype=np.int64)
            grown[:size] = self._buffer[:size]
            self._buffer = grown
        self._buffer[size:needed] = slots
        if isinstance(self._data, bytes):
            self._data = bytearray(self._data)
        self._data += data
        self._size = needed

    def truncate(self, size: int) -> "Removed":
        """Keep the first ``size`` positions and return the others. Amortized O(positions that go).

        The first time it is O(positions): names become a row that shrinks in place.
        """
        num_bytes = len(self._data) // self._size * size if size else 0
        data, slots = self._data[num_bytes:], self.slots[size:]
        start, resident = self.start + size, max(0, self.resident - size)
        bags = self.bags.take_behind(start) if self.bags is not None else None
        removed = Removed(self, start, bytes(data), slots.copy(), resident, self.pins, bags)
        if not size:
            self._data = b""
        elif isinstance(self._data, bytes):
            self._data = bytearray(self._data[:num_bytes])
        else:
            del self._data[num_bytes:]
        self._size = size
        self.resident = min(self.resident, size)
        if size * 4 < len(self._buffer):
            self._buffer = self._buffer[:size].copy()
        return removed

    def behead(self, size: int) -> None:
        """Give up the first ``size`` positions, which another node took over."""
        self._data = self._data[len(self._data) // self._size * size :]
        self._buffer = self._buffer[size : self._size].copy()
        self._size -= size
        self.start += size
        self.resident = max(0, self.resident - size)

    def absorb(self, path: "Sequence[Node]") -> None:
        """Take over the positions of ``path``, neighbours, the first one first, this node among them."""
        resident = 0
        for node in path:
            resident += node.resident
            if node.resident < node._size:
                break
        self.start = path[0].start
        self._data = b"".join(node._data for node in path)
        self._buffer = np.concatenate([node.slots for node in path])
        self._size = len(self._buffer)
        self.resident = resident
        for node in path:
            if node is not self:
                node._data, node._buffer, node._size, node.resident = b"", node._buffer[:0].copy(), 0, 0


class Place(NamedTuple):
    """A point in the tree: the first ``depth`` positions of some chain, the deepest of them in ``node``."""

    node: Node
    depth: int


class Pin:
    """A promise that ``slots``, of positions that end where ``node`` ends, stay what they are.

    Pins hang, like children, at the end of a node: nothing before them is evictable. Splits carry them
    along; a cut leaves them at the end of what is left, and with no ``node`` when nothing is. With a
    ``checkpoint``, which is there when the pin is made, they promise its bag as well.
    """

    __slots__ = ("checkpoint", "kept", "node", "slots", "start")

    def __init__(self, node: Node, slots: Slots, checkpoint: Checkpoint | None = None) -> None:
        self.node: Node | None = node
        self.checkpoint = checkpoint
        self.slots = slots
        self.start = node.end - len(slots)
        self.kept = len(slots)  # how many of them the tree still has; the others are leaving
        node.pins |= {self}

    @property
    def bag(self) -> Slots | None:
        """Slots of its checkpoint, in the order in which the store named them; None without one."""
        return None if self.checkpoint is None else self.checkpoint.slots


class Claim(Pin):
    """A pin of no slots: the GPU has all positions up to the end of ``node``. So they stay in the tree."""


class Removed(NamedTuple):
    """Positions from ``start`` on that left ``node``: ``resident`` ones first, the others were filling.

    ``data`` are their prefix hashes one after the other, ``slots`` theirs by position and column. Loads with
    ``pins`` read them, each from the pin's start on. ``bags``: of the checkpoints that left with them.
    """

    node: Node
    start: int
    data: bytes
    slots: Slots
    resident: int
    pins: "frozenset[Pin]"
    bags: Bags | None = None

    @property
    def hashes(self) -> "Hashes":
        """Their prefix hashes."""
        return Hashes(self.data, len(self.slots))

    @property
    def resident_hashes(self) -> "Hashes":
        """Those of the resident ones."""
        width = len(self.data) // max(len(self.slots), 1)
        return Hashes(self.data[: self.resident * width], self.resident)


class Hashes(Sequence[bytes]):
    """Prefix hashes that lie one after the other in ``data``, made when they are asked for."""

    __slots__ = ("_data", "_size", "_width")

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self._width = len(data) // max(size, 1)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int) -> bytes: ...
    @overload
    def __getitem__(self, key: slice) -> list[bytes]: ...
    def __getitem__(self, key: int | slice) -> bytes | list[bytes]:
        if isinstance(key, slice):
            return chosen(self._data, self._size, range(self._size)[key])
        start = range(self._size)[key] * self._width
        return self._data[start : start + self._width]

    def __iter__(self) -> Iterator[bytes]:
        return iter(unpacked(self._data, self._size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def unpacked(data: bytes | bytearray, num_hashes: int) -> list[bytes]:
    """Hashes of one length that lie one after the other. O(hashes), no Python code for each."""
    if num_hashes < 2:
        return [bytes(data)] if num_hashes else []
    hashes: list[bytes] = _rows(data, num_hashes).tolist()
    return hashes


def chosen(data: bytes | bytearray, num_hashes: int, indices: range) -> list[bytes]:
    """Some of them."""
    if len(indices) < 4:
        width = len(data) // num_hashes
        return [bytes(data[index * width : (index + 1) * width]) for index in indices]
    rows = _rows(data, num_hashes)[indices.start : indices.stop : indices.step]
    hashes: list[bytes] = rows.tolist()
    return hashes


def _rows(data: bytes | bytearray, num_hashes: int) -> npt.NDArray[np.void]:
    return np.frombuffer(data, f"V{len(data) // num_hashes}")
