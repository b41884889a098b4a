"""Is an engine with us at least as fast as one without, whatever the link and the GPU?

    python -m benchmarks.never_slower [--links 0.5,2,8,25,50] [--prefills 2000,10000,50000] \\
        [--workloads agents,...] [--modes never,always,auto] [--seeds 5] [--requests 240] [--overlapped] \\
        [--store auto] [--bars FILE] [--json FILE]

vLLM's real scheduler with our connector, on a virtual clock of tokens computed and bytes moved: a step takes
10 ms, and its tokens by the speed of prefill. A token that has 32,768 tokens before it takes twice as long as
the first one. A token has 128 KiB of KV. A step computes 2,048 tokens at most. Copies go over the link one
after the other, in both directions at once. Nothing of this machine's speed is in the figures. With
`--overlapped` a step is scheduled while the one before it runs, as with vLLM's async scheduling.

Users ask, wait for the answer, and ask again. After the first minute of the clock `--requests` are answered:

- no reuse: 16 users, every prompt new, of 2,000 to 6,000 tokens.
- documents: 8 documents of 7,680 tokens, which the pool holds, and 8 users. The GPU holds 6.
- shared prefix: 50 users over a prompt of 4,096 tokens, each with 2,048 tokens of its own.
- long documents: 12 documents of 16,384 to 38,912 tokens, and 6 users. The GPU holds 5.
- agents: 24 sessions over a prompt of 4,096 tokens, which grow by 200 to 2,000 tokens with each of 8 to 24
  turns. Between turns the tool runs for 4 seconds, in the mean.

Modes: `never` is an engine without connector; `always` restores whatever the pool has; `auto`
decides for each restore. `--store` says when blocks are copied.

Per cell and mode, over all seeds: tokens of prompts and answers per second (geometric mean), the 99th
percentile of the time to the first token (of all requests together), and the part of prompts that was loaded.
`against` is the better of never and always by throughput; behind it are throughput and p99 as parts of
that mode's. `--bars FILE` takes the rows of never and always from the JSON of an earlier run, instead of
running them again: what `auto` decides by changes neither.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, one_of, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.never_slower.replay import ALWAYS, AUTO, NEVER, Machine, Outcome, replay
from benchmarks.never_slower.users import KINDS
from offload.config import StoreWhen

__all__ = ["main"]

MODES = (NEVER, ALWAYS, AUTO)
Row = dict[str, Any]
_COLUMNS = (
    Column("workload", "workload"),
    Column("prefill", "prefill_tokens_per_second", ",.0f"),
    Column("link GB/s", "link_gb_per_second", "g"),
    Column("mode", "mode"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("TTFT p50", "ttft_p50", ".3f"),
    Column("TTFT p99", "ttft_p99", ".3f"),
    Column("loaded", "loaded_share", ".1%"),
    Column("against", "against"),
    Column("throughput", "throughput_ratio", ".3f"),
    Column("p99", "p99_ratio", ".3f"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cells; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        known = [] if options.bars is None else _bars(options)
    except (OSError, ValueError) as error:
        parser.error(f"--bars {options.bars}: {error}")
    logging.disable(logging.WARNING)
    began = time.monotonic()
    rows: list[Row] = []
    never: dict[tuple[str, float], list[Outcome]] = {}  # there the link changes nothing
    for workload, prefill, link in _cells(options):
        outcomes: dict[str, list[Outcome]] = {}
        for mode in options.modes if options.bars is None else (AUTO,):
            if mode == NEVER and (workload, prefill) in never:
                outcomes[mode] = never[workload, prefill]
                continue
            machine = Machine(link * 1e9, prefill)
            more = {"overlapped": options.overlapped, "store": options.store}
            outcomes[mode] = [
                replay(mode, KINDS[workload], machine, options.requests, seed, **more)
                for seed in range(options.seeds)
            ]
            if mode == NEVER:
                never[workload, prefill] = outcomes[mode]
        cell = {"workload": workload, "prefill_tokens_per_second": prefill, "link_gb_per_second": link}
        bars = [row for row in known if cell.items() <= row.items()]
        new = compare([*bars, *({**cell, "mode": mode, **_row(outcomes[mode])} for mode in outcomes)])
        rows += new
        print(table(_COLUMNS, new), file=sys.stderr, flush=True)
    print(table(_COLUMNS, rows))
    report.write(
        options.json, rows, settings=settings_of(options), run_seconds=round(time.monotonic() - began)
    )
    return 0


def compare(rows: Sequence[Row]) -> list[Row]:
    """Rows of one cell, each with what it is beside the better of never and always, if these are there."""
    bars = [row for row in rows if row["mode"] in (NEVER, ALWAYS)]
    if not bars:
        return list(rows)
    best = max(bars, key=lambda row: row["tokens_per_second"])
    return [
        {
            **row,
            "against": best["mode"],
            "throughput_ratio": round(row["tokens_per_second"] / best["tokens_per_second"], 4),
            "p99_ratio": round(row["ttft_p99"] / best["ttft_p99"], 4),
        }
        for row in rows
    ]


def _bars(options: argparse.Namespace) -> list[Row]:
    """Rows of never and always of an earlier run. Raises ValueError if it was not the same run otherwise."""
    told = json.loads(Path(options.bars).read_text())
    then, now = told["meta"]["settings"], settings_of(options)
    for name in ("seeds", "requests", "overlapped", "store"):
        if then[name] != now[name]:
            raise ValueError(f"it was run with {name} {then[name]}, and this is with {now[name]}")
    rows = [row for row in told["rows"] if row["mode"] != AUTO]
    there = {(row["workload"], row["prefill_tokens_per_second"], row["link_gb_per_second"]) for row in rows}
    missing = [cell for cell in _cells(options) if cell not in there]
    if missing:
        raise ValueError(f"it lacks {missing[0]}; run that without --bars")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("never_slower", __doc__)
    add = parser.add_argument
    add("--workloads", type=one_of(KINDS), default=tuple(KINDS), metavar="NAME,...", help="default: all")
    add("--modes", type=one_of(MODES), default=MODES, metavar="NAME,...", help="default: all")
    add("--links", type=_numbers, default=(0.5, 2.0, 8.0, 25.0, 50.0), metavar="N,...", help="in GB/s")
    add(
        "--prefills",
        type=_numbers,
        default=(2_000.0, 10_000.0, 50_000.0),
        metavar="N,...",
        help="tokens per second",
    )
    add_numbers(parser, ("seeds", 5, "of each cell"), ("requests", 240, "answered after the first minute"))
    add("--overlapped", action="store_true", help="schedule a step while the one before it runs")
    add(
        "--store",
        choices=[*StoreWhen],
        default=StoreWhen.AUTO,
        help="the connector's setting (default: auto)",
    )
    add("--bars", metavar="FILE", help="JSON of an earlier run to take the rows of never and always from")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < each < float("inf") for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers above 0, with commas between")
    return found


def _cells(options: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    for workload in options.workloads:
        for prefill in options.prefills:
            for link in options.links:
                yield workload, prefill, link


def _row(outcomes: Sequence[Outcome]) -> Row:
    speeds = [each.tokens / each.seconds for each in outcomes]
    ttft = [each for outcome in outcomes for each in outcome.ttft]
    computed, loaded = sum(each.computed for each in outcomes), sum(each.loaded for each in outcomes)
    return {
        "tokens_per_second": round(statistics.geometric_mean(speeds), 1),
        "by_seed": [round(each, 1) for each in speeds],
        "ttft_p50": round(float(np.percentile(ttft, 50)), 5),
        "ttft_p99": round(float(np.percentile(ttft, 99)), 5),
        "p99_by_seed": [round(float(np.percentile(each.ttft, 99)), 4) for each in outcomes],
        "loaded_share": round(loaded / (loaded + computed), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
