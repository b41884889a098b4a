"""Rows of results, what the policies come to in all of them, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.common.tables import Column, table
from benchmarks.trace_replay.policies import LRU, Policy
from benchmarks.trace_replay.prefill import PrefillModel
from benchmarks.trace_replay.replay import Replayed
from offload.sizing.tables import format_table

__all__ = ["Row", "Setting", "format_summary", "format_tables", "gap_closed", "rows_of", "summary"]

Row = dict[str, Any]

_SMALL_GAP = 0.001
"""Below 0.1 percentage points between leaf-LRU and the optimum ``gap_closed`` is None."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all policies of one workload and capacity have in common.

    Attributes:
        trace: the workload's name.
        capacity_blocks: of the pool.
        capacity_fraction: the fraction of the workload's distinct blocks that it was to be.
        lengths: of each request, in full blocks.
        input_tokens: of each request.
        block_tokens: tokens of a block.
        passes: which requests are in each; one pass is none.
        model: of the time of prefill.
    """

    trace: str
    capacity_blocks: int
    capacity_fraction: float
    lengths: Sequence[int]
    input_tokens: Sequence[int]
    block_tokens: int
    passes: Sequence[slice]
    model: PrefillModel


def rows_of(
    setting: Setting, policy: Policy, rounds: Sequence[Replayed], lru: Replayed, optimal: Replayed
) -> list[Row]:
    """One row for all requests, and if they come in passes one for each.

    Args:
        setting: what was replayed.
        policy: by which one.
        rounds: its replays; hits are the first one's, times are medians.
        lru: leaf-LRU in a pool of that size.
        optimal: the optimum in a pool of that size.
    """
    everything = slice(0, len(setting.lengths))
    accessed = sum(setting.lengths)
    share = gap_closed(*(sum(each.hits) / accessed for each in (rounds[0], lru, optimal)))
    first = _row(setting, policy, rounds, everything, None)
    first["gap_closed"] = None if rounds[0] is optimal or share is None else round(share, 4)
    if len(setting.passes) == 1:
        return [first]
    parts = enumerate(setting.passes, 1)
    return [first, *(_row(setting, policy, rounds, part, number) for number, part in parts)]


def gap_closed(rate: float, lru: float, optimal: float) -> float | None:
    """The share of the way from leaf-LRU to the optimum; None where that is too short to tell."""
    return None if optimal - lru < _SMALL_GAP else (rate - lru) / (optimal - lru)


def _row(
    setting: Setting, policy: Policy, rounds: Sequence[Replayed], part: slice, number: int | None
) -> Row:
    first = rounds[0]
    hits, accessed = first.hits[part], sum(setting.lengths[part])
    evicted = sum(first.evicted[part]) if first.evicted else None
    saved = setting.model.seconds(each * setting.block_tokens for each in hits)
    least = [min(each) for each in zip(*(seen.spent_ns[part] for seen in rounds), strict=True)]

    def microseconds(count: Callable[[Replayed], float]) -> float | None:
        return round(median(count(each) for each in rounds) / 1000, 4) if first.spent_ns else None

    return {
        "trace": setting.trace,
        "policy": policy.name,
        "capacity_fraction": round(setting.capacity_fraction, 6),
        "capacity_blocks": setting.capacity_blocks,
        "hit_rate": round(sum(hits) / accessed, 6),
        "gap_closed": None,
        "us_per_access": microseconds(lambda each: sum(each.spent_ns[part]) / accessed),
        "us_per_evicted": microseconds(lambda each: _evicting_ns(each, part) / evicted) if evicted else None,
        "prefill_seconds_saved": round(saved, 3),
        "prefill_seconds": round(setting.model.seconds(setting.input_tokens[part]), 3),
        "evicted_blocks": evicted,
        "accessed_blocks": accessed,
        "longest_call_us": microseconds(lambda each: max(each.spent_ns[part])),
        "least_us_per_access": round(sum(least) / accessed / 1000, 4) if least else None,
        "least_longest_call_us": round(max(least) / 1000, 4) if least else None,
        "policy_name": policy.real_name,
        "pass": number,
        "rounds": len(rounds),
    }


def _evicting_ns(replayed: Replayed, part: slice) -> int:
    pairs = zip(replayed.store_ns[part], replayed.evicted[part], strict=True)
    return sum(spent for spent, evicted in pairs if evicted)


def summary(rows: Sequence[Row]) -> list[Row]:
    """What each policy comes to over all traces and capacities, beside leaf-LRU, which has to be among them.

    In percentage points of hit rate: `worst_to_lru` (in `worst_trace` at `worst_fraction`), `best_to_lru`,
    `mean_to_lru`; and `mean_gap_closed`.
    """
    whole = [row for row in rows if row["pass"] is None]
    lru = {_place(row): row["hit_rate"] for row in whole if row["policy_name"] == LRU}
    result = []
    for policy in dict.fromkeys(row["policy"] for row in whole):
        own = [row for row in whole if row["policy"] == policy]
        points = [100 * (row["hit_rate"] - lru[_place(row)]) for row in own]
        worst = own[points.index(min(points))]
        shares = [row["gap_closed"] for row in own if row["gap_closed"] is not None]
        result.append(
            {
                "policy": policy,
                "policy_name": worst["policy_name"],
                "worst_to_lru": round(min(points), 3),
                "worst_trace": worst["trace"],
                "worst_fraction": worst["capacity_fraction"],
                "best_to_lru": round(max(points), 3),
                "mean_to_lru": round(fmean(points), 3),
                "mean_gap_closed": round(fmean(shares), 4) if shares else None,
            }
        )
    return result


def format_summary(lines: Sequence[Row]) -> str:
    """The table of ``summary``."""
    columns = (
        Column("policy", "policy"),
        Column("worst to lru, pp", "worst_to_lru", "+.2f"),
        Column("trace", "worst_trace"),
        Column("capacity", "worst_fraction", ".1%"),
        Column("best, pp", "best_to_lru", "+.2f"),
        Column("mean, pp", "mean_to_lru", "+.2f"),
        Column("gap closed, mean", "mean_gap_closed", ".1%"),
    )
    return table(columns, lines)


def format_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Hit rates and times with a column for each policy, and hit rates of passes if there are any."""
    whole = [row for row in rows if row["pass"] is None]
    passes = [row for row in rows if row["pass"] is not None]
    for title, some, name, style in (
        ("hit rate, %", whole, "hit_rate", "%"),
        ("hit rate of each pass, %", passes, "hit_rate", "%"),
        ("gap between lru and the optimum that is closed, %", whole, "gap_closed", "%"),
        ("prefill saved, % of its modelled time", whole, "prefill_seconds_saved", "of prefill"),
        ("microseconds per block accessed", whole, "us_per_access", ".2f"),
        ("microseconds per block evicted", whole, "us_per_evicted", ".2f"),
        ("longest request, ms", whole, "longest_call_us", "ms"),
    ):
        if any(row[name] is not None for row in some):
            yield f"{title}\n{_by_policy(some, name, style)}"


def _by_policy(rows: Sequence[Row], name: str, style: str) -> str:
    values = {(*_place(row), row["policy"]): _cell(row, name, style) for row in rows}
    used = {place[-1] for place, value in values.items() if value is not None}
    policies = [each for each in dict.fromkeys(row["policy"] for row in rows) if each in used]
    with_pass = any(row["pass"] is not None for row in rows)
    lines = []
    for trace, capacity, number in dict.fromkeys(map(_place, rows)):
        head = [trace, f"{capacity:.1%}", *([number] if with_pass else [])]
        lines.append([*head, *(values.get((trace, capacity, number, each)) for each in policies)])
    return format_table(["trace", "capacity", *(["pass"] if with_pass else []), *policies], lines)


def _place(row: Row) -> tuple[str, float, int | None]:
    return row["trace"], row["capacity_fraction"], row["pass"]


def _cell(row: Row, name: str, style: str) -> str | None:
    value = row[name]
    if value is None:
        return None
    match style:
        case "%":
            return f"{100 * value:.1f}"
        case "of prefill":
            return f"{100 * value / row['prefill_seconds']:.1f}"
        case "ms":
            return f"{value / 1000:.1f}"
        case _:
            return f"{value:{style}}"
