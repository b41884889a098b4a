"""What does a store that never answers cost the scheduler?

    python -m benchmarks.silent_store [--runs 10] [--requests 400] [--json FILE]

Two engines, of which one has a store below its pool that takes every question and every order, and never
answers. Both are asked for the same documents, some of them again, through vLLM's real scheduler. They take
turns. What each step schedules must be the same in both, or the benchmark fails. The pool has room for all:
what is on its way to a store that hangs stays in the pool, so other blocks would be evicted.

Told is the scheduler thread's time on a processor, of steps that schedule something: the median and the 99th
percentile of each run, their medians over all runs, and the median of the ratios side by side.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.silent_store.child import child_of

__all__ = ["main"]

_COLUMNS = (
    Column("steps' scheduler time", "what"),
    Column("without, us", "without_us", ".1f"),
    Column("with, us", "with_us", ".1f"),
    Column("with / without", "ratio", ".3f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("silent_store", __doc__)
    add_numbers(parser, ("runs", 10, "of each engine"), ("requests", 400, "of a run"))
    options = parser.parse_args(argv)
    found: dict[str, list[tuple[float, float]]] = {"median": [], "99th percentile": []}
    num_steps = 0
    with ExitStack() as stack:
        children = [stack.enter_context(child_of(has_store, options.runs)) for has_store in (False, True)]
        for number in range(options.runs):
            ask = methodcaller("run", number, options.requests)
            order = (0, 1) if number % 2 else (1, 0)
            told = {each: children[each].run(ask) for each in order}
            if told[0][0] != told[1][0]:
                print(f"run {number}: the store has changed what was scheduled", file=sys.stderr)
                return 1
            num_steps += len(told[0][1])
            for what, of in (("median", statistics.median), ("99th percentile", _last_percentile)):
                found[what].append((of(told[0][1]) / 1000, of(told[1][1]) / 1000))
    rows = [_row(what, pairs) for what, pairs in found.items()]
    print(f"{num_steps:,} steps of each engine, which scheduled the same")
    print(table(_COLUMNS, rows))
    report.write(options.json, rows, settings={**settings_of(options), "steps": num_steps})
    return 0


def _last_percentile(values: Sequence[int]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def _row(what: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "what": what,
        "without_us": statistics.median(without for without, _ in pairs),
        "with_us": statistics.median(having for _, having in pairs),
        "ratio": statistics.median(having / without for without, having in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
