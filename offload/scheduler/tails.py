"""Chains out of single positions, or extents, that know only what comes before them."""

from collections.abc import Iterator, Sequence
from itertools import chain as chain_up
from typing import NamedTuple, TypeVar

import numpy as np

from offload.messages import Ids
from offload.naming import NO_PARENT

T = TypeVar("T")


class Tails(NamedTuple):
    """Of each chain what no chain before it has.

    Attributes:
        rows: of all tails, one after the other, ``int64[rows]``.
        starts: tail ``i`` has ``rows[starts[i]:starts[i + 1]]``; ``int64[tails + 1]``.
        depths: how many come before the first of each in its chain, ``int64[tails]``.
        before: the tail that it leaves, an earlier one; -1: it begins a chain. ``int64[tails]``.
    """

    rows: Ids
    starts: Ids
    depths: Ids
    before: Ids

    def wholes(self, items: Sequence[T]) -> Iterator[list[T]]:
        """Of each tail the whole chain that it ends; ``items``: what to tell of ``rows``, in their order."""
        starts, depths, before = self.starts.tolist(), self.depths.tolist(), self.before.tolist()
        for number, at in enumerate(before):
            tail = items[starts[number] : starts[number + 1]]
            if at < 0:
                yield list(tail)
                continue
            parts, stop = [tail], depths[number]
            while at >= 0:
                parts.append(items[starts[at] : starts[at] + stop - depths[at]])
                at, stop = before[at], depths[at]
            yield list(chain_up.from_iterable(reversed(parts)))


def tails_of(parents: Ids) -> Tails:
    """Each chain from its first row to a last one. The one whose last row comes first is the first.

    What comes behind a hole, or goes round in a circle, is left out. O(n log n), as array work.

    Args:
        parents: the row before each, ``int64[n]``. ``naming.NO_PARENT``: it begins a chain. Negative
            otherwise: there is a hole.
    """
    num_rows = len(parents)
    begin, hole = num_rows, num_rows + 1  # behind all rows, and each before itself
    before = np.append(
        np.where(parents >= 0, parents, np.where(parents == NO_PARENT, begin, hole)), [begin, hole]
    )
    depths = np.ones(num_rows + 2, dtype=np.int64)
    depths[num_rows:] = 0
    ends = np.arange(num_rows + 2)  # of rows: of the chains that they are in, the last row of the first
    is_parent = np.zeros(num_rows + 2, dtype=np.bool_)
    is_parent[before] = True
    ends[is_parent] = num_rows
    for _ in range(num_rows.bit_length() + 1):  # each time twice as far back
        if (before[:num_rows] >= num_rows).all():
            break
        np.minimum.at(ends, before, ends.copy())
        depths += depths[before]
        before = before[before]
    rows = np.flatnonzero(before[:num_rows] == begin)
    rows = rows[np.argsort(ends[rows] * (num_rows + 1) + depths[rows])]
    is_first = np.ones(len(rows), dtype=np.bool_)
    is_first[1:] = ends[rows[1:]] != ends[rows[:-1]]
    starts = np.flatnonzero(is_first)
    firsts = rows[starts]
    leaves = parents[firsts]
    of_ends = np.searchsorted(ends[firsts], ends[leaves])  # tails are in the order of their ends
    return Tails(
        rows,
        np.append(starts, len(rows)),
        depths[firsts] - 1,
        np.where(leaves >= 0, of_ends, -1),
    )
