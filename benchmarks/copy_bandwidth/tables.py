"""Tables of rows, of what runs of neighbours are worth, and of targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.common import report
from benchmarks.copy_bandwidth.measure import Row
from benchmarks.copy_bandwidth.moves import Pattern
from benchmarks.copy_bandwidth.targets import Verdict
from benchmarks.copy_bandwidth.ways import OurWay

__all__ = ["format_missed", "format_rows", "format_runs", "format_targets"]


def format_rows(rows: Sequence[Row]) -> str:
    """All rows."""
    columns = (
        *("shape", "pieces", "blocks", "ids", "direction", "way", "GB/s", "share of peak", "times vLLM"),
        *("submit us per block", "ms", "ms on the host"),
    )
    lines = [
        (
            row["shape"],
            row["pieces"],
            row["blocks"],
            row["ids"],
            row["direction"],
            row["way"],
            f"{row['gb_per_s']:.2f}",
            f"{row['share_of_peak']:.1%}",
            None if row["times_vllm"] is None else f"{row['times_vllm']:.3f}",
            f"{row['submit_us_per_block']:.3f}",
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['host_seconds'] * 1e3:.3f}",
        )
        for row in rows
    ]
    return report.format_table(columns, lines)


def format_runs(rows: Sequence[Row]) -> str:
    """Our copies of neighbouring blocks to neighbouring slots beside those of scattered ones, if any."""
    columns = (
        *("shape", "blocks", "direction", "scattered GB/s", "contiguous GB/s", "times"),
        *("scattered submit us per block", "contiguous"),
    )
    lines = [
        (
            runs["shape"],
            runs["blocks"],
            runs["direction"],
            f"{scattered['gb_per_s']:.2f}",
            f"{runs['gb_per_s']:.2f}",
            f"{runs['gb_per_s'] / scattered['gb_per_s']:.2f}",
            f"{scattered['submit_us_per_block']:.3f}",
            f"{runs['submit_us_per_block']:.3f}",
        )
        for runs, scattered in _pairs(rows)
    ]
    return report.format_table(columns, lines) if lines else ""


def format_targets(verdicts: Sequence[Verdict]) -> str:
    """Which targets hold."""
    columns = ("target", "what is to hold", "answer", "rows", "missed")
    lines = [
        (each.target.name, each.target.text, each.answer, each.num_rows, len(each.missed))
        for each in verdicts
    ]
    return report.format_table(columns, lines)


def format_missed(verdicts: Sequence[Verdict]) -> str:
    """The rows that miss a target; if any."""
    columns = ("target", "shape", "blocks", "ids", "direction", "figure", "is")
    lines = [
        (
            each.target.name,
            row["shape"],
            row["blocks"],
            row["ids"],
            row["direction"],
            each.target.figure,
            f"{row[each.target.figure]:.3f}",
        )
        for each in verdicts
        for row in each.missed
    ]
    return report.format_table(columns, lines) if lines else ""


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
