"""What KV events say of a store that engines share: what this engine wrote, and has not missed since."""

from collections import deque
from collections.abc import Sequence
from itertools import groupby, islice

from allocator import Event, Evicted, Stored

_MOST_NAMES = 1 << 17
_AT_ONCE = 1 << 14
"""Names that a reset takes back with one call: an engine step waits for it."""


class Announced:
    """Names of extents that were announced and not taken back, those announced last at the end.

    What others write and evict is not known. So a name is taken back when it was missed, when nothing is read
    under it any more, and when so many others were announced since that it is forgotten.
    """

    def __init__(self, *, most_names: int = _MOST_NAMES) -> None:
        """Nothing is announced; ``most_names`` are at most."""
        self._most = most_names
        self._names: dict[bytes, None] = {}
        self._news: deque[Event | dict[bytes, None]] = deque()  # a dict: all of these are taken back

    def __len__(self) -> int:
        """Names that are announced."""
        return len(self._names)

    @property
    def is_listing(self) -> bool:
        """Whether there are events to come."""
        return bool(self._news)

    def announce(self, names: Sequence[bytes], parent: bytes | None, note: object = None) -> None:
        """These were written, one behind the other, and ``parent`` is before them. O(names).

        ``note``: of the events ``Stored``.
        """
        before = parent
        for is_known, run in groupby(names, key=self._names.__contains__):
            found = list(run)
            if not is_known:
                self._news.append(Stored(found, before, note))
            before = found[-1]
        for name in names:
            self._names.pop(name, None)
        self._names.update(dict.fromkeys(names))
        self.take_back(list(islice(self._names, max(0, len(self._names) - self._most))))

    def take_back(self, names: Sequence[bytes]) -> None:
        """These are not there, or nobody knows. O(names)."""
        gone = [name for name in names if name in self._names]
        for name in gone:
            del self._names[name]
        if gone:
            gone.reverse()  # what depends on others goes first
            self._news.append(Evicted(gone))

    def clear(self) -> None:
        """What was written is not read any more. O(1): what follows from that is told bit by bit."""
        if self._names:
            self._news.append(self._names)
        self._names = {}

    def take(self) -> list[Event]:
        """Events since the last call, oldest first; of a reset's a bounded part."""
        events: list[Event] = []
        while self._news:
            first = self._news[0]
            if isinstance(first, dict):
                events.append(Evicted([first.popitem()[0] for _ in range(min(len(first), _AT_ONCE))]))
                if first:
                    break
            else:
                events.append(first)
            self._news.popleft()
        return events

    def check_invariants(self) -> None:
        """There are not too many."""
        assert len(self._names) <= self._most, f"{len(self._names)} names are announced"
