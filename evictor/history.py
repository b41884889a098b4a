"""Positions that are known but not here: asked for, or evicted, and perhaps asked for again."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

import numpy as np

from evictor.kinds import NUM_USES, ending_of, with_ending

MANY_USES = NUM_USES - 1
"""Uses, or more: then how many does not matter, so that parts of a chain become alike."""

_NUM_MARKS = 32

_ROW = Struct("qqqiiiiii")
"""A row of the table: hashes of the first and the last name; past: last use; size; past: uses, kind. Then
three rows: the next newer one, the next older one, and the next one of the same place in the index."""

_KNOWN = Struct("qqqiii")
"""The part of a row that is known of the run."""

_NAMES, _WORDS = _ROW.size // 8, _ROW.size // 4
_SIZE, _KIND, _NEWER, _OLDER, _NEXT = 6, 8, 9, 10, 11  # as words of a row

_OFFSETS = Struct("qq")
_MARK = Struct("q")
_FEW = 16


@dataclass(slots=True, eq=False)
class Past:
    """What is remembered of positions with the same past.

    Attributes:
        last_use: when a request asked for them last, in ticks.
        uses: how often one did after the first time; the highest number stands for all above.
        kind: class of the last request, by which they are judged; see ``reuse``.
    """

    last_use: int
    uses: int
    kind: int

    def is_like(self, other: "Past") -> bool:
        """Whether both are the same past."""
        return self.last_use == other.last_use and self.uses == other.uses and self.kind == other.kind


class Answered(NamedTuple):
    """A run whose answer has ended: its positions, and their kind since."""

    size: int
    kind: int


class Run:
    """Consecutive positions with the same past that are not here.

    Not all names are kept: that would cost more memory than what is remembered is worth. Kept are the first
    and the last one, and every n-th from some offset on, at most ``_NUM_MARKS`` of them. The first and
    the last are known by their hashes, the others by 8 bytes of them.
    """

    __slots__ = ("first", "last", "marks", "past", "size")

    def __init__(self, size: int, past: Past, first: int, last: int, marks: bytes | None) -> None:
        self.size = size
        """How many positions."""
        self.past = past
        """The past of all of them."""
        self.first = first
        """Hash of the name of the first one."""
        self.last = last
        """Hash of the name of the last one."""
        self.marks = marks
        """The offset of the first name between, how far they are apart, and 8 bytes of each, as ``int64``."""

    @classmethod
    def of(cls, keys: Sequence[Hashable], start: int, stop: int, past: Past) -> "Run":
        """The run of ``keys[start:stop]``."""
        size, marks = stop - start, None
        if size > 2:
            stride = -(-size // _NUM_MARKS)
            marks = _OFFSETS.pack(stride, stride) + _marks(keys[start + stride : stop - 1 : stride])
        return cls(size, past, hash(keys[start]), hash(keys[stop - 1]), marks)

    def num_common(self, keys: Sequence[Hashable], start: int) -> int:
        """With how many positions it begins that ``keys[start:]`` begins with; rounded down to a mark."""
        end = start + self.size
        if end <= len(keys) and hash(keys[end - 1]) == self.last:
            return self.size
        if self.marks is not None:
            offset, stride, *marks = memoryview(self.marks).cast("q")
            for index in range(len(marks) - 1, -1, -1):
                place = start + offset + index * stride
                if place < len(keys) and _mark(keys[place]) == marks[index]:
                    return place - start + 1
        return int(start < len(keys) and hash(keys[start]) == self.first)

    def behead(self, num_positions: int, key: Hashable) -> None:
        """Take off its first positions, fewer than it has; ``key`` is the name that it is found by then."""
        self.size -= num_positions
        self.first = hash(key)
        if self.marks is not None:
            offset, stride = _OFFSETS.unpack_from(self.marks)
            gone = max(0, (num_positions - offset) // stride + 1)
            offsets = _OFFSETS.pack(offset + gone * stride - num_positions, stride)
            names = self.marks[_OFFSETS.size + 8 * gone :]
            self.marks = offsets + names if names else None

    def check_invariants(self) -> None:
        """All marks are within it."""
        assert self.size > 0, "a run without positions"
        if self.marks is not None:
            offset, stride, *marks = memoryview(self.marks).cast("q")
            last_mark = offset + (len(marks) - 1) * stride
            assert 0 < offset <= last_mark < self.size - 1, (
                f"marks from {offset} to {last_mark} in a run of {self.size}"
            )


class History:
    """Runs by the name of their first position, oldest first, up to a number of positions.

    Runs are rows of a table that the garbage collector does not see. Each takes 56 bytes, and 8 at most in
    the index. From three positions on it takes some 60 more, and 8 for each mark. So 90 bytes at most for a
    position, whatever the runs. The table is as long as the limit from the start, so that no call has to move
    it. Memory is taken as rows are used. Every call is O(1), but for the names of a run.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: positions remembered at most."""
        self._limit = limit
        self._size = 0
        self._num_runs = 0
        self._num_rows = 0  # ever used; row 0 is nobody
        self._unused = 0  # the first of those that are free again, each followed by its ``_NEWER``
        self._oldest = self._newest = 0
        num_rows = limit + 2  # one more than the limit for a moment
        self._rows = np.zeros(num_rows * _ROW.size, dtype=np.uint8).data
        self._words = self._rows.cast("i")
        self._names = self._rows.cast("q")
        self._marks = np.empty(num_rows, dtype=object)
        self._mask = (1 << limit.bit_length()) - 1
        self._index = np.zeros(self._mask + 1, dtype=np.int32).data

    def __len__(self) -> int:
        """Runs."""
        return self._num_runs

    @property
    def size(self) -> int:
        """Positions remembered."""
        return self._size

    def get(self, key: Hashable) -> Run | None:
        """The run that begins with ``key``, as a copy."""
        row = self._find(hash(key))
        return self._run(row) if row else None

    def past_of(self, key: Hashable) -> Past | None:
        """That of the run that begins with ``key``."""
        row = self._find(hash(key))
        return self._past(row) if row else None

    def size_of(self, key: Hashable) -> int:
        """Positions of the run that begins with ``key``; 0 if there is none."""
        return self._words[self._find(hash(key)) * _WORDS + _SIZE]

    def add(self, run: Run) -> Sequence[Run]:
        """``run`` is the newest; returns what is forgotten for it.

        That is another one that begins as it does, and the oldest ones beyond the limit.
        """
        row = self._find(run.first)
        lost = [self._take(row)] if row else []
        if run.size <= self._limit:
            self._append(run)
        else:
            lost.append(run)
        while self._size > self._limit:
            lost.append(self._take(self._oldest))
        return lost

    def pop(self, key: Hashable) -> Run | None:
        """Forget the run that begins with ``key``; return it."""
        row = self._find(hash(key))
        return self._take(row) if row else None

    def answered(self, key: Hashable, last_use: int, ending: int) -> Answered | None:
        """The answer to the request that asked for the run beginning with ``key`` has ended so.

        None, and nothing changes, if another request, or none, has asked for it last, or it is told again.
        """
        row = self._find(hash(key))
        if not row or self._names[row * _NAMES + 2] != last_use:
            return None
        at = row * _WORDS
        if ending_of(self._words[at + _KIND]):
            return None
        kind = self._words[at + _KIND] = with_ending(self._words[at + _KIND], ending)
        return Answered(self._words[at + _SIZE], kind)

    def runs(self) -> list[Run]:
        """All of them, the oldest first. O(runs)."""
        return [self._run(row) for row in self._by_age()]

    def check_invariants(self) -> None:
        """Sizes add up, every run is found by its name, and marks are those of their runs."""
        rows = list(self._by_age())
        runs = [self._run(row) for row in rows]
        sizes = [run.size for run in runs]
        assert self._size == sum(sizes), f"{self._size} positions counted, {sizes} known"
        assert self._size <= self._limit, f"{self._size} positions, more than {self._limit}"
        assert self._num_runs == len(rows), f"{self._num_runs} runs counted, {len(rows)} known"
        for (before, row), run in zip(pairwise([0, *rows]), runs, strict=True):
            older = self._words[row * _WORDS + _OLDER]
            assert older == before, f"row {row} comes after {older}, not {before}"
            found = self._find(run.first)
            assert found == row, f"by the name of row {row} row {found} is found"
            run.check_invariants()
        assert self._newest == (rows[-1] if rows else 0), f"row {self._newest} is not the newest of {rows}"
        assert not any(self._words[:_WORDS]), "there is a run in row 0"

    def _by_age(self) -> Iterator[int]:
        row = self._oldest
        while row:
            yield row
            row = self._words[row * _WORDS + _NEWER]

    def _find(self, name: int) -> int:
        """The row of the run that begins with that name; 0 if there is none."""
        row = self._index[name & self._mask]
        while row and self._names[row * _NAMES] != name:
            row = self._words[row * _WORDS + _NEXT]
        return row

    def _run(self, row: int) -> Run:
        first, last, last_use, size, uses, kind = _KNOWN.unpack_from(self._rows, row * _ROW.size)
        return Run(size, Past(last_use, uses, kind), first, last, self._marks[row])

    def _past(self, row: int) -> Past:
        words = self._words[row * _WORDS + _SIZE + 1 : row * _WORDS + _NEWER]
        return Past(self._names[row * _NAMES + 2], *words)

    def _append(self, run: Run) -> None:
        """A new row for the newest run."""
        words, past, place = self._words, run.past, run.first & self._mask
        row = self._unused
        if row:
            self._unused = words[row * _WORDS + _NEWER]
        else:
            self._num_rows = row = self._num_rows + 1
        if self._newest:
            words[self._newest * _WORDS + _NEWER] = row
        else:
            self._oldest = row
        links = 0, self._newest, self._index[place]
        known = run.first, run.last, past.last_use, run.size, past.uses, past.kind
        _ROW.pack_into(self._rows, row * _ROW.size, *known, *links)
        if run.marks is not None:
            self._marks[row] = run.marks
        self._index[place] = self._newest = row
        self._size += run.size
        self._num_runs += 1

    def _take(self, row: int) -> Run:
        """Forget a run; its row is free."""
        words, run = self._words, self._run(row)
        at = row * _WORDS
        newer, older, after = words[at + _NEWER], words[at + _OLDER], words[at + _NEXT]
        place = run.first & self._mask
        before = self._index[place]
        if before == row:
            self._index[place] = after
        else:
            while words[before * _WORDS + _NEXT] != row:
                before = words[before * _WORDS + _NEXT]
            words[before * _WORDS + _NEXT] = after
        if older:
            words[older * _WORDS + _NEWER] = newer
        else:
            self._oldest = newer
        if newer:
            words[newer * _WORDS + _OLDER] = older
        else:
            self._newest = older
        if run.marks is not None:
            self._marks[row] = None
        words[at + _NEWER], self._unused = self._unused, row
        self._size -= run.size
        self._num_runs -= 1
        return run


def _mark(key: Hashable) -> int:
    """A name's first 8 bytes; of a name that is something else its hash."""
    if type(key) is bytes and len(key) >= _MARK.size:
        mark: int = _MARK.unpack_from(key)[0]
        return mark
    return hash(key)


def _marks(keys: Sequence[Hashable]) -> bytes:
    """The ``_mark`` of each; of many names of bytes, which have one length, without a loop."""
    width = len(keys[0]) if keys and type(keys[0]) is bytes else 0
    if width < _MARK.size:
        return array("q", map(_mark, keys)).tobytes()
    if len(keys) < _FEW:
        return b"".join([key[: _MARK.size] for key in keys])  # type: ignore[index]
    data = b"".join(keys)  # type: ignore[arg-type]
    return np.ndarray(len(keys), np.int64, data, strides=(width,)).tobytes()


def joined_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where runs end, and their uses with this one; neighbours with as many are one."""
    joined: list[tuple[int, int]] = []
    for stop, uses in runs:
        now = min(uses + 1, MANY_USES)
        if joined and joined[-1][1] == now:
            joined[-1] = stop, now
        else:
            joined.append((stop, now))
    return joined
