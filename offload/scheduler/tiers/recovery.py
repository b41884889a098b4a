"""What a tier has kept: what all ranks agree on, and the chains that it makes up."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload.messages import SUFFIX_BYTES, Ids, Names, TierFacts
from offload.naming import NameIndex, as_bytes, keys_of
from offload.scheduler.tails import Tails, tails_of


class Agreed(NamedTuple):
    """Extents that every rank has which should, the oldest first.

    Attributes:
        places: of each, ``int64[n]``.
        generations: of what lies there, ``int64[n]``.
        names: ``uint8[n, 32]``.
        parents: the same.
        suffixes: ``uint8[n, 16]``.
    """

    places: Ids
    generations: Ids
    names: Names
    parents: Names
    suffixes: Names

    def rows(self, which: npt.NDArray[np.bool_] | Ids) -> "Agreed":
        """Those of them; or those at these places in it, in that order."""
        names, parents, suffixes = self.names[which], self.parents[which], self.suffixes[which]
        return Agreed(self.places[which], self.generations[which], names, parents, suffixes)


def agree(facts: Sequence[TierFacts], num_places: int) -> Agreed:
    """What all ranks have kept alike. O(places)."""
    tables = [_Table.of(fact, num_places) for fact in facts]
    teller: Ids = np.full(num_places, -1, dtype=np.int64)  # who was asked first of each place
    is_equal = np.ones(num_places, dtype=np.bool_)
    for number, table in enumerate(tables):
        for other in range(number):
            asked = np.flatnonzero(table.is_theirs & (teller == other))
            is_equal[asked] &= table.is_same(tables[other], asked)
        teller[table.is_theirs & (teller < 0)] = number
    parts = [np.flatnonzero(is_equal & (teller == number)) for number in range(len(tables))]
    parts = [part[table.rows[part] >= 0] for table, part in zip(tables, parts, strict=True)]
    told = [table.told(part) for table, part in zip(tables, parts, strict=True)]
    found = Agreed(*(np.concatenate(column) for column in zip(*told, strict=True)))
    return found.rows(np.argsort(found.generations, kind="stable"))


def chains(agreed: Agreed) -> "Chains":
    """What makes up chains, from their first extents on, the one of the oldest last first.

    What comes after a hole is left out. Of several extents of one name the newest counts. O(n log n), as
    array work.
    """
    keys = keys_of(agreed.names)[::-1]
    newest = np.sort(len(keys) - 1 - np.unique(keys, return_index=True)[1])
    agreed = agreed if len(newest) == len(keys) else agreed.rows(newest)
    tails = tails_of(NameIndex(agreed.names).find(agreed.parents))
    return Chains(agreed.rows(tails.rows), tails)


class Chains(NamedTuple):
    """Extents in chain order.

    Attributes:
        extents: tail by tail.
        tails: which of them make up chains.
    """

    extents: Agreed
    tails: Tails

    def names(self) -> Iterator[list[bytes]]:
        """Those of each chain, with what it has in common with those before it."""
        return self.tails.wholes(as_bytes(self.extents.names))


class _Table(NamedTuple):
    """What a rank tells, by place.

    Attributes:
        fact: all of it.
        suffixes: of its extents, ``uint8[n, 16]``.
        is_theirs: whether it is asked about that place, ``bool[num_places]``.
        rows: where what it tells of a place is; -1: it has nothing there.
    """

    fact: TierFacts
    suffixes: Names
    is_theirs: npt.NDArray[np.bool_]
    rows: Ids

    @classmethod
    def of(cls, fact: TierFacts, num_places: int) -> "_Table":
        """O(places)."""
        rows: Ids = np.full(num_places, -1, dtype=np.int64)
        there = np.flatnonzero((fact.places < num_places) & (fact.generations > 0))
        rows[fact.places[there]] = there
        suffixes = fact.suffixes
        if suffixes is None:
            suffixes = np.zeros((len(fact.places), SUFFIX_BYTES), dtype=np.uint8)
        return cls(fact, suffixes, np.arange(num_places) % fact.num_parts == fact.part, rows)

    def is_same(self, other: "_Table", places: Ids) -> npt.NDArray[np.bool_]:
        """Whether both tell the same of each of these places."""
        mine, theirs = self.rows[places], other.rows[places]
        is_told = (mine >= 0) & (theirs >= 0)
        mine, theirs = mine[is_told], theirs[is_told]
        is_same = np.ones(len(mine), dtype=np.bool_)
        for ours, others in (
            (self.fact.generations, other.fact.generations),
            (self.fact.num_slots, other.fact.num_slots),
            (self.fact.names, other.fact.names),
            (self.fact.parents, other.fact.parents),
            (self.suffixes, other.suffixes),
        ):
            is_equal = ours[mine] == others[theirs]
            is_same &= is_equal if is_equal.ndim == 1 else is_equal.all(axis=1)
        is_told[is_told] = is_same
        return is_told

    def told(self, places: Ids) -> Agreed:
        """What it tells of these, which it has."""
        fact, rows = self.fact, self.rows[places]
        return Agreed(
            places, fact.generations[rows], fact.names[rows], fact.parents[rows], self.suffixes[rows]
        )
