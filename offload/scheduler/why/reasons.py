"""Why a part of a prompt was not found: reasons, and what they mean."""

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why KV of a prompt was computed that could have been found. The values are for machines."""

    UNWANTED = "hint"
    RELOADING = "adapter_reloads"
    FAILED = "restore_failed"
    DROPPING = "restore_failed_before"
    REFUSED = "no_gpu_blocks"
    PAUSED = "paused"
    STUCK = "restores_hang"
    CHEAPER = "cheaper_to_compute"
    OFF = "restores_off"
    READS_NONE = "reads_no_cache"
    LAST_TOKEN = "last_token"
    LIMIT = "limit"
    TRIMMED = "scheduler_took_less"
    NO_CHECKPOINT = "no_checkpoint"
    NO_ROOM = "gpu_cache_too_small"
    DRAFTS = "draft_layers"
    ON_ITS_WAY = "on_its_way"
    NOT_FETCHED = "not_fetched"
    EVICTED = "evicted"
    DROPPED = "dropped"
    SHRUNK = "pool_shrunk"
    ONLY_ON_GPU = "only_on_gpu"
    RESET = "reset"
    NEVER_STORED = "never_stored"
    COMPUTING = "being_computed"
    ENDS_BEFORE = "new"
    DIFFERS = "hash_differs"
    SALT = "salt"
    ADAPTER = "adapter"
    INPUTS = "inputs"
    UNSEEN = "unseen"
    UNKNOWN = "unknown"


TEXTS = {
    Reason.UNWANTED: "its client asked for no restore",
    Reason.RELOADING: "its adapter was being loaded again",
    Reason.FAILED: "a restore for it failed",
    Reason.DROPPING: "slots of another restore that failed were yet to be dropped",
    Reason.REFUSED: "the scheduler kept the GPU blocks that a restore would have taken",
    Reason.PAUSED: "restores were paused after faults",
    Reason.STUCK: "restores that hang held too many GPU blocks",
    Reason.CHEAPER: "to compute it was over sooner than to load it",
    Reason.OFF: "the configuration restores nothing",
    Reason.READS_NONE: "it reads no prefix cache, as with prompt_logprobs",
    Reason.LAST_TOKEN: "the last token of a prompt is computed in any case",
    Reason.LIMIT: "max_load_tokens allowed no more",
    Reason.TRIMMED: "vLLM's scheduler took less than was offered",
    Reason.NO_CHECKPOINT: "the pool has it, and no checkpoint there to go on from",
    Reason.NO_ROOM: "the pool has it, and the GPU has too few blocks for a restore",
    Reason.DRAFTS: "draft layers have the end of what is found computed again",
    Reason.ON_ITS_WAY: "it was still on its way into the pool",
    Reason.NOT_FETCHED: "{place} has it, or should have, and it was not fetched: {detail}",
    Reason.EVICTED: "it was evicted from the pool {ago} before{whom}",
    Reason.DROPPED: "it left the pool {ago} before: bad bytes, adapter loaded again or no checkpoint behind",
    Reason.SHRUNK: "it left the pool {ago} before, as the pool was made smaller",
    Reason.ONLY_ON_GPU: "the GPU lost it {ago} before, and the pool had no copy then, or none any more",
    Reason.RESET: "the pool was reset since {by} had it",
    Reason.NEVER_STORED: "{by} was the last to have it, and it was not stored: {detail}",
    Reason.COMPUTING: "{by}, which had not ended, was to compute it, too",
    Reason.ENDS_BEFORE: "it is new: {by} has the same up to there, and ends there",
    Reason.DIFFERS: "its hash differs from that of {by} from there on, and is the same before",
    Reason.SALT: "{by} began with the same tokens and another cache_salt",
    Reason.ADAPTER: "{by} began with the same tokens and another adapter",
    Reason.INPUTS: "{by} began with the same tokens, and with other inputs beside them",
    Reason.UNSEEN: "none of the requests that are remembered had it",
    Reason.UNKNOWN: "{by} had it; how it was lost is not remembered",
}

WHY_UNSTORED = {
    "hint": "its client asked for no store, or for fewer tokens",
    "adapter": "its adapter was being loaded again",
    "session": "streaming sessions are not stored",
    "gave_way": "requests needed its GPU blocks",
    "not_admitted": "others in the pool are worth more",
    "cut_off": "what is before it had left the pool",
    "outage": "its store failed, or stores were paused",
    "overdue": "it waited too long for its turn",
    "reset": "the cache was reset",
    "unreturned": "such answers do not come back",
    "answers": "answers are not stored",
    "aborted": "it was aborted or failed before it was stored",
}
"""By the names that metrics of blocks which are not stored have, and some more."""


class Unfetched(StrEnum):
    """Why what a tier has of a prompt was not fetched, or not all of it."""

    CHEAPER = "cheaper to compute, by what was measured, or as it is short"
    NO_ROOM = "the pool had no room for it"
    FELL_SHORT = "a fetch of it fell short"
    PAUSED = "fetches were paused after faults"


class Missing(NamedTuple):
    """A part of a prompt that was not found.

    Attributes:
        from_token: where it begins.
        num_tokens: of it, in full blocks.
        reason: why.
        at: when what explains it happened, by the engine's clock; None: that has no time.
        by: the request that it is compared with; "" without one.
        whom: the request that it was evicted for; "" if that is not known.
        detail: more of the reason.
        place: below the pool that it is about.
    """

    from_token: int
    num_tokens: int
    reason: Reason
    at: float | None = None
    by: str = ""
    whom: str = ""
    detail: str = ""
    place: str = ""

    def text(self, noted_at: float) -> str:
        """For people. ``noted_at``: when it was found to be missing."""
        ago = "" if self.at is None else f"{max(0.0, noted_at - self.at):.1f} s"
        detail = WHY_UNSTORED.get(self.detail, self.detail.replace("_", " "))
        whom = f", for {self.whom}" if self.whom else ""
        by = self.by or "another request"
        return TEXTS[self.reason].format(ago=ago, whom=whom, by=by, detail=detail, place=self.place)


OF_OTHERS = frozenset({Reason.SALT, Reason.ADAPTER, Reason.INPUTS, Reason.DIFFERS, Reason.ENDS_BEFORE})
"""They say how prompts of others begin. Clients are told ``UNSEEN``: salts keep them apart."""
