"""What is counted, and how it is described. How it is published is the engine's business."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from offload.messages import Route


class MetricSpec(NamedTuple):
    """A counter that only grows, or a gauge that shows the present; ``label``: one for each value of that."""

    name: str
    is_counter: bool
    description: str
    label: str = ""

    @property
    def by_route(self) -> bool:
        """Whether there is one for each route."""
        return self.label == ROUTE


ROUTE, REASON, PEER, SIZE = "route", "reason", "peer", "size"
"""Labels."""

METRICS = (
    MetricSpec("prompt_tokens", True, "Tokens of prompts that were admitted."),
    MetricSpec("local_tokens", True, "Of these, tokens whose KV the GPU had."),
    MetricSpec("restored_requests", True, "Requests that were given KV from the CPU pool."),
    MetricSpec("restored_tokens", True, "Tokens whose KV came from the CPU pool instead of a prefill."),
    MetricSpec(
        "restore_choices", True, "Requests by what was made of what the pool had for them.", label=REASON
    ),
    MetricSpec("loaded_bytes", True, "Bytes copied from the CPU pool to the GPU, all ranks."),
    MetricSpec("stored_bytes", True, "Bytes copied from the GPU to the CPU pool, all ranks."),
    MetricSpec("evicted_blocks", True, "Blocks evicted from the CPU pool for new ones."),
    MetricSpec("failed_jobs", True, "Loads and stores that failed; each costs a cache miss, nothing else."),
    MetricSpec("unstored_blocks_gave_way", True, "Full blocks not stored: requests needed their GPU blocks."),
    MetricSpec("unstored_blocks_not_admitted", True, "Full blocks not stored: others are worth more."),
    MetricSpec(
        "unstored_blocks_cut_off", True, "Full blocks not stored: what is before them has left the pool."
    ),
    MetricSpec("unstored_blocks_outage", True, "Full blocks not stored: stores failed or hung."),
    MetricSpec("unstored_blocks_overdue", True, "Full blocks not stored: they waited too long."),
    MetricSpec("unstored_blocks_reset", True, "Full blocks not stored: the cache was reset."),
    MetricSpec(
        "unstored_blocks_unreturned", True, "Full blocks of answers not stored: such do not come back."
    ),
    MetricSpec("answers", True, "Answers that filled a block, while it is learned whether such come back."),
    MetricSpec("returned_answers", True, "Of these, answers that a later prompt has as they were."),
    MetricSpec("handed_off_tokens", True, "Tokens of prompts that were leased for other engines."),
    MetricSpec("refused_hand_offs", True, "Prompts that were not leased although they should have been."),
    MetricSpec("expired_leases", True, "Leases that ended before a peer said that it had all of it."),
    MetricSpec("served_bytes", True, "Bytes of KV that other engines fetched from here, all ranks."),
    MetricSpec(
        "asked_tokens",
        True,
        "Tokens of prompts, in full blocks, that other sizes of the pool were asked for.",
    ),
    MetricSpec(
        "missed_tokens_at_size",
        True,
        "Of these, tokens that a pool of so many times this size would not have had; estimated.",
        label=SIZE,
    ),
    MetricSpec(
        "hit_rate_at_size",
        False,
        "Part of asked_tokens that a pool of so many times this size would have had of late; estimated.",
        label=SIZE,
    ),
    MetricSpec(
        "saved_seconds", True, "Seconds of prefill that restores have saved requests, less what they waited."
    ),
    MetricSpec("lost_seconds", True, "Seconds that requests have waited for KV longer than a prefill takes."),
    MetricSpec("leased_blocks", False, "Blocks of the CPU pool that leases keep there."),
    MetricSpec("pool_blocks", False, "Blocks the CPU pool can hold."),
    MetricSpec("pool_used_blocks", False, "Blocks of the CPU pool that are not free."),
    MetricSpec("pool_tokens", False, "Tokens the CPU pool can hold, in full blocks."),
    MetricSpec("pool_used_tokens", False, "Tokens in blocks of the CPU pool that are not free."),
    MetricSpec("pool_bytes", False, "Size of the CPU pool, all ranks."),
    MetricSpec("adopted_blocks", False, "Blocks that the CPU pool had from earlier engines at start."),
    MetricSpec("jobs_in_flight", False, "Loads and stores that have not ended."),
    MetricSpec("queued_blocks", False, "GPU blocks of requests that are over, held until they are stored."),
    MetricSpec(
        "stuck_jobs", False, "Loads and stores past their deadline; they keep their memory until they end."
    ),
    MetricSpec("stores_answers", False, "1 while answers of which nothing else is known are stored."),
    MetricSpec("route_bytes", True, "Bytes copied along a route, all ranks.", label=ROUTE),
    MetricSpec(
        "route_seconds", True, "Seconds that copies along a route took, on the slowest rank.", label=ROUTE
    ),
    MetricSpec("route_failed_jobs", True, "Of failed_jobs, those of a route.", label=ROUTE),
    MetricSpec(
        "route_broken_jobs",
        True,
        "Jobs that brought bytes that are not those stored, all ranks.",
        label=ROUTE,
    ),
    MetricSpec("route_refused_bytes", True, "Bytes not written to a tier: its budget is spent.", label=ROUTE),
    MetricSpec(
        "route_missed_blocks",
        True,
        "Blocks that a store, or sibling, had no longer.",
        label=ROUTE,
    ),
    MetricSpec("route_probed_extents", True, "Extents that a tier was asked for.", label=ROUTE),
    MetricSpec(
        "route_orphaned_extents",
        True,
        "Extents of no more use: what comes before them was missing or wrong.",
        label=ROUTE,
    ),
    MetricSpec("route_found_extents", True, "Of these, extents that it had.", label=ROUTE),
    MetricSpec("received_hand_offs", True, "Requests of which all was fetched that a peer was said to have."),
    MetricSpec(
        "unused_hand_offs",
        True,
        "Requests of which a peer was said to have KV, and not all of it was fetched.",
        label=REASON,
    ),
    MetricSpec("peer_bytes", True, "Bytes of KV fetched from a peer, all ranks.", label=PEER),
    MetricSpec("peer_seconds", True, "Seconds that these took, all ranks.", label=PEER),
    MetricSpec("peer_errors", True, "Times that a peer failed, or sent what was wrong.", label=PEER),
    MetricSpec("peer_connected", False, "1 while all ranks are connected to a peer.", label=PEER),
    MetricSpec("route_kept_bytes", False, "Bytes of KV that a tier keeps, all ranks.", label=ROUTE),
    MetricSpec("route_paused", False, "1 while a route pauses or tries a single job.", label=ROUTE),
    MetricSpec(
        "paused", False, "1 while restores, stores or another route pause after faults or try a single one."
    ),
)


def split_key(key: str) -> tuple[str, str]:
    """The name of a metric, and its label's value, or ``""``, by the key that ``Metrics`` gives it."""
    name, _, label = key.partition(":")
    return name, label


