"""What does a store that never answers, or one that is far away, cost the scheduler?

    python -m benchmarks.silent_store [--runs 10] [--requests 400] [--json FILE]

Three engines: one has no store below its pool, one has a store that takes every question and every order and
never answers, and one has a store behind a virtual link of 1 ms and 1 GB/s, where each block has 2 MiB. All
are asked for the same documents, some of them again, through vLLM's real scheduler, in turns. What each
step schedules must be the same with the silent store as without, or the benchmark fails. With the far one a
request waits for its answer, so it may come a step later; how much more was computed then is told. The pool
has room for all: what is on its way to a store stays in the pool, so other blocks would be evicted. Workers
are in the same process here, so they make no checksums and the far store keeps no bytes.

Told is the scheduler thread's time on a processor, of steps that schedule something: the median and the 99th
percentile of each run, their medians over all runs, and the median of the ratios side by side.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.silent_store.child import FAR, NONE, SILENT, Run, child_of

__all__ = ["main"]

_COLUMNS = (
    Column("steps' scheduler time", "what"),
    Column("store", "store"),
    Column("without, us", "without_us", ".1f"),
    Column("with, us", "with_us", ".1f"),
    Column("with / without", "ratio", ".3f"),
    Column("least", "least", ".3f"),
    Column("most", "most", ".3f"),
    Column("steps", "steps"),
    Column("runs scheduled the same", "same_runs"),
    Column("tokens, with / without", "tokens_ratio", ".4f"),
)
_BELOW = (NONE, SILENT, FAR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("silent_store", __doc__)
    add_numbers(parser, ("runs", 10, "of each engine"), ("requests", 400, "of a run"))
    options = parser.parse_args(argv)
    notes = report.load_note()
    runs: list[dict[str, Run]] = []
    with ExitStack() as stack:
        children = {below: stack.enter_context(child_of(below, options.runs)) for below in _BELOW}
        for number in range(options.runs):
            ask = methodcaller("run", number, options.requests)
            first = number % len(_BELOW)
            told = {each: children[each].run(ask) for each in (*_BELOW[first:], *_BELOW[:first])}
            if told[NONE].trace != told[SILENT].trace:
                print(f"run {number}: the silent store has changed what was scheduled", file=sys.stderr)
                return 1
            runs.append(told)
    rows = [
        _row(what, of, below, runs)
        for below in (SILENT, FAR)
        for what, of in (("median", statistics.median), ("99th percentile", _last_percentile))
    ]
    print(table(_COLUMNS, rows))
    for note in notes:
        print(note)
    num_steps = sum(len(run[NONE].spent) for run in runs)
    report.write(options.json, rows, settings={**settings_of(options), "steps": num_steps}, notes=notes)
    return 0


def _last_percentile(values: Sequence[int]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def _row(
    what: str, of: Callable[[Sequence[int]], float], below: str, runs: Sequence[dict[str, Run]]
) -> dict[str, Any]:
    pairs = [(of(run[NONE].spent) / 1000, of(run[below].spent) / 1000) for run in runs]
    ratios = [having / without for without, having in pairs]
    return {
        "what": what,
        "store": below,
        "without_us": statistics.median(without for without, _ in pairs),
        "with_us": statistics.median(having for _, having in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "steps": sum(len(run[below].spent) for run in runs),
        "same_runs": sum(run[below].trace == run[NONE].trace for run in runs),
        "tokens_ratio": sum(run[below].computed for run in runs) / sum(run[NONE].computed for run in runs),
    }


if __name__ == "__main__":
    sys.exit(main())
