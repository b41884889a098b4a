"""Rows of results, the ratios made of them, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.control_plane.sizes import BLOCK_TOKENS, DECODE_PROMPT_TOKENS
from offload.sizing.tables import format_table

__all__ = [
    "OURS",
    "decode_rows",
    "format_decode",
    "format_growth",
    "format_memory",
    "format_phases",
    "format_ratios",
    "lookup_growth",
    "memory_row",
    "phase_rows",
    "ratios",
]

OURS = "offload"
PHASES = ("lookup", "plan", "complete", "finish", "other", "total")
STATES = ("cold", "warm", "evicting")

_REFERENCE = "native-lru"
_TIMES_FASTER = {
    ("warm", 32_768): 8,
    ("warm", 131_072): 25,
    ("warm", 1_048_576): 40,
    ("cold", 32_768): 6,
    ("cold", 131_072): 10,
    ("cold", 1_048_576): 10,
    ("evicting", 32_768): 8,
    ("evicting", 131_072): 8,
    ("evicting", 1_048_576): 8,
}
"""How many times less time than `native-lru` we want to take."""
_GROWTH = (32_768, 1_048_576, 3)
"""The lookup of a prompt of that many tokens, and of that many: at most so many times as long."""
_DECODE_MICROSECONDS = 50
_BYTES_PER_BLOCK = {1_000_000: 250}
"""By resident blocks; the fewer, the more do the fixed parts weigh."""

Row = dict[str, Any]


def phase_rows(
    connector: str, tokens: int, state: str, resident: int, runs: Sequence[Mapping[str, int]]
) -> list[Row]:
    """One row per phase: medians over ``runs``, each nanoseconds by phase; `total` is of the runs' sums."""
    rows = []
    for phase in PHASES:
        spent = [sum(run.values()) if phase == "total" else run.get(phase, 0) for run in runs]
        row = _row(connector, tokens, state, phase, median(spent) / 1e6, resident)
        rows.append({**row, "ms_min": round(min(spent) / 1e6, 4), "ms_max": round(max(spent) / 1e6, 4)})
    return rows


def decode_rows(connector: str, steps: Sequence[Mapping[str, int]]) -> list[Row]:
    """What the hooks took in decode-only steps: the phase `step` is all of them; `ms` is the median."""
    phases = {phase: [step.get(phase, 0) / 1e3 for step in steps] for phase in PHASES if phase != "total"}
    phases = {"step": [sum(spent) for spent in zip(*phases.values(), strict=True)]} | phases
    return [_decode_row(connector, phase, spent) for phase, spent in phases.items()]


def _decode_row(connector: str, phase: str, spent: Sequence[float]) -> Row:
    return {
        **_row(connector, DECODE_PROMPT_TOKENS, "decode", phase, median(spent) / 1e3, None),
        "us_per_block": None,
        "steps": len(spent),
        "us_mean": round(fmean(spent), 2),
        "us_median": round(median(spent), 2),
        "us_p99": round(quantiles(spent, n=100, method="inclusive")[-1], 2),
        "us_max": round(max(spent), 2),
    }


def memory_row(connector: str, resident: int, churned: int, grown: int) -> Row:
    """Memory with ``resident`` blocks after a churn of ``churned`` more: ``grown`` bytes beyond none."""
    return {
        **_row(connector, None, "memory", "churn" if churned else "fill", None, resident),
        "churned_blocks": churned,
        "mib": round(grown / 2**20, 1),
        "bytes_per_block": round(grown / resident, 1),
    }


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Each peer's total time over ours, with the target where one is set."""
    totals = {_setting(row): row["ms"] for row in rows if row["phase"] == "total"}
    found = []
    for (connector, tokens, state, resident), spent in totals.items():
        if connector == OURS:
            continue
        target = _TIMES_FASTER.get((state, tokens)) if connector == _REFERENCE else None
        ratio = round(spent / totals[OURS, tokens, state, resident], 2)
        row = {"connector": connector, "tokens": tokens, "state": state, "resident_blocks": resident}
        found.append({**row, "ratio": ratio, "at_least": target})
    return found


def lookup_growth(rows: Sequence[Row]) -> list[Row]:
    """How many times as long the lookup of the longest prompt takes as that of the shortest."""
    lookups = {
        _setting(row): row["ms"] for row in rows if row["phase"] == "lookup" and row["state"] in STATES
    }
    found = []
    for (connector, longest, state, resident), spent in lookups.items():
        shortest = min(tokens for _, tokens, *_ in lookups)
        if longest == shortest or longest != max(tokens for _, tokens, *_ in lookups):
            continue
        has_bar = connector == OURS and (shortest, longest) == _GROWTH[:2]
        base = lookups[connector, shortest, state, resident]
        row = {"connector": connector, "state": state, "resident_blocks": resident}
        ends = {"from_tokens": shortest, "to_tokens": longest, "from_us": base * 1e3, "to_us": spent * 1e3}
        ends = {name: round(value, 1) for name, value in ends.items()}
        found.append(
            {**row, **ends, "ratio": round(spent / base, 2), "at_most": _GROWTH[2] if has_bar else None}
        )
    return found


