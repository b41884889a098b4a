"""Classes of ages, and what an index says between them."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Place = tuple[int, float]
"""An age: its class, and the part of the class that is younger."""

NUM_AGES = 14
NUM_STEPS = 4
"""Of the index, within each of them."""


class Ages:
    """``NUM_AGES`` classes: the first up to some age, each of the others to twice that. Does not change."""

    def __init__(self, first: float) -> None:
        """``first``: where the second class begins."""
        edges = [0.0, *(first * 2.0**octave for octave in range(NUM_AGES))]
        self.starts = np.array(edges[:-1])
        """Where each begins."""
        self.widths = np.diff(edges)
        """How long each is."""
        self._edges = edges
        self._steps = [
            (low + (high - low) * step / NUM_STEPS if low == 0 else low * (high / low) ** (step / NUM_STEPS))
            for low, high in pairwise(edges)
            for step in range(NUM_STEPS)
        ]
        self._steps.append(math.inf)

    def classes_of(self, ages: Floats | Ints) -> Ints:
        """Of each age, its class. What is older than all of them is of the last."""
        return np.searchsorted(self.starts, ages, "right") - 1

    def place_of(self, age: float) -> Place:
        """The class of that age, and the part of it that is younger. The last one has all the rest."""
        number = min(bisect_right(self._edges, age), NUM_AGES) - 1
        start, stop = self._edges[number], self._edges[number + 1]
        return number, min(1.0, (age - start) / (stop - start))

    def at(self, index: Sequence[float], age: float) -> tuple[float, float]:
        """The value at that age, and the age from which on it is another. O(log classes).

        ``index``: values of each step of each class, and one behind the last.
        """
        step = bisect_right(self._steps, age)
        return index[step - 1], self._steps[step]
