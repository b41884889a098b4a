"""The prompts that came last, by how they begin: for whoever asks why a new one was not found."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from offload.scheduler.engine import Origin
from offload.scheduler.why.note import MOST_NOTES, Note

MOST_POSITIONS = 1 << 18
"""Chain positions that are remembered in all: some 25 MB, as hashes of 32 bytes."""
_LATEST = 8
"""Of those with the same mark."""


class Found(NamedTuple):
    """The latest requests that are remembered and had something in common.

    Attributes:
        sharer: had that position, too; None: nobody.
        neighbour: had all before that position, and not that; None: nobody.
    """

    sharer: Note | None
    neighbour: Note | None


class Prompts:
    """Remembers chains of requests, each until so many positions, or requests, have come after it.

    A chain is filed under its positions 0, 1, 3, 7 and so on. Of those that have the same there, the latest
    eight are known. To file it and to find it takes O(log n), and nobody looks at all positions. The chain
    itself is the engine's own, which changes with the request. What it is filed under is kept beside it. Of a
    request that is over, a copy is kept: the engine's own may have many hashes for a position.
    """

    def __init__(self, most_positions: int = MOST_POSITIONS, most_notes: int = MOST_NOTES) -> None:
        """None yet. ``most_notes``: requests that are remembered, also those without a full block."""
        self._most_positions = most_positions
        self._most_notes = most_notes
        self._num_positions = 0
        self._notes: deque[Note] = deque()  # that have a chain, oldest first
        self._by_mark: dict[bytes, tuple[Note, ...]] = {}
        self._by_tokens: dict[int, Note] = {}

    def add(self, note: Note, chain: Sequence[bytes]) -> None:
        """A request has come with that chain. O(log n), and what has to be forgotten for it."""
        note.chain = chain
        self._notes.append(note)
        if note.origin is not None and note.origin.tokens is not None:
            self._by_tokens[note.origin.tokens] = note
        self.charge(note)

    def charge(self, note: Note) -> None:
        """Its chain may have grown: what is too much is forgotten, the oldest first."""
        chain = note.chain
        if chain is None:
            return
        for number in range(len(note.marks), len(chain).bit_length()):
            mark = chain[(1 << number) - 1]
            self._by_mark[mark] = (*self._by_mark.get(mark, ())[-_LATEST + 1 :], note)
            note.marks.append(mark)
        self._num_positions += len(chain) - note.num_charged
        note.num_charged = len(chain)
        while self._num_positions > self._most_positions or len(self._notes) > self._most_notes:
            self._forget(self._notes.popleft())

    def finish(self, note: Note) -> None:
        """Its chain grows no more. O(n), as a copy of a list."""
        self.charge(note)
        if note.chain is not None:
            note.chain = list(note.chain[:])

    def find(self, chain: Sequence[bytes], position: int) -> Found:
        """Who had that position of a chain, and who all before it. O(log n)."""
        mark = (1 << (position + 1).bit_length() - 1) - 1
        latest: tuple[Note, ...] = ()
        while not latest:
            latest = self._by_mark.get(chain[mark], ())
            if mark == 0:
                break
            mark = (mark - 1) // 2
        sharer = neighbour = None
        for note in reversed(latest):
            if sharer is None and _has(note, chain, position):
                sharer = note
            elif neighbour is None and position and _has(note, chain, position - 1):
                neighbour = None if _has(note, chain, position) else note
        return Found(sharer, neighbour)

    def same_tokens(self, origin: Origin | None) -> Note | None:
        """The latest that began with the same tokens, whatever else; None: nobody."""
        return None if origin is None or origin.tokens is None else self._by_tokens.get(origin.tokens)

    def check_invariants(self) -> None:
        """It is bounded, and what it has counts."""
        num_charged = sum(note.num_charged for note in self._notes)
        assert num_charged == self._num_positions, f"{num_charged} positions, {self._num_positions} counted"
        assert self._num_positions <= self._most_positions, f"{self._num_positions} are remembered"
        assert len(self._notes) <= self._most_notes, f"{len(self._notes)} requests are remembered"
        assert all(0 < len(latest) <= _LATEST for latest in self._by_mark.values())
        known = {id(note) for note in self._notes}
        filed = [note for latest in (*self._by_mark.values(), self._by_tokens.values()) for note in latest]
        gone = [note.request_id for note in filed if id(note) not in known or note.chain is None]
        assert not gone, f"{gone} are forgotten, and found"
        over = [note for note in self._notes if note.ended is not None]
        less = [note.request_id for note in over if note.num_charged != len(note.chain or ())]
        assert not less, f"{less} are over, and count with less than they keep"
        views = [note.request_id for note in over if type(note.chain) is not list]
        assert not views, f"{views} are over, and keep more than a hash for a position"

    def _forget(self, note: Note) -> None:
        """Nobody finds it any more. O(log n)."""
        for mark in note.marks:
            latest = tuple(each for each in self._by_mark.pop(mark, ()) if each is not note)
            if latest:
                self._by_mark[mark] = latest
        tokens = None if note.origin is None else note.origin.tokens
        if tokens is not None and self._by_tokens.get(tokens) is note:
            del self._by_tokens[tokens]
        self._num_positions -= note.num_charged
        note.num_charged, note.chain, note.marks = 0, None, []


def _has(note: Note, chain: Sequence[bytes], position: int) -> bool:
    own = note.chain
    return own is not None and position < len(own) and own[position] == chain[position]
