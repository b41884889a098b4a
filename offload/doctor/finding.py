"""What the doctor finds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offload.observe.metrics import split_key


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        name: of its kind, which docs/operations.md has a line for.
        saw: what was looked at, and its value.
        do: what to do.
        engine: which one it is about.
    """

    name: str
    saw: str
    do: str
    engine: str = ""


Told = Mapping[str, Any]
"""What an engine answers to ``status``."""


def is_understood(told: Told) -> bool:
    """Whether it is of a release that tells all that is looked at here."""
    return told.keys() >= {
        "about",
        "settings",
        "memory",
        "counters",
        "pool",
        "jobs",
        "routes",
        "tiers",
        "peers",
    }


def lately(told: Told, *names: str) -> float:
    """What these counters have grown by in the last minutes, together; those of a label all together."""
    grown = told["counters"]["lately"]
    return float(sum(value for key, value in grown.items() if split_key(key)[0] in names))


def by_label(values: Mapping[str, float], name: str) -> dict[str, float]:
    """Of a metric's values by key, those of each value of its label."""
    found = {}
    for key, value in values.items():
        metric, label = split_key(key)
        if metric == name and value:
            found[label] = value
    return found


def minutes(told: Told) -> str:
    """How long ``lately`` is, for people."""
    seconds = told["counters"]["lately_seconds"]
    return f"the last {seconds:.0f} s" if seconds < 120 else f"the last {seconds / 60:.0f} min"


def listed(parts: Mapping[str, float]) -> str:
    """Names with their numbers, for people."""
    return ", ".join(f"{name or 'all'} {value:,.0f}" for name, value in parts.items())


def tier_of(told: Told, route: str) -> Mapping[str, Any] | None:
    """The tier at one end of that route; None: it is between the GPU and the pool."""
    ends = route.split("_to_")
    tiers: Sequence[Mapping[str, Any]] = told["tiers"]
    return next((tier for tier in tiers if tier.get("tier") in ends), None)
