"""Hazards of few counts: mixed with what is believed without them."""

import numpy as np

from evictor.ages import NUM_AGES, Ages, Floats
from evictor.kinds import NUM_ENDINGS, NUM_GAPS, NUM_USES

_PRIOR_HAZARD = 0.15  # from half a capacity, or 4 s, to twice that, and so on; even below: the order of LRU


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
