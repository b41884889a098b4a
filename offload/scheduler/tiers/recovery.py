"""What a tier has kept: what all ranks agree on, and the chains that it makes up."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload.messages import NAME_BYTES, SUFFIX_BYTES, Ids, Names, TierFacts
from offload.naming import ROOT


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

    def rows(self, which: npt.NDArray[np.bool_]) -> "Agreed":
        """Those of them."""
        names, parents, suffixes = self.names[which], self.parents[which], self.suffixes[which]
        return Agreed(self.places[which], self.generations[which], names, parents, suffixes)


def agree(facts: Sequence[TierFacts], num_places: int) -> Agreed:
    """What all ranks have kept alike. O(places)."""
    generations, sizes = np.zeros((2, num_places), dtype=np.int64)
    labels = np.zeros((num_places, 2 * NAME_BYTES + SUFFIX_BYTES), dtype=np.uint8)
    num_told = np.zeros(num_places, dtype=np.int32)
    is_equal = np.ones(num_places, dtype=np.bool_)
    for fact in facts:
        is_there = fact.places < num_places
        places = fact.places[is_there]
        theirs, slots = np.zeros((2, num_places), dtype=np.int64)
        theirs[places], slots[places] = fact.generations[is_there], fact.num_slots[is_there]
        named = np.zeros_like(labels)
        suffixes = fact.suffixes
        if suffixes is None:
            suffixes = np.zeros((len(fact.places), SUFFIX_BYTES), dtype=np.uint8)
        named[places] = np.concatenate([fact.names, fact.parents, suffixes], axis=1)[is_there]
        is_theirs = np.arange(num_places) % fact.num_parts == fact.part
        is_first = is_theirs & (num_told == 0)
        generations[is_first], labels[is_first] = theirs[is_first], named[is_first]
        sizes[is_first] = slots[is_first]
        is_same = (generations == theirs) & (sizes == slots) & (labels == named).all(axis=1)
        is_equal &= ~is_theirs | is_same
        num_told += is_theirs
    found = np.flatnonzero(is_equal & (num_told > 0) & (generations > 0))
    found = found[np.argsort(generations[found], kind="stable")]
    names, parents, suffixes = np.hsplit(labels[found], [NAME_BYTES, 2 * NAME_BYTES])
    return Agreed(found, generations[found], names, parents, suffixes)


def chains(agreed: Agreed) -> Iterator[tuple[list[bytes], list[int]]]:
    """Names and places of each chain, from its first extent to a last one, the one of the oldest last first.

    What comes after a hole is left out. Beginnings that chains share come with each. Of several extents of
    one name the newest counts.
    """
    names, parents = _as_bytes(agreed.names), _as_bytes(agreed.parents)
    places = dict(zip(names, agreed.places.tolist(), strict=True))
    before = dict(zip(names, parents, strict=True))
    ends = dict.fromkeys(names)
    for parent in parents:
        ends.pop(parent, None)
    for end in ends:
        chain, name, seen = [], end, set[bytes]()
        while name in before and name not in seen:
            seen.add(name)
            chain.append(name)
            name = before[name]
        if name == ROOT:
            chain.reverse()
            yield chain, [places[each] for each in chain]


def _as_bytes(names: Names) -> list[bytes]:
    content = names.tobytes()
    return [content[at : at + NAME_BYTES] for at in range(0, len(content), NAME_BYTES)]
