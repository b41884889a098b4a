"""Tables of checksums, of cases, and of what they come to together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common.tables import Column, grouped, table
from offload.config import Verify

__all__ = ["format_tables"]


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """All of them, with titles."""
    return "\n".join(
        f"\n{title}\n\n{text}"
        for title, text in (
            ("checksums, one thread", table(_CHECKSUMS, [row for row in rows if row["kind"] == "checksum"])),
            ("loads and stores", table(_CASES, [row for row in rows if row["kind"] == "case"])),
            ("share of restore time over all shapes and sizes", table(_SUMMARY, _compared(rows))),
        )
    )


def _compared(rows: Sequence[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """What was measured beside `never`, of one kind together."""
    cases = [row for row in rows if row["kind"] == "case" and row["verify"] != Verify.NEVER]
    return grouped(cases, "direction", "copies", "of_blocks", "verify").values()


def _worst(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(group, key=lambda row: row["share_of_restore"])


def _share(row: dict[str, Any]) -> str | None:
    return None if row["verify"] == Verify.NEVER else f"{row['share_of_restore']:+.1%}"


def _quartiles(row: dict[str, Any]) -> str | None:
    low, high = row["share_quartiles"]
    return None if row["verify"] == Verify.NEVER else f"{low:+.1%} to {high:+.1%}"


def _hashed(row: dict[str, Any]) -> str:
    return "blocks" if row["of_blocks"] else "slots"


def _median_of(key: str) -> Callable[[Sequence[dict[str, Any]]], float]:
    return lambda group: statistics.median(row[key] for row in group)


_CHECKSUMS = (
    Column("shape", "shape"),
    Column("GB/s", "gb_per_s", ".1f"),
    Column("us per block", "us_per_block", ".1f"),
    Column("of these beyond hashing one piece", "us_per_block_beyond_one_piece", ".1f"),
)
_CASES = (
    *(Column(name, name) for name in ("direction", "shape", "blocks", "copies")),
    Column("checksums of", _hashed),
    Column("verify", "verify"),
    Column("rounds", "rounds"),
    Column("ms", "ms", ".2f"),
    Column("share of restore", _share),
    Column("quartiles", _quartiles),
    Column("CPU ms", "cpu_ms", ".2f"),
    Column("longest pause ms", "longest_pause_ms", ".2f"),
)
_SUMMARY = (
    Column("direction", lambda group: group[0]["direction"]),
    Column("copies", lambda group: group[0]["copies"]),
    Column("checksums of", lambda group: _hashed(group[0])),
    Column("verify", lambda group: group[0]["verify"]),
    Column("cases", len),
    Column("median", _median_of("share_of_restore"), "+.1%"),
    Column("largest", lambda group: _worst(group)["share_of_restore"], "+.1%"),
    Column("in the case", lambda group: "{blocks} x {shape}".format(**_worst(group))),
    Column("CPU ms per GiB", _median_of("cpu_ms_per_gib"), ".0f"),
)
