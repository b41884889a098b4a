"""The rows, the table and the goal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.decode_latency.engine import Decoded
from benchmarks.decode_latency.gaps import join, percentiles_ms
from benchmarks.decode_latency.traffic import TRAFFICS
from benchmarks.long_document_qa.measure import Counters
from offload.sizing.tables import format_table

__all__ = ["BASE", "GOAL", "Row", "format_goal", "format_summary", "ratio", "row_of"]

BASE = "prefix"
"""The engine without a connector."""

GOAL = 1.03
"""The most that p99 of decode-only steps may be with stores running, times that without."""

_COLUMNS = ("decode_p50_ms", "decode_p99_ms", "all_p50_ms", "all_p99_ms")
_HEADS = ("side prompts", "steps", "ms without", "ms with", "ratio", "by start", "stored MiB", "loaded MiB")
_NAMES = {
    "decode_p50_ms": "decode-only, p50",
    "decode_p99_ms": "decode-only, p99",
    "all_p50_ms": "all, p50",
    "all_p99_ms": "all, p99",
}

Row = dict[str, Any]


def row_of(start: int, mode: str, traffic: str, decoded: Sequence[Decoded]) -> Row:
    """Return the JSON row of one engine under one kind of traffic, over all rounds."""
    gaps = join([each.gaps for each in decoded])
    counters = sum((each.counters for each in decoded), Counters())
    figures = (*percentiles_ms(gaps.decode_only), *percentiles_ms(gaps.seconds))
    return {
        "start": start,
        "mode": mode,
        "traffic": traffic,
        **dict(zip(_COLUMNS, figures, strict=True)),
        "decode_gaps": len(gaps.decode_only),
        "all_gaps": len(gaps.seconds),
        "cached_gpu_tokens": counters.cached_gpu_tokens,
        "cached_cpu_tokens": counters.cached_cpu_tokens,
        "bytes_stored": counters.bytes_stored,
        "bytes_loaded": counters.bytes_loaded,
        "failed_jobs": counters.failed_jobs,
        "preemptions": counters.preemptions,
    }


def ratio(rows: Sequence[Row], mode: str, traffic: str, column: str) -> tuple[float, list[float]]:
    """How many times as long with the connector as without: geometric mean over the starts, and each."""
    by_start: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["traffic"] == traffic:
            by_start.setdefault(row["start"], {})[row["mode"]] = row[column]
    ratios = [values[mode] / values[BASE] for values in by_start.values()]
    return statistics.geometric_mean(ratios), ratios


def format_summary(rows: Sequence[Row], mode: str) -> str:
    """Return a table with a line per kind of traffic and figure; milliseconds are medians of the starts."""
    lines = []
    for traffic in TRAFFICS:
        ours = {
            each: [row for row in rows if row["traffic"] == traffic and row["mode"] == each]
            for each in (BASE, mode)
        }
        for column in _COLUMNS:
            mean, ratios = ratio(rows, mode, traffic, column)
            lines.append(
                (
                    traffic,
                    _NAMES[column],
                    *(f"{statistics.median(row[column] for row in each):.3f}" for each in ours.values()),
                    f"{mean:.3f}",
                    " ".join(f"{each:.3f}" for each in ratios),
                    *(
                        f"{sum(row[name] for row in ours[mode]) / 2**20:.0f}"
                        for name in ("bytes_stored", "bytes_loaded")
                    ),
                )
            )
    return format_table(_HEADS, lines)


def format_goal(rows: Sequence[Row], mode: str) -> str:
    """Return a line that says whether the goal is met."""
    reached, _ = ratio(rows, mode, "new", "decode_p99_ms")
    verdict = "met" if reached <= GOAL else "not met"
    goal = f"goal, decode-only p99 with stores running at most {GOAL:g}x of that without"
    return f"{goal}: {reached:.3f}x, {verdict}"