def format_phases(rows: Sequence[Row]) -> str:
    """Microseconds per block: a line per connector and setting, a column per phase."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["state"] in STATES:
            lines.setdefault(_setting(row), {})[row["phase"]] = row
    table = [
        (
            *(f"{value:,}" if isinstance(value, int) else value for value in setting),
            *(f"{line[phase]['us_per_block']:.3f}" for phase in PHASES),
            *(f"{line['total'][key]:.2f}" for key in ("ms", "ms_min", "ms_max")),
        )
        for setting, line in sorted(lines.items(), key=lambda item: _order(item[0]))
    ]
    columns = ("connector", "tokens", "state", "resident", *PHASES, "total ms", "min", "max")
    return "microseconds per block\n" + format_table(columns, table)


def format_ratios(found: Sequence[Row]) -> str:
    """How many times our time each peer takes."""
    names = ("connector", "tokens", "state", "resident_blocks", "ratio", "at_least")
    ordered = sorted(found, key=lambda row: _order(_setting(row)))
    return "time of a peer / ours\n" + _table(
        names, ordered, "ratio", lambda row: row["ratio"] >= row["at_least"]
    )


def format_growth(found: Sequence[Row]) -> str:
    """Lookups of the longest prompt against those of the shortest."""
    names = ("connector", "state", "resident_blocks", "from_tokens", "from_us", "to_tokens", "to_us", "ratio")
    shown = (*names, "at_most")
    return "growth of the lookup\n" + _table(
        shown, found, "ratio", lambda row: row["ratio"] <= row["at_most"]
    )


def format_decode(rows: Sequence[Row]) -> str:
    """Microseconds that a decode-only step spends in the connector."""
    names = ("connector", "phase", "steps", "us_mean", "us_median", "us_p99", "us_max", "at_most")
    target = {"at_most": _DECODE_MICROSECONDS}
    found = [
        row | (target if row["connector"] == OURS and row["phase"] == "step" else {})
        for row in rows
        if row["state"] == "decode"
    ]
    head = "microseconds in the connector per decode-only step\n"
    return head + _table(names, found, "us_mean", lambda row: row["us_mean"] <= row["at_most"])


def format_memory(rows: Sequence[Row]) -> str:
    """Memory of the scheduler's process that the pool's bookkeeping takes."""
    names = ("connector", "phase", "resident_blocks", "churned_blocks", "mib", "bytes_per_block", "at_most")
    found = [row for row in rows if row["state"] == "memory"]
    found = [
        row | ({"at_most": _BYTES_PER_BLOCK.get(row["resident_blocks"])} if row["connector"] == OURS else {})
        for row in found
    ]
    head = "memory of the scheduler's process\n"
    return head + _table(
        names, found, "bytes_per_block", lambda row: row["bytes_per_block"] <= row["at_most"]
    )


def _row(
    connector: str, tokens: int | None, state: str, phase: str, ms: float | None, resident: int | None
) -> Row:
    per_block = ms * 1e3 / (tokens // BLOCK_TOKENS) if ms is not None and tokens else None
    return {
        "connector": connector,
        "tokens": tokens,
        "state": state,
        "phase": phase,
        "us_per_block": None if per_block is None else round(per_block, 5),
        "ms": None if ms is None else round(ms, 5),
        "resident_blocks": resident,
    }


def _setting(row: Row) -> tuple[str, int, str, int]:
    return row["connector"], row["tokens"], row["state"], row["resident_blocks"]


def _order(setting: tuple[str, int, str, int]) -> tuple[Any, ...]:
    """Connectors side by side, in the order of their rows (sorting is stable)."""
    _, tokens, state, resident = setting
    return STATES.index(state), tokens, resident


def _table(names: Sequence[str], rows: Sequence[Row], judged: str, is_met: Any) -> str:
    """A line per row; what is ``judged`` by a target in the last column and does not meet it has a mark."""
    lines = []
    for row in rows:
        cells = {
            name: f"{row[name]:,}" if isinstance(row.get(name), int | float) else row.get(name)
            for name in names
        }
        if row.get(names[-1]) is not None and not is_met(row):
            cells[judged] = f"{cells[judged]} (!)"
        lines.append([cells[name] for name in names])
    return format_table([name.replace("_", " ") for name in names], lines)
