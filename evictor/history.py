"""Positions that are known but not here: asked for, or evicted, and perhaps asked for again."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_NUM_MARKS = 32


@dataclass(slots=True, eq=False)
class Past:
    """What is remembered of positions with the same past.

    Attributes:
        last_use: when a request asked for them last, in ticks.
        uses: how often one did after the first time.
        kind: class of the last request, by which they are judged; see ``reuse``.
    """

    last_use: int
    uses: int
    kind: int

    def is_like(self, other: "Past") -> bool:
        """Whether both are the same past."""
        return self.last_use == other.last_use and self.uses == other.uses and self.kind == other.kind


class Run:
    """Consecutive positions with the same past that are not here.

    Not all names are kept, that would cost more memory than what is remembered is worth: the last one, and
    every so manieth from some offset on, at most twice ``_NUM_MARKS`` of them.
    """

    __slots__ = ("_first", "_last", "_marks", "_stride", "past", "size")

    def __init__(self, keys: Sequence[Hashable], start: int, stop: int, past: Past) -> None:
        """The run of ``keys[start:stop]``."""
        self.size = size = stop - start
        """How many positions."""
        self.past = past
        """Of all of them."""
        self._stride = stride = -(-size // _NUM_MARKS)
        self._marks = keys[start:stop:stride]  # names from offset ``_first`` on, one per ``_stride``
        self._first = 0
        self._last = keys[stop - 1]

    def num_common(self, keys: Sequence[Hashable], start: int) -> int:
        """With how many positions it begins that ``keys[start:]`` begins with; rounded down to a mark."""
        end = start + self.size
        if end <= len(keys) and keys[end - 1] == self._last:
            return self.size
        for index in range(len(self._marks) - 1, -1, -1):
            offset = self._first + index * self._stride
            if start + offset < len(keys) and keys[start + offset] == self._marks[index]:
                return offset + 1
        return 0

    def behead(self, num_positions: int) -> None:
        """Take off its first positions, fewer than it has."""
        gone = max(0, -(-(num_positions - self._first) // self._stride))
        self._first += gone * self._stride - num_positions
        self._marks = self._marks[gone:]
        self.size -= num_positions

    def check_invariants(self) -> None:
        """All marks are within it."""
        assert self.size > 0, "a run without positions"
        last_mark = self._first + (len(self._marks) - 1) * self._stride
        assert not self._marks or 0 <= self._first <= last_mark < self.size, (
            f"marks from {self._first} to {last_mark} in a run of {self.size}"
        )


class History:
    """Runs by the name of their first position, oldest first, up to a number of positions."""

    def __init__(self, limit: int) -> None:
        """``limit``: positions remembered at most."""
        self._limit = limit
        self._runs: OrderedDict[Hashable, Run] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable) -> Run | None:
        """The run that begins with ``key``."""
        return self._runs.get(key)

    def add(self, key: Hashable, run: Run) -> Sequence[Run]:
        """``run`` begins with ``key`` and is the newest; returns what is forgotten for it.

        That is another one that begins so, and the oldest ones beyond the limit.
        """
        replaced = self.pop(key) if key in self._runs else None
        self._runs[key] = run
        self._size += run.size
        if replaced is None and self._size <= self._limit:
            return ()
        lost = [] if replaced is None else [replaced]
        while self._size > self._limit:
            _, oldest = self._runs.popitem(last=False)
            self._size -= oldest.size
            lost.append(oldest)
        return lost

    def pop(self, key: Hashable) -> Run | None:
        """Forget the run that begins with ``key``; return it."""
        run = self._runs.pop(key, None)
        if run is not None:
            self._size -= run.size
        return run

    def runs(self) -> list[Run]:
        """All of them, the oldest first."""
        return list(self._runs.values())

    def check_invariants(self) -> None:
        """Sizes add up, and marks are those of their runs."""
        assert self._size == sum(run.size for run in self._runs.values()), f"{self._size} positions counted"
        for run in self._runs.values():
            run.check_invariants()
