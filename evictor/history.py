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


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive positions with the same past that are not here.

    Attributes:
        size: how many.
        marks: names of some of them by offset, ascending; the last is always among them. A run is not kept
            name by name: it would cost more memory than what it remembers is worth.
        past: of all of them.
    """

    size: int
    marks: list[tuple[int, Hashable]]
    past: Past

    @classmethod
    def of(cls, keys: Sequence[Hashable], start: int, stop: int, past: Past) -> "Run":
        """The run of ``keys[start:stop]``."""
        size = stop - start
        offsets = [*range(0, size - 1, -(-size // _NUM_MARKS)), size - 1]
        return cls(size, [(offset, keys[start + offset]) for offset in offsets], past)

    def num_common(self, keys: Sequence[Hashable], start: int) -> int:
        """With how many positions it begins that ``keys[start:]`` begins with; rounded down to a mark."""
        room = len(keys) - start
        for offset, key in reversed(self.marks):
            if offset < room and keys[start + offset] == key:
                return offset + 1
        return 0

    def without(self, num_positions: int) -> "Run":
        """What is left without its first positions."""
        marks = [(offset - num_positions, key) for offset, key in self.marks if offset >= num_positions]
        return Run(self.size - num_positions, marks, self.past)


class History:
    """Runs by the name of their first position, oldest first, up to a number of positions."""

    def __init__(self, limit: int) -> None:
        """``limit``: positions remembered at most."""
        self.limit = limit
        self._runs: OrderedDict[Hashable, Run] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable) -> Run | None:
        """The run that begins with ``key``."""
        return self._runs.get(key)

    def add(self, key: Hashable, run: Run) -> Run | None:
        """``run`` begins with ``key`` and is the newest; returns the one it replaces."""
        replaced = self.pop(key)
        self._runs[key] = run
        self._size += run.size
        return replaced

    def pop(self, key: Hashable) -> Run | None:
        """Forget the run that begins with ``key``; return it."""
        run = self._runs.pop(key, None)
        if run is not None:
            self._size -= run.size
        return run

    def pop_excess(self) -> list[Run]:
        """Forget the oldest runs beyond the limit; return them."""
        runs = []
        while self._size > self.limit:
            _, run = self._runs.popitem(last=False)
            self._size -= run.size
            runs.append(run)
        return runs

    def check_invariants(self) -> None:
        """Sizes add up, and marks are those of their runs."""
        assert self._size == sum(run.size for run in self._runs.values()), f"{self._size} positions counted"
        for key, run in self._runs.items():
            offsets = [offset for offset, _ in run.marks]
            assert run.size > 0, f"the run from {key!r} is empty"
            assert offsets == sorted(set(offsets)), f"marks of the run from {key!r} are at {offsets}"
            assert offsets[-1] == run.size - 1, f"the last mark of the run from {key!r} is at {offsets[-1]}"
