"""Classes of the ways in which answers end, made from what is seen."""

from collections.abc import Hashable

from evictor.kinds import NUM_ENDINGS

OTHERS = NUM_ENDINGS - 1
"""The class of all endings that are too rare for one of their own."""

_MOST_COUNTED = 64
_HALVE_AT = 4096  # answers


class Endings:
    """Gives each of the most frequent endings a class of its own, and all others one together.

    An ending is anything that is equal where answers ended alike: a word, or the last token ids. Nothing has
    to be known of it beforehand, such as which token ends a tool call. Classes are 1 to ``OTHERS``. One
    passes to another ending once that is twice as frequent. All calls are O(64) at most.
    """

    def __init__(self) -> None:
        """Begin with no class taken."""
        self._counts: dict[Hashable, int] = {}
        self._classes: dict[Hashable, int] = {}
        self._num_counted = 0

    def class_of(self, ending: Hashable) -> int:
        """An answer has ended so: its class."""
        self._count(ending)
        own = self._classes.get(ending)
        if own is not None:
            return own
        if len(self._classes) < OTHERS - 1:
            number = len(self._classes) + 1
        else:
            rarest = min(self._classes, key=lambda each: self._counts.get(each, 0))
            if self._counts[ending] <= 2 * self._counts.get(rarest, 0):
                return OTHERS
            number = self._classes.pop(rarest)
        self._classes[ending] = number
        return number

    def check_invariants(self) -> None:
        """What is counted is bounded, and no two endings have one class."""
        assert len(self._counts) <= _MOST_COUNTED, f"{len(self._counts)} endings are counted"
        classes = sorted(self._classes.values())
        assert classes == list(range(1, len(classes) + 1)), f"classes {classes}"
        assert len(classes) < OTHERS, f"{len(classes)} classes"

    def _count(self, ending: Hashable) -> None:
        if ending not in self._counts and len(self._counts) == _MOST_COUNTED:
            del self._counts[min(self._counts, key=self._counts.__getitem__)]
        self._counts[ending] = self._counts.get(ending, 0) + 1
        self._num_counted += 1
        if self._num_counted == _HALVE_AT:
            self._num_counted = 0
            self._counts = {each: count // 2 for each, count in self._counts.items()}
