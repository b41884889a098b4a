"""Explains why KV of a prompt was not found, by what is remembered at that moment."""

from collections.abc import Sequence
from typing import Any

from allocator import Cause, CpuOffloadingBlockAllocator
from offload.scheduler.engine import Engine, Request
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import Why
from offload.scheduler.why.note import Note
from offload.scheduler.why.prompts import Prompts
from offload.scheduler.why.reasons import Missing, Reason

_BY_OFFER = {
    Why.UNWANTED: Reason.UNWANTED,
    Why.RELOADING: Reason.RELOADING,
    Why.FAILED: Reason.FAILED,
    Why.DROPPING: Reason.DROPPING,
    Why.REFUSED: Reason.REFUSED,
    Why.PAUSED: Reason.PAUSED,
    Why.STUCK: Reason.STUCK,
    Why.COMPUTED: Reason.CHEAPER,
    Why.PART: Reason.CHEAPER,
    Why.OFF: Reason.OFF,
}
_BY_CAUSE = {
    Cause.EVICTED: Reason.EVICTED,
    Cause.DROPPED: Reason.DROPPED,
    Cause.SHRUNK: Reason.SHRUNK,
    Cause.UNSTORED: Reason.ONLY_ON_GPU,
}
_FOUND = (
    Why.RESIDENT,
    Why.ABSENT,
    Why.GPU_HAS_ALL,
    Why.COMING,
    Why.QUEUED,
    Why.FOLLOWING,
    Why.ASIDE,
)
"""Offers that say nothing of what is behind them."""


class Absence:
    """Says of the first position of a prompt that was not found why it was not.

    What it says is true where it says it: it compares prefix hashes, and knows what left the pool last. Where
    it has forgotten what it takes, the reason is ``UNSEEN`` or ``UNKNOWN``.

    Attributes:
        reset_at: when the pool was reset last; None: never.
    """

    def __init__(
        self,
        allocator: CpuOffloadingBlockAllocator,
        engine: Engine,
        prompts: Prompts,
        block_size: int,
        *,
        has_below: bool,
    ) -> None:
        """Over what is remembered of departures, in ``allocator``, and of ``prompts``.

        ``has_below``: tiers or peers may have what the pool lacks.
        """
        self._allocator = allocator
        self._engine = engine
        self._prompts = prompts
        self._block_size = block_size
        self._has_below = has_below
        self.reset_at: float | None = None

    def explain(self, note: Note, request: Request, hints: RequestHints) -> Missing | None:
        """Why no more was found of a request that is given blocks for the first time. O(log n).

        None: nothing is missing, or less than a block.
        """
        size, chain = self._block_size, self._engine.chain(request)
        num_full = min(note.num_prompt // size, len(chain))
        position = (note.num_local + note.num_planned) // size
        if position >= num_full:
            return None
        missing = self._why(note, request, hints, position, num_full)
        return missing._replace(from_token=position * size, num_tokens=(num_full - position) * size)

    # Private: all but where it is

    def _why(
        self, note: Note, request: Request, hints: RequestHints, position: int, num_full: int
    ) -> Missing:
        chain, offer = self._engine.chain(request), note.offer
        known = self._allocator.known_depth(chain, num_full)
        if position < known and self._allocator.hollow.lacking(chain, position, position + 1)[0]:
            known = position  # only the GPU had it
        if request.skip_reading_prefix_cache:
            return _reason(Reason.READS_NONE)
        if offer is not None and offer.why not in _FOUND and (known > position or self._has_below):
            return _reason(_BY_OFFER[offer.why])
        if offer is not None and offer.tokens and note.num_planned < offer.tokens:
            return _reason(Reason.TRIMMED)
        is_last = position == num_full - 1 and num_full * self._block_size == request.num_prompt_tokens
        if is_last and (known > position or note.has_last):
            return _reason(Reason.LAST_TOKEN)
        if known > position:
            return _reason(self._why_known(note, hints, chain, position))
        if note.unfetched is not None and note.unfetched[1] > position:
            place, _, why = note.unfetched
            return _reason(Reason.NOT_FETCHED, place=place, detail=why)
        return self._why_absent(note, chain, position)

    def _why_known(self, note: Note, hints: RequestHints, chain: Sequence[bytes], position: int) -> Reason:
        """The pool has that position, or will have it."""
        resident, most = self._allocator.hollow.depth(chain), hints.max_load_tokens
        if resident <= position:
            return Reason.ON_ITS_WAY
        if resident - self._engine.drafts.num_volatile_blocks <= position:
            return Reason.DRAFTS
        if most is not None and note.num_local + most < (position + 1) * self._block_size:
            return Reason.LIMIT
        return Reason.NO_CHECKPOINT if self._engine.groups.has_bags else Reason.NO_ROOM

    def _why_absent(self, note: Note, chain: Sequence[bytes], position: int) -> Missing:
        """No place has that position."""
        left = self._allocator.departures.of(chain[position])
        sharer, neighbour = self._prompts.find(chain, position)
        if left is not None and (sharer is None or _began(sharer) <= left.at):
            lost = _lost(sharer, position) if sharer and left.cause is Cause.UNSTORED else None
            return lost or _reason(_BY_CAUSE[left.cause], at=left.at, whom=left.whom)
        if sharer is not None:
            return self._why_lost(sharer, position)
        if neighbour is not None:
            has_more = neighbour.chain is not None and len(neighbour.chain) > position
            return _reason(Reason.DIFFERS if has_more else Reason.ENDS_BEFORE, by=neighbour.request_id)
        same = None if position else self._prompts.same_tokens(note.origin)
        return _reason(Reason.UNSEEN) if same is None else _why_apart(note, same)

    def _why_lost(self, sharer: Note, position: int) -> Missing:
        """That request has that position, or had it, and no place does."""
        by = sharer.request_id
        if self.reset_at is not None and _began(sharer) < self.reset_at:
            return _reason(Reason.RESET, at=self.reset_at, by=by)
        without = Reason.COMPUTING if sharer.ended is None else Reason.UNKNOWN
        return _lost(sharer, position) or _reason(without, by=by)


def _lost(sharer: Note, position: int) -> Missing | None:
    """Why that request's KV there was not stored; None: no reason is known."""
    for why, first in sharer.lost.items():
        if first <= position:
            return _reason(Reason.NEVER_STORED, by=sharer.request_id, detail=why)
    return None


def _why_apart(note: Note, same: Note) -> Missing:
    """Another request began with the same tokens, and nobody had the same first position."""
    own, others = note.origin, same.origin
    assert own is not None and others is not None, f"{note} and {same} began with the same tokens"
    if own.salt != others.salt:
        return _reason(Reason.SALT, by=same.request_id)
    if own.adapter != others.adapter:
        return _reason(Reason.ADAPTER, by=same.request_id)
    return _reason(Reason.INPUTS, by=same.request_id)


def _began(note: Note) -> float:
    return note.arrived if note.admitted is None else note.admitted


def _reason(reason: Reason, **more: Any) -> Missing:
    return Missing(0, 0, reason, **more)
