"""Rows of results: compared with no connector, and several rounds made one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common.tables import Column, table

Row = dict[str, Any]

_COST = "scheduler_ms_per_request"
_SHOWN = {
    "workload": "",
    "connector": "",
    "requests": ",",
    "steps": ",",
    _COST: ".3f",
    "times_none": ".2f",
    "added_ms_per_request": ".3f",
    "connector_ms_per_request": ".3f",
    "step_ms_p50": ".3f",
    "step_ms_p99": ".2f",
    "step_ms_max": ".1f",
    "connector_step_ms_p50": ".3f",
    "connector_step_ms_p99": ".2f",
    "connector_step_ms_max": ".1f",
    "hit_tokens_gpu": ",",
    "hit_tokens_cpu": ",",
    "prompt_tokens": ",",
    "ttft_p50": ".3f",
    "ttft_p99": ".3f",
    "most_waiting": "",
}
"""Columns of the table, and their formats."""


def compare(rows: Iterable[Row]) -> list[Row]:
    """Rows of one round with what each connector adds to the scheduler's time (None: `none` did not run)."""
    rows = list(rows)
    alone = {row["workload"]: row[_COST] for row in rows if row["connector"] == "none"}
    compared = []
    for row in rows:
        cost, base = row[_COST], alone.get(row["workload"])
        added = None if base is None else round(cost - base, 5)
        times = None if base is None else round(cost / base, 3)
        compared.append({**row, "added_ms_per_request": added, "times_none": times})
    return compared


def merge(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The median of each column over the rounds, row by row."""
    return [_median(list(same)) for same in zip(*rounds, strict=True)]


def _median(rows: list[Row]) -> Row:
    first, *others = rows
    identity = ("connector", "workload")
    assert all(row[name] == first[name] for row in others for name in identity)
    merged = dict(first)
    for name, value in first.items():
        values = [row[name] for row in rows]
        if isinstance(value, int):
            merged[name] = statistics.median_low(values)
        elif isinstance(value, float):
            merged[name] = round(statistics.median(values), 5)
    return {**merged, "rounds": len(rows)}


def format_rows(rows: Iterable[Row]) -> str:
    """A table of the most telling columns, a line for each row."""
    ordered = sorted(rows, key=lambda row: row["workload"])  # stable: connectors stay in their order
    columns = [Column(name.replace("_per_request", "/req"), name, style) for name, style in _SHOWN.items()]
    return table(columns, ordered)
