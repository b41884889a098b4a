"""Hazards of few counts: mixed with what is believed without them. And what endings foretell by these."""

from typing import NamedTuple

import numpy as np

from evictor.ages import NUM_AGES, Ages, Floats
from evictor.kinds import NUM_ENDINGS, NUM_GAPS, NUM_USES

_PRIOR_HAZARD = 0.15  # from half a capacity, or 4 s, to twice that, and so on; even below: the order of LRU
_NO_CHANCE = 1e-6  # the least that is foretold, and the most is as far from 1


class Foretold(NamedTuple):
    """By ending, and for 0 whatever it was: logarithms by age, of hazards and of what they leave alive."""

    hazard: Floats
    alive: Floats


def prior_of(ages: Ages) -> Floats:
    """Hazards where nothing is known."""
    prior: Floats = _PRIOR_HAZARD * np.minimum(1.0, ages.widths / ages.starts[3])
    return prior


def shrunk(hits: Floats, at_risk: Floats, towards: Floats, weight: float) -> Floats:
    """Hazards, mixed with what is believed without these counts; ``weight`` in positions."""
    weight = max(weight, 1.0)
    return np.minimum((hits + weight * towards) / (at_risk + weight), 1.0)


def by_turn(hits: Floats, at_risk: Floats, towards: Floats, weight: float) -> Floats:
    """Hazards of books by turn, or by ending; mixed with those of all gaps, and of all uses."""
    shape = NUM_ENDINGS, NUM_GAPS, NUM_USES, NUM_AGES
    hits, at_risk = hits.reshape(shape), at_risk.reshape(shape)
    for axes in ((1, 2), (1,), ()):
        towards = shrunk(hits.sum(axes, keepdims=True), at_risk.sum(axes, keepdims=True), towards, weight)
    return towards


def foretold(hits: Floats, at_risk: Floats, towards: Floats, weight: float) -> Foretold:
    """What books by ending say by how an answer ended, and what they say whatever that was."""
    shape = NUM_ENDINGS, NUM_GAPS * NUM_USES, NUM_AGES
    hits, at_risk = hits.reshape(shape).sum(1), at_risk.reshape(shape).sum(1)
    all_hits, all_risk = hits.sum(0), at_risk.sum(0)
    pooled = shrunk(all_hits, all_risk, towards, weight)
    apart = shrunk(hits, at_risk, pooled, weight)
    apart[0] = shrunk(all_hits, all_risk, pooled, weight)  # as one ending that all have in common
    apart = np.clip(apart, _NO_CHANCE, 1 - _NO_CHANCE)
    alive = np.zeros_like(apart)
    np.cumsum(np.log1p(-apart[:, :-1]), axis=1, out=alive[:, 1:])
    return Foretold(np.log(apart), alive)
