"""What one request wants of peers, how far that has come, and how long it waits for more."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from offload.peer_messages import PeerLife, Unused
from offload.scheduler.costs import PrefillCost
from offload.scheduler.engine import Request
from offload.scheduler.tiers.names import name_of
from offload.transfer_params import KVTransferParams, tip_of

EXPECTED = 2.0
"""Whoever expects a prompt that a peer has just been sent waits that many times as long as computing takes:
the peer computes it no faster, and begins no earlier."""


@dataclass(slots=True, eq=False)
class PeerWish:
    """What a request wants of peers. Numbers count positions of its chain.

    Attributes:
        request: whose it is.
        chain: its prefix hashes, as far as it may use what has them.
        sought: as far as somebody may have them.
        life: the peer that is said to have it; None: nobody says, all are asked.
        goal: that are said to be there in the end; 0: whatever there is.
        tip: how the peer's lease is called, if there is one: by the last position that it has.
        factor: how many times as long as computing takes it waits for progress.
        first: that the GPU has.
        there: that the GPU or the pool had at the last look.
        known: that were found at a peer by the last answer.
        answered_at: when that came; ``-inf``: none has.
        asked_at: when it asked last; ``-inf``: it has not.
        best: the most that ever were there, or known.
        tried: the most that were begun to be fetched.
        behind: that were there then.
        since: when there was progress, or it began to wait.
        gap: the longest time from one progress to the next one: so long takes the peer for a chunk.
        until: it waits for progress no longer than that.
        due: when it is to be looked at again though nothing has changed.
        seen: changes at the last look.
        is_coming: what is behind ``there`` is on its way into the pool.
        is_blocked: fetches of others leave no room for it.
        is_worth: it was found to pay.
        has_asked: its turn has come: it waits, and for nothing else.
        reason: why nothing more is fetched.
    """

    request: Request
    chain: Sequence[bytes]
    sought: Sequence[bytes]
    life: PeerLife | None = None
    goal: int = 0
    tip: bytes = b""
    factor: float = 1.0
    first: int = 0
    there: int = 0
    known: int = 0
    answered_at: float = -inf
    asked_at: float = -inf
    best: int = 0
    tried: int = -1
    behind: int = -1
    since: float = 0.0
    gap: float = 0.0
    until: float = inf
    due: float = 0.0
    seen: int = -1
    is_coming: bool = False
    is_blocked: bool = False
    is_worth: bool = False
    has_asked: bool = False
    reason: str = ""

    @property
    def target(self) -> int:
        """Up to where it is to come."""
        return self.goal or self.known

    @property
    def grows(self) -> bool:
        """Whether the peer is said to have more soon than it had by the last answer."""
        return self.known < self.goal and not self.reason

    @property
    def is_done(self) -> bool:
        """Whether all of it is there."""
        return 0 < self.target <= self.there

    def seconds(self, prefill: PrefillCost, block_size: int, least: float) -> float:
        """How long it waits for progress: as long as it takes to compute what is missing.

        A peer that takes longer for each chunk is given that time, as long as all of it could be computed in.
        """
        first, there, stop = (each * block_size for each in (self.first, self.there, self.target))
        pace = min(self.gap, prefill.expected(first, stop))
        return max(self.factor * max(prefill.expected(there, stop), pace), least)

    def forget_reference(self) -> None:
        """What was said of a peer is void: nobody says anything."""
        self.life, self.goal, self.tip, self.factor, self.reason = None, 0, b"", 1.0, ""
        self.sought, self.known, self.answered_at, self.asked_at = self.chain, 0, -inf, -inf


def wish_of(
    request: Request, chain: Sequence[bytes], limit: int, params: KVTransferParams, block_size: int
) -> PeerWish:
    """What a request wants, by the first ``limit`` positions of its chain and what was said of them.

    A reference to another prompt is none, and the reason says so: names decide what is fetched.
    """
    wish = PeerWish(request, (own := chain[:limit]), own)
    if params.peer is None:
        return wish
    goal, tip = limit, params.tip
    if params.tokens is not None:
        goal = params.tokens // block_size
        if tip is not None and not (0 < goal <= len(chain) and tip_of(chain[goal - 1]) == tip):
            wish.reason = Unused.OTHER_PROMPT
            return wish
    last, goal = min(goal, len(chain)), min(goal, limit)
    if goal:
        wish.sought = own[:goal]
        wish.life, wish.goal = PeerLife(params.peer, params.epoch or ""), goal
        wish.factor = EXPECTED if tip is None else 1.0
        wish.tip = name_of(chain[last - 1])
    return wish
