"""What the pool offers a waiting request, and why it is not more."""

from enum import StrEnum
from typing import NamedTuple


class Why(StrEnum):
    """Why an offer is what it is."""

    RESIDENT = "the pool has it"
    COMING = "another restore brings the next block"
    QUEUED = "restores under way keep the link busy, and fill over a third of the GPU's blocks"
    FOLLOWING = "it is on its way into the pool"
    GPU_HAS_ALL = "the GPU has all of its full blocks"
    ABSENT = "the pool has no more of it than the GPU"
    ASIDE = "others that lack little go first"
    UNWANTED = "its client asked for none"
    RELOADING = "its adapter is being loaded again"
    FAILED = "a restore for it has failed"
    DROPPING = "slots of a failed restore are yet to be dropped"
    REFUSED = "the scheduler keeps the blocks that a restore would take"
    PAUSED = "restores are paused after faults"
    STUCK = "restores that hang hold too many GPU blocks"
    COMPUTED = "computing it is over sooner than loading it"
    PART = "a part of it is loaded, and the rest is computed sooner"
    OFF = "the configuration restores nothing"


class Offer(NamedTuple):
    """What is there for a request.

    Attributes:
        tokens: behind those that the GPU has; None: ask again in the next step.
        why: there are so many.
        stop: leading chain positions that are resident, or on their way into the pool and may be followed.
    """

    tokens: int | None
    why: Why
    stop: int = 0


COMING = Offer(None, Why.COMING)
QUEUED = Offer(None, Why.QUEUED)
ASIDE = Offer(None, Why.ASIDE)
NOTHING = {why: Offer(0, why) for why in Why}
"""No tokens, by reason."""
