"""What was evicted, by name: the memory of policies that learn from their mistakes."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from itertools import count

from evictor.untracked import untrack


class Ghosts:
    """Runs of evicted names, the oldest run forgotten first, its last name first.

    A run is the names of one bite, in chain order. It is found by the first of them: a request for the others
    asks for that one too. Names of 32 bytes are most of its memory. The garbage collector visits runs, not
    their names. All names are kept: with a ``History``, which keeps some and forgets whole runs, ``s3fifo``
    finds less.
    """

    def __init__(self, limit: int) -> None:
        """Remember at most ``limit`` names."""
        self.limit = limit
        self._serials: dict[Hashable, int] = {}  # of runs, by their first name
        self._runs: dict[int, list[Hashable]] = {}  # by serial, oldest first
        self._serial = count()
        self._num_names = 0

    def __len__(self) -> int:
        """Names remembered."""
        return self._num_names

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

    def add(self, names: Sequence[Hashable]) -> None:
        """Remember a bite. O(1) array work per name."""
        if names[0] in self._serials:
            self.take(names[0], len(self._runs[self._serials[names[0]]]))
        serial = self._serials[names[0]] = next(self._serial)
        self._runs[serial] = run = list(names)
        untrack(run)
        self._num_names += len(names)
        self.trim(self.limit)

    def take(self, name: Hashable, size: int) -> None:
        """Forget the first ``size`` names of the run that begins with ``name``; the rest keeps its age.

        And takes the place of another run that begins as it does.
        """
        serial = self._serials.pop(name)
        run = self._runs[serial]
        del run[:size]
        self._num_names -= size
        if run:
            if (other := self._serials.get(run[0])) is not None:
                self._num_names -= len(self._runs.pop(other))
            self._serials[run[0]] = serial
        else:
            del self._runs[serial]

    def trim(self, limit: int) -> None:
        """Forget the oldest until at most ``limit`` names are left."""
        while self._num_names > max(limit, 0):
            serial, run = next(iter(self._runs.items()))
            size = min(self._num_names - max(limit, 0), len(run))
            if size == len(run):
                del self._serials[run[0]], self._runs[serial]
            else:
                del run[-size:]
            self._num_names -= size

    def check_invariants(self) -> None:
        """Raise AssertionError if runs, their index and their number of names contradict each other."""
        num_names = sum(map(len, self._runs.values()))
        assert num_names == self._num_names, f"{num_names} ghosts, not {self._num_names}"
        assert num_names <= self.limit, f"{num_names} ghosts are more than {self.limit}"
        assert len(self._serials) == len(self._runs), f"{self._serials} and {self._runs} differ"
        assert list(self._runs) == sorted(self._runs), f"runs are out of order: {list(self._runs)}"
        for name, serial in self._serials.items():
            run = self._runs.get(serial)
            assert run and run[0] == name, f"the run found by {name!r} is {run}"


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
