"""What became resident and what left, in order, until somebody asks."""

from collections import deque

from allocator.node import Removed
from allocator.plans import Evicted, Stored


class EventLog:
    """Events of the pool, oldest first.

    A cut may take away hundreds of thousands of segments, and a step no more than so many of them. Each is
    listed when it is taken away. What happens after a cut may be about the same positions. So it waits until
    the cut is listed whole.
    """

    def __init__(self, is_on: bool) -> None:
        """Nothing has happened; nothing is kept unless ``is_on``."""
        self.is_on = is_on
        self._events: list[Stored | Evicted] = []
        self._after_cuts: deque[list[Stored | Evicted]] = deque()  # what came after each that is not listed

    @property
    def is_listing(self) -> bool:
        """Whether something was cut off that is yet to be listed."""
        return bool(self._after_cuts)

    def record(self, event: Stored | Evicted) -> None:
        """Something became resident, or left."""
        if self.is_on and event.hashes:
            (self._after_cuts[-1] if self._after_cuts else self._events).append(event)

    def begin_cut(self) -> None:
        """Something was cut off."""
        if self.is_on:
            self._after_cuts.append([])

    def take_away(self, removed: Removed, num_cuts: int) -> None:
        """``removed`` is of the first of ``num_cuts`` cuts that are yet to be taken away."""
        self.end_cuts(num_cuts)
        if self.is_on and removed.resident:
            self._events.append(Evicted(removed.resident_hashes))

    def end_cuts(self, num_left: int) -> None:
        """All cuts but the last so many have been taken away."""
        while len(self._after_cuts) > num_left:
            self._events += self._after_cuts.popleft()

    def take(self) -> list[Stored | Evicted]:
        """Events since the last call, but those that wait for a cut."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def check_invariants(self, num_cuts: int) -> None:
        """``num_cuts`` are yet to be taken away."""
        num_listed = len(self._after_cuts)
        assert num_listed == num_cuts or not self.is_on, (
            f"{num_listed} cuts are yet to be listed, {num_cuts} to be taken away"
        )
