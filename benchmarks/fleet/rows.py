"""What became of a fleet's requests, as a row, and the tables of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from benchmarks.common.tables import Column, grouped, table
from benchmarks.fleet.engines import Asked, FleetEngine

__all__ = ["Row", "format_tables", "row_of"]

Row = dict[str, Any]

_COLUMNS = (
    Column("engines", "engines"),
    Column("policy", "policy"),
    Column("requests", "requests", ","),
    Column("found, %", lambda row: 100 * row["found"], ".1f"),
    Column("of one pool", lambda row: row["found"] / row["found_by_one"], ".1%"),
    Column("most computed / mean", "imbalance", ".2f"),
    Column("first token p50, s", "first_p50", ".2f"),
    Column("p99, s", "first_p99", ".2f"),
    Column("us per choice", "choice_us", ",.0f"),
    Column("KiB per engine", "kib_per_engine", ",.0f"),
)


def row_of(requests: Sequence[Asked], engines: Sequence[FleetEngine], spent_ns: Sequence[int]) -> Row:
    """The row of one run.

    ``found``: tokens of prompts that their engines had, as a share of all. ``imbalance``: seconds of prefill
    of the engine with most, to the mean of all. ``deviation``: of these seconds, to their mean.
    ``first_...``: seconds from arrival to the first token. ``choice_us``: of a processor, for one choice.
    """
    busy = [each.busy_seconds for each in engines]
    waits = [each.first_at - each.arrived_at for each in requests]
    p50, p99 = np.percentile(waits, [50, 99])
    return {
        "engines": len(engines),
        "requests": len(requests),
        "prompt_tokens": sum(each.num_prompt for each in requests),
        "found": round(sum(each.found for each in requests) / sum(each.num_prompt for each in requests), 4),
        "imbalance": round(max(busy) / fmean(busy), 3),
        "deviation": round(pstdev(busy) / fmean(busy), 3),
        "first_mean": round(fmean(waits), 3),
        "first_p50": round(float(p50), 3),
        "first_p99": round(float(p99), 3),
        "choice_us": round(fmean(spent_ns) / 1e3, 1),
        "choice_us_p99": round(float(np.percentile(spent_ns, 99)) / 1e3, 1),
    }


def format_tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each trace."""
    for (trace,), own in grouped(rows, "trace").items():
        yield f"{trace}\n{table(_COLUMNS, own)}"