class Metrics:
    """Values since the last ``take``: counters as increments, gauges as they are."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._taken: dict[str, float] = {}  # counters, by then

    def count(self, name: str, amount: float = 1, route: Route | str | None = None) -> None:
        """Add to a counter: that of a route, or of another value of its label."""
        if amount:
            key = _key(name, route)
            self._values[key] = self._values.get(key, 0) + amount

    def show(self, name: str, value: float, route: Route | str | None = None) -> None:
        """Set a gauge; the same."""
        key = _key(name, route)
        if self._shown.get(key) != value:
            self._shown[key] = self._values[key] = value

    @property
    def gauges(self) -> Mapping[str, float]:
        """What was shown last, by key."""
        return self._shown

    @property
    def has_counts(self) -> bool:
        """Whether something was counted or shown since the last ``take``."""
        return bool(self._values)

    @property
    def totals(self) -> dict[str, float]:
        """Counters since the start, by key, without those that are 0. O(metrics)."""
        totals = dict(self._taken)
        self._add(totals, self._values)
        return totals

    def take(self) -> dict[str, float]:
        """Nothing if nothing changed since the last call, else all increments and all gauges.

        All, because a log line made from the values of an interval takes what is missing for 0.
        """
        values, self._values = self._values, {}
        self._add(self._taken, values)
        return self._shown | values if values else {}

    def check_invariants(self) -> None:
        """Only what is described is counted or shown, and counters only grow."""
        is_counter = {spec.name: spec.is_counter for spec in METRICS}
        labelled = {spec.name for spec in METRICS if spec.label}
        keys = {key: split_key(key) for key in self._values.keys() | self._shown.keys()}
        unknown = [key for key, (name, label) in keys.items() if name not in is_counter]
        assert not unknown, f"{unknown} are not described"
        wrong = [key for key, (name, label) in keys.items() if bool(label) != (name in labelled)]
        assert not wrong, f"{wrong} have a label, and should not, or the reverse"
        shown = [key for key in self._shown if is_counter[keys[key][0]]]
        assert not shown, f"{shown} are counters, and shown as gauges"
        fell = {key: value for key, value in self._values.items() if is_counter[keys[key][0]] and value < 0}
        assert not fell, f"counters fell: {fell}"
        assert not self._taken.keys() & self._shown.keys(), "gauges were added up"

    def _add(self, totals: dict[str, float], values: Mapping[str, float]) -> None:
        """Counters among values to those before them."""
        for key, value in values.items():
            if key not in self._shown:
                totals[key] = totals.get(key, 0) + value


@cache
def _key(name: str, route: Route | str | None) -> str:
    if route is None:
        return name
    return f"{name}:{route.label if isinstance(route, Route) else route}"
