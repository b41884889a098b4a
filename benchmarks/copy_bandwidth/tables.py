"""Tables of rows, of what runs of neighbours are worth, and of targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.common.tables import Column, table
from benchmarks.copy_bandwidth.measure import Row
from benchmarks.copy_bandwidth.moves import Pattern
from benchmarks.copy_bandwidth.targets import Verdict
from benchmarks.copy_bandwidth.ways import OurWay

__all__ = ["format_missed", "format_rows", "format_runs", "format_targets"]


_PLACE = tuple(Column(name, name) for name in ("shape", "blocks", "ids", "direction"))
_COPIES = (
    *(Column(name, name) for name in ("shape", "pieces", "blocks", "ids", "direction", "way")),
    Column("GB/s", "gb_per_s", ".2f"),
    Column("share of peak", "share_of_peak", ".1%"),
    Column("times vLLM", "times_vllm", ".3f"),
    Column("submit us per block", "submit_us_per_block", ".3f"),
    Column("ms", lambda row: row["seconds"] * 1e3, ".3f"),
    Column("ms on the host", lambda row: row["host_seconds"] * 1e3, ".3f"),
)
_RUNS = (  # of pairs: contiguous, scattered
    *(Column(name, lambda pair, name=name: pair[0][name]) for name in ("shape", "blocks", "direction")),
    Column("scattered GB/s", lambda pair: pair[1]["gb_per_s"], ".2f"),
    Column("contiguous GB/s", lambda pair: pair[0]["gb_per_s"], ".2f"),
    Column("times", lambda pair: pair[0]["gb_per_s"] / pair[1]["gb_per_s"], ".2f"),
    Column("scattered submit us per block", lambda pair: pair[1]["submit_us_per_block"], ".3f"),
    Column("contiguous", lambda pair: pair[0]["submit_us_per_block"], ".3f"),
)
_TARGETS = (
    Column("target", lambda verdict: verdict.target.name),
    Column("what is to hold", lambda verdict: verdict.target.text),
    Column("answer", lambda verdict: verdict.answer),
    Column("rows", lambda verdict: verdict.num_rows),
    Column("missed", lambda verdict: len(verdict.missed)),
)


def format_rows(rows: Sequence[Row]) -> str:
    """All rows."""
    return table(_COPIES, rows)


def format_runs(rows: Sequence[Row]) -> str:
    """Our copies of neighbouring blocks to neighbouring slots beside those of scattered ones, if any."""
    pairs = list(_pairs(rows))
    return table(_RUNS, pairs) if pairs else ""


def format_targets(verdicts: Sequence[Verdict]) -> str:
    """Which targets hold."""
    return table(_TARGETS, verdicts)


def format_missed(verdicts: Sequence[Verdict]) -> str:
    """The rows that miss a target; if any."""
    missed = [
        {**row, "target": each.target.name, "figure": each.target.figure, "is": row[each.target.figure]}
        for each in verdicts
        for row in each.missed
    ]
    columns = (Column("target", "target"), *_PLACE, Column("figure", "figure"), Column("is", "is", ".3f"))
    return table(columns, missed) if missed else ""


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Contiguous and scattered, of more than one block."""
    ours = {
        (row["shape"], row["blocks"], row["direction"], row["ids"]): row
        for row in rows
        if row["way"] == OurWay.name and row["blocks"] > 1
    }
    for (*place, ids), row in ours.items():
        if ids == Pattern.CONTIGUOUS:
            yield row, ours[*place, Pattern.SCATTERED.value]
