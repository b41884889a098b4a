"""Whether a restore is made: all of it, a part of it, or none, by what was measured. Pure arithmetic."""

from enum import StrEnum
from math import inf
from typing import NamedTuple

from offload.scheduler.costs import LinkCost, PrefillCost

WORTH = 1 / 16
"""A part of a restore saves that share of its request's prefill at least."""
SLOWEST = 4.0
"""What takes so many times as long to load as to compute is computed: a link like that saves a fifth of the
prefill at most, and who waits for it is late."""

HELD_UP = 0.3
"""Each answer that comes meanwhile waits for that part of a prefill, which is computed in the same steps. Who
comes meanwhile waits for as much of a load on the link."""


class Verdict(StrEnum):
    """What is made of a restore, and why. Counted by these names."""

    LOADED = "loaded"
    """Loading all of it is over sooner."""
    PART = "part"
    """So much is loaded as comes while others are computed."""
    COMPUTED = "computed"
    """Computing it is over sooner."""
    TRIED = "tried"
    """A little is loaded so that the link's speed is known."""
    UNMEASURED = "unmeasured"
    """All is loaded, as the costs are not known."""
    FETCHED = "fetched"
    """All is loaded, as it is on its way from below the pool."""
    ASKED = "asked"
    """All is loaded, as its client wants that."""
    ALWAYS = "always"
    """All is loaded, as the configuration says."""


class Prospect(NamedTuple):
    """What a request may have, and what else waits.

    Attributes:
        first: leading tokens that the GPU has.
        stop: leading tokens that there would be after the whole restore.
        num_tokens: of the request.
        token_bytes: that a restored token moves.
        fixed_bytes: that a restore moves beside.
        queue: seconds until the link is free.
        backlog: seconds of prefill of all others that wait for the GPU or are computed.
        patience: seconds that it may wait longer than it takes to compute it.
        num_restoring: others that are being restored or wait for the link, and will be answered then.
    """

    first: int
    stop: int
    num_tokens: int
    token_bytes: float
    fixed_bytes: float = 0.0
    queue: float = 0.0
    backlog: float = 0.0
    patience: float = 0.0
    num_restoring: int = 0

    @property
    def num_bytes(self) -> int:
        """That the whole restore moves."""
        return int((self.stop - self.first) * self.token_bytes + self.fixed_bytes)


class Choice(NamedTuple):
    """What was decided: up to which token is loaded, why, and seconds as expected of both ways.

    Attributes:
        stop: leading tokens that there are after the restore; ``Prospect.first`` without one.
        verdict: why.
        load_seconds: from now until all of it is loaded and the rest computed; 0: not known.
        compute_seconds: until all of it is computed; 0: not known.
    """

    stop: int
    verdict: Verdict
    load_seconds: float = 0.0
    compute_seconds: float = 0.0


def choose(prefill: PrefillCost, link: LinkCost, prospect: Prospect) -> Choice:
    """What is over first, for the request and those behind it.

    A load leaves the GPU to others, a prefill does not. So loading may take as long as it takes to compute
    the request and all others that are there: until then nobody misses the GPU's time. It may take longer by
    what a prefill holds up answers that come meanwhile, beyond what a load holds up. But where the link is
    the slower of both, no request is to be answered much later for that than others are.

    If all of it takes longer, a part is loaded, of which the same is true. Within one request more than that
    never pays: what is loaded are its first tokens, which are the cheapest to compute. So the time is a
    concave function of how many these are, and least at an end.

    O(log tokens).
    """
    first, stop = prospect.first, prospect.stop
    if not (prefill.is_known and link.is_known):
        return Choice(stop, Verdict.UNMEASURED)
    own_load, own_compute = link.seconds(prospect.num_bytes), prefill.seconds(first, stop)
    rest = prefill.seconds(stop, prospect.num_tokens)
    load, compute = prospect.queue + own_load + rest, own_compute + rest
    if own_load < own_compute:
        spare = prospect.backlog + HELD_UP * prospect.num_restoring * (own_compute - own_load)
    else:
        spare = min(prospect.backlog, prospect.patience)
    if own_load > SLOWEST * own_compute:
        return Choice(first, Verdict.COMPUTED, load, compute)
    if load <= compute + spare:
        return Choice(stop, Verdict.LOADED, load, compute)
    free = spare - prospect.queue - link.per_job - prospect.fixed_bytes * link.per_byte
    if free > 0:
        part = min(stop, first + int(free / (prospect.token_bytes * link.per_byte or inf)))
        if prefill.seconds(first, part) >= WORTH * compute:
            return Choice(part, Verdict.PART, load, compute)
    return Choice(first, Verdict.COMPUTED, load, compute)
