"""Kinds of positions, and the books in which their episodes are counted.

A kind has three parts. The *base* says how often requests asked for a position after the first time, how much
of the last request was new, and how much of it was known. The *turn* says how the answer before that request
ended, and how long it was since the chain's turn before it; 0 if that is not known. The *ending* says how the
answer to that request ended, 0 as long as it has not.

An episode is counted in one book by its base, in one by its turn if that is known, and from the end of the
answer on in one by its ending. The last two are by the number of uses as well, and by the same gap. Where no
turn is known, an ending tells the chain's next turn how this one ended, and nothing else.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NUM_USES, NUM_NEW, NUM_KNOWN = 4, 8, 3
NUM_BASE = NUM_USES * NUM_NEW * NUM_KNOWN
_BASE_PER_USES = NUM_NEW * NUM_KNOWN

BASE_KINDS = [list(range(each, NUM_BASE, _BASE_PER_USES)) for each in range(_BASE_PER_USES)]
"""Base kinds by what was new and known, then by uses."""

NUM_ENDINGS = 6
"""Classes of endings; 0 says that nothing is known."""

NUM_GAPS = 8
"""Classes of gaps between turns; 0 says that there was no turn before."""

_GAPS = [4.0**each for each in range(1, NUM_GAPS - 1)]  # seconds from which the classes after the first are

_WITHOUT_ENDING = NUM_BASE * (1 + NUM_ENDINGS * NUM_GAPS)
NUM_KINDS = _WITHOUT_ENDING * NUM_ENDINGS
"""Kinds are numbers below that."""

NUM_CELLS = NUM_ENDINGS * NUM_GAPS * NUM_USES
"""Books by turn, and as many by ending."""
FIRST_RUNNING = NUM_BASE
"""The first of the books by turn. Before these are those by base."""
FIRST_ENDED = FIRST_RUNNING + NUM_CELLS
"""The first of the books by ending."""
NUM_BOOKS = FIRST_ENDED + NUM_CELLS
"""All of them."""


def gap_of(seconds: float) -> int:
    """The class of a gap, from 1 on."""
    return 1 + bisect_right(_GAPS, seconds)


def with_turn(base: int, ending: int, gap: int) -> int:
    """The kind of a position whose chain had a turn before, which ended so and was so long ago."""
    return base + NUM_BASE * (1 + ending * NUM_GAPS + gap)


def with_ending(kind: int, ending: int) -> int:
    """The kind of a position of ``kind`` once the answer has ended so."""
    return kind % _WITHOUT_ENDING + ending * _WITHOUT_ENDING


def ending_of(kind: int) -> int:
    """How the answer to the last request ended; 0: not yet, or nobody knows."""
    return kind // _WITHOUT_ENDING


def base_of(kind: int) -> int:
    """What was new and known, and how many uses there were."""
    return kind % NUM_BASE


def books_of(kind: int) -> list[int]:
    """Books in which an episode of that kind is counted: by its base, its turn and its ending."""
    ending, rest = divmod(kind, _WITHOUT_ENDING)
    turn, base = divmod(rest, NUM_BASE)
    uses = base // _BASE_PER_USES
    if not turn:
        return [base]
    books = [base, FIRST_RUNNING + (turn - 1) * NUM_USES + uses]
    if ending:
        gap = (turn - 1) % NUM_GAPS
        books.append(FIRST_ENDED + (ending * NUM_GAPS + gap) * NUM_USES + uses)
    return books


def all_books(kinds: Ints) -> tuple[Ints, Ints]:
    """``books_of`` of each: places in ``kinds``, and their books, as many as there are. Whole arrays."""
    ending, rest = np.divmod(kinds, _WITHOUT_ENDING)
    turn, base = np.divmod(rest, NUM_BASE)
    uses = base // _BASE_PER_USES
    told, ended = np.flatnonzero(turn), np.flatnonzero(turn * ending)
    gap = (turn - 1) % NUM_GAPS
    books = (
        base,
        (FIRST_RUNNING + (turn - 1) * NUM_USES + uses)[told],
        (FIRST_ENDED + (ending * NUM_GAPS + gap) * NUM_USES + uses)[ended],
    )
    return np.concatenate((np.arange(len(kinds)), told, ended)), np.concatenate(books)


def endings_of(kinds: Ints) -> Ints:
    """Of each that is counted in a book by ending, how the answer ended; of others 0."""
    ending, rest = np.divmod(kinds, _WITHOUT_ENDING)
    return np.where(rest >= NUM_BASE, ending, 0)
