"""What the scheduler side and the worker side tell each other of peers. Plain data."""

from enum import StrEnum
from typing import NamedTuple

REMOVED = "removed"
"""The last state that is told of a peer."""


class PeerLife(NamedTuple):
    """A peer, from a start or a reset of its until the next one.

    Attributes:
        peer: its id: 16 hexadecimal digits, the same after a restart.
        epoch: names the life: 16 hexadecimal digits; "": whichever it is in.
    """

    peer: str
    epoch: str = ""


class PeerFacts(NamedTuple):
    """Workers to scheduler, now and then: how a peer stands to a rank. Counts are since the start.

    Attributes:
        rank: which one.
        address: of the peer's rank, as it was called.
        peer: its id, 16 hexadecimal digits; "": not known yet.
        epoch: of its life; the same.
        state: "connected", or what it is instead; ``REMOVED``: it is no peer any more.
        reason: why it is not connected; "" if it is.
        transport: how bytes come: "memory", "tcp", "tls" or "nixl"; "" if it is not connected.
        nbytes: of slots that it has brought, and that were right.
        seconds: that this took.
        gets: times that it was asked for slots.
        probes: times that it was asked for names.
        misses: extents that it was asked for and had not.
        errors: times that it failed, or that what it brought was wrong.
    """

    rank: int
    address: str
    peer: str
    epoch: str
    state: str
    reason: str
    transport: str
    nbytes: int
    seconds: float
    gets: int
    probes: int
    misses: int
    errors: int


MOST_ASKERS = 256
"""That are remembered on a rank, and told of; as many as can be connected at once."""


class AskerFacts(NamedTuple):
    """Workers to scheduler, now and then: one who fetches from a rank. Counts are since the start.

    Attributes:
        rank: which one.
        host: from where.
        peer: its id, 16 hexadecimal digits; "": it does not listen. All such of one host are told as one.
        connections: that it has now.
        questions: that it has asked.
        nbytes: of slots that were sent to it, or that it may have read on this machine.
        seconds: that sending them took.
        is_near: it reads them itself, on this machine.
    """

    rank: int
    host: str
    peer: str
    connections: int
    questions: int
    nbytes: int
    seconds: float
    is_near: bool


class Unused(StrEnum):
    """Why a prompt that another engine was said to have was not fetched, or not all of it."""

    UNKNOWN_PEER = "unknown_peer"
    """No peer of that id."""
    UNREACHABLE = "unreachable"
    """It is a peer, and there is no connection to it."""
    OLD_EPOCH = "old_epoch"
    """It was started again, or reset, since."""
    OTHER_WEIGHTS = "other_weights"
    """This engine was reset, and the new weights have no name."""
    OTHER_PROMPT = "other_prompt"
    """It was said of other tokens."""
    REFUSED = "refused"
    """That engine does not hand it off, or whoever asked it went away."""
    NOT_THERE = "not_there"
    """It had nothing of it."""
    TOO_SHORT = "too_short"
    """It had less of it than was said."""
    LATE = "late"
    """It would have been computed by then."""
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"
    """By what was measured, or as it is short."""
    NO_ROOM = "no_room"
    """The pool had no room for it."""
    FAILED = "failed"
    """A copy hung, or its bytes were wrong."""
