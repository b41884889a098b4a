"""What was evicted, by name: the memory of policies that learn from their mistakes."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from math import ceil, isclose

from evictor.untracked import untrack


class Ghosts:
    """Runs of evicted names, the oldest run forgotten first, its last name first.

    What is remembered is counted in the slots that it had, the names of a run in equal parts.

    A run is the names of one bite, in chain order. It is found by the first of them: a request for the others
    asks for that one too. Names of 32 bytes are most of its memory. The garbage collector visits runs, not
    their names. All names are kept: with a ``History``, which keeps some and forgets whole runs, ``s3fifo``
    finds less.
    """

    def __init__(self, limit: int) -> None:
        """Remember names of at most ``limit`` slots."""
        self.limit = limit
        self._serials: dict[Hashable, int] = {}  # of runs, by their first name
        self._runs: dict[int, list[Hashable]] = {}  # by serial, oldest first
        self._weights: dict[int, float] = {}  # slots of a name by serial, where it is not one
        self._serial = count()
        self.weight: float = 0
        """Slots that the names had which are remembered."""

    def __len__(self) -> int:
        """Names remembered."""
        return sum(map(len, self._runs.values()))

    def __contains__(self, name: Hashable) -> bool:
        """Whether a run begins with ``name``."""
        return name in self._serials

    def match(self, names: Sequence[Hashable], start: int) -> int:
        """How many of ``names[start:]`` are the run that begins there; O(log n), for a name is a prefix."""
        serial = self._serials.get(names[start])
        if serial is None:
            return 0
        run = self._runs[serial]
        size = min(len(run), len(names) - start)
        if run[size - 1] == names[start + size - 1]:
            return size
        return bisect_left(range(size), True, key=lambda i: run[i] != names[start + i])

    def weight_of(self, name: Hashable) -> float:
        """Slots of each name in the run that begins with ``name``."""
        return self._weight_of(self._serials[name])

    def add(self, names: Sequence[Hashable], weight: int | None = None) -> None:
        """Remember a bite of so many slots, None for one each. O(1) array work per name.

        A bite without slots counts as one of a single slot, so that it is forgotten some day.
        """
        if names[0] in self._serials:
            self.take(names[0], len(self._runs[self._serials[names[0]]]))
        serial = self._serials[names[0]] = next(self._serial)
        self._runs[serial] = run = list(names)
        untrack(run)
        if weight is not None and weight != len(names):
            self._weights[serial] = max(weight, 1) / len(names)
        self.weight += self._weight_of(serial) * len(names)
        self.trim(self.limit)

    def take(self, name: Hashable, size: int) -> None:
        """Forget the first ``size`` names of the run that begins with ``name``; the rest keeps its age.

        And takes the place of another run that begins as it does.
        """
        serial = self._serials.pop(name)
        run = self._runs[serial]
        del run[:size]
        self.weight -= size * self._weight_of(serial)
        if run:
            if (other := self._serials.get(run[0])) is not None:
                self._end(other)
            self._serials[run[0]] = serial
        else:
            self._end(serial)

    def trim(self, limit: float) -> None:
        """Forget the oldest until names of at most ``limit`` slots are left."""
        while self._runs and self.weight > max(limit, 0):
            serial, run = next(iter(self._runs.items()))
            weight = self._weight_of(serial)
            size = min(ceil((self.weight - max(limit, 0)) / weight), len(run))
            if size == len(run):
                del self._serials[run[0]]
                self._end(serial)
            else:
                del run[-size:]
                self.weight -= size * weight

    def check_invariants(self) -> None:
        """Raise AssertionError if runs, their index and their number of names contradict each other."""
        weight = sum(self._weight_of(serial) * len(run) for serial, run in self._runs.items())
        assert isclose(weight, self.weight, abs_tol=1e-6), f"{weight} slots of ghosts, not {self.weight}"
        assert weight <= self.limit + 1e-6, f"{weight} slots of ghosts are more than {self.limit}"
        assert self._weights.keys() <= self._runs.keys(), f"{self._weights} of {self._runs}"
        assert len(self._serials) == len(self._runs), f"{self._serials} and {self._runs} differ"
        assert list(self._runs) == sorted(self._runs), f"runs are out of order: {list(self._runs)}"
        for name, serial in self._serials.items():
            run = self._runs.get(serial)
            assert run and run[0] == name, f"the run found by {name!r} is {run}"

    def _weight_of(self, serial: int) -> float:
        return self._weights.get(serial, 1)

    def _end(self, serial: int) -> None:
        """Forget what is left of a run. Where nothing is remembered, nothing is counted."""
        self.weight -= self._weight_of(serial) * len(self._runs.pop(serial))
        self._weights.pop(serial, None)
        if not self._runs:
            self.weight = 0


def runs(names: Sequence[Hashable], start: int, *histories: Ghosts) -> Iterator[tuple[Ghosts, int, int]]:
    """The ghosts that ``names[start:]`` begin with, run by run: who remembers it, its start, its size.

    A run may be taken before the next one is asked for.
    """
    while start < len(names):
        for ghosts in histories:
            if size := ghosts.match(names, start):
                yield ghosts, start, size
                start += size
                break
        else:
            return
