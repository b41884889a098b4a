"""What is noted of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.messages import Order
from offload.scheduler.engine import Origin
from offload.scheduler.offer import Offer
from offload.scheduler.why.reasons import OF_OTHERS, WHY_UNSTORED, Missing, Reason

MOST_NOTES = 10_000
"""Requests that are over, and remembered: some 10 MB."""
_MOST_CHARACTERS = 320
"""Of an id that a client may have chosen. Who asks gives less of it."""
GPU, POOL, COMPUTED = "gpu", "pool", "computed"
"""Sources of tokens; others are tiers, and peers by their ids."""


@dataclass(slots=True, eq=False)
class Note:
    """One request, from its arrival on. Times are seconds by the engine's clock; numbers count tokens.

    Attributes:
        request_id: the engine's own id, its beginning if it is long.
        arrived: when.
        first_job: the first job that could be opened after that.
        admitted: when it had blocks for the first time; None: not yet.
        ended: when it was over; None: it is not.
        state: how it ended.
        num_prompt: of its prompt.
        num_answer: of its answer.
        asked_local: that the GPU had when it asked first; -1: it has not.
        num_local: that the GPU had when it was admitted.
        has_last: the GPU had all of its prompt when it asked last, which ends with a full block.
        num_planned: that it was to be given beside then.
        restored: that came, by source.
        num_again: that it was given back, by any cache, after preemptions.
        num_admissions: how often it was given blocks.
        offer: the last that it was made.
        held_since: since when it is told to ask again; None: it is not.
        is_aside: that is so that others go first; not for KV.
        held: seconds that it was told so for KV.
        aside: seconds that others went first.
        opened: when a restore for it began; None: none is under way.
        order: what that copies.
        restoring: seconds that restores for it took.
        gain: seconds saved, by estimate, or lost if it is negative; None: not known.
        missing: what was not found of its prompt.
        unfetched: what a place below the pool has of it that was not fetched: place, positions, why.
        lost: why from which position on its blocks were not stored; shared with the backlog.
        hand_off: what became of the hand-off that was asked for; "" if none was.
        wants_report: its client asks for a report.
        chain: its prefix hashes; None: forgotten, or never noted.
        num_charged: of these, that count as remembered.
        marks: of these, those that it is filed under.
        origin: what its prompt begins with.
    """

    request_id: str
    arrived: float
    first_job: int
    admitted: float | None = None
    ended: float | None = None
    state: str = "waits"
    num_prompt: int = 0
    num_answer: int = 0
    asked_local: int = -1
    num_local: int = 0
    has_last: bool = False
    num_planned: int = 0
    restored: dict[str, int] = field(default_factory=dict)
    num_again: int = 0
    num_admissions: int = 0
    offer: Offer | None = None
    held_since: float | None = None
    is_aside: bool = False
    held: float = 0.0
    aside: float = 0.0
    opened: float | None = None
    order: Order | None = None
    restoring: float = 0.0
    gain: float | None = None
    missing: tuple[Missing, ...] = ()
    unfetched: tuple[str, int, str] | None = None
    lost: dict[str, int] = field(default_factory=dict)
    hand_off: str = ""
    wants_report: bool = False
    chain: Sequence[bytes] | None = None
    num_charged: int = 0
    marks: list[bytes] = field(default_factory=list)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        self.request_id = name_of(self.request_id)

    @property
    def num_restored(self) -> int:
        """That came from the pool and below."""
        return sum(self.restored.values())

    def tokens(self) -> dict[str, int]:
        """Of the prompt, by source."""
        if self.admitted is None:
            return {}
        found = {GPU: self.num_local, **self.restored}
        return {**found, COMPUTED: max(0, self.num_prompt - sum(found.values()))}

    def told(self, now: float) -> dict[str, Any]:
        """For operators, with JSON's types. ``now``: by the engine's clock."""
        return {
            "request": self.request_id,
            "state": self.state,
            "arrived_seconds_ago": round(now - self.arrived, 3),
            "prompt_tokens": self.num_prompt,
            "answer_tokens": self.num_answer,
            "tokens": self.tokens(),
            "again_tokens": self.num_again,
            "preemptions": max(0, self.num_admissions - 1),
            **self._seconds(),
            "missing": [
                {
                    "from_token": each.from_token,
                    "tokens": each.num_tokens,
                    "reason": str(each.reason),
                    "text": each.text(self.admitted or now),
                    "request": each.whom or each.by,
                }
                for each in self.missing
            ],
            "unstored": {WHY_UNSTORED[why]: position for why, position in dict(self.lost).items()},
            "hand_off": self.hand_off,
        }

    def report(self) -> Mapping[str, Any]:
        """For its client: nothing that says what other clients have sent."""
        return {
            "tokens": self.tokens(),
            **self._seconds(),
            "missing": [
                {
                    "from_token": each.from_token,
                    "tokens": each.num_tokens,
                    "reason": str(Reason.UNSEEN if each.reason in OF_OTHERS else each.reason),
                }
                for each in self.missing
            ],
        }

    def _seconds(self) -> dict[str, float | None]:
        return {
            "held_seconds": round(self.held, 6),
            "restoring_seconds": round(self.restoring, 6),
            "aside_seconds": round(self.aside, 6),
            "saved_seconds": None if self.gain is None else round(self.gain, 6),
        }


def name_of(request_id: str) -> str:
    """How a request is called in what is remembered: a client may have chosen an id of any length."""
    return request_id[:_MOST_CHARACTERS]
