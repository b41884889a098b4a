"""Which eviction policy finds the most, how far is it from the best possible, and what does it cost?

    python -m benchmarks.trace_replay --trace FILE... [--mix] [--policy lru,arc,...]
                                      [--capacity 0.01,0.02,...] [--json FILE]

Traces of prefix hashes (see `offload.observe.trace`) go through the connector's own allocator, request by
request, with each policy and pools of several sizes. Nothing is sampled or modelled. A policy's clock shows
the time of the trace. Where a trace has `stop`, our policies are told how answers ended, at their ends. A
request's blocks are in the pool when the next one arrives; full blocks of prompts count, answers are not in
a trace. A pool's size is a fraction of the distinct blocks of what is replayed.

Policies: any registered one; `default`, which is one of them; `vllm-lru` and `vllm-arc`, vLLM's own,
unmodified, in its manager (`benchmarks.trace_replay.native`), and `vllm-hazard`, ours there; each of them
with `-all`, the same offered a request's hits to store, too; `vllm-native:CLASS@MODULE`, any other class
for it; `optimal`, what no prefix-closed cache can exceed, knowing the future
(`benchmarks.trace_replay.optimum`), and `optimal-no-bypass`, if it had to take in each request's blocks.

`--trace cycle`, which is the default, is built in: `--documents` asked one after the other, `--passes`
times, through a pool with room for `--pool-documents`. Its rows are also told pass by pass.

`--mix` adds workloads made of the traces given. They are all at once (`a+b`), one after the other in every
order (`a>b`), and each with its times multiplied (`a*0.1`, `a*10`).

`--tier 1,4` has a tier below each pool instead, as large as so many of it, by the default policy both:
see `benchmarks.trace_replay.below`.

`--halves` splits traces by session instead: our default policy learns from one half and is judged by the
other, both ways, with and without being told how answers ended: see `benchmarks.trace_replay.halved`.

`--gpu 0.01,0.02` has the GPU's own cache above the pool, of such parts of the distinct blocks, and pools of
`--gpu-pools` times that: see `benchmarks.trace_replay.above`. `--draws` adds the same sessions with other
starts. Mixtures are without those of other speeds, which change nothing here.

Rows: `hit_rate`, of tokens in full blocks; `gap_closed`, (policy - lru) / (optimal - lru), with our
leaf-LRU at the same capacity, null where that gap is below 0.1 percentage points, and for single passes;
`us_per_access`, the time in all calls (lookup, touch, store with its evictions, commit) per block accessed;
`us_per_evicted`, the time of those calls to store that evicted something, per block evicted: an upper
bound, as it has the store itself; `longest_call_us`, all calls of one request together; `prefill_seconds`
that a GPU would need without any hit and `prefill_seconds_saved`, by a simple model
(`benchmarks.trace_replay.prefill`), not measured. In vLLM's manager only its own calls are measured, not
those of the scheduler around them. Garbage collection is on, and what was there before each replay is
frozen, as in an engine. Policies take turns at each capacity; times are medians of rounds. Those that are
called `least_` are of each request's fastest round.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import (
    above_zero,
    add_numbers,
    at_least,
    none_below_zero,
    parser_of,
    positive,
    settings_of,
)
from benchmarks.trace_replay import policies
from benchmarks.trace_replay.above import format_above, rows_above
from benchmarks.trace_replay.below import format_below, rows_below
from benchmarks.trace_replay.comparison import compare
from benchmarks.trace_replay.halved import format_halves, rows_of_halves
from benchmarks.trace_replay.plot import write_plot
from benchmarks.trace_replay.policies import Policy, find_policy
from benchmarks.trace_replay.prefill import PrefillModel
from benchmarks.trace_replay.rows import Row, format_summary, format_tables, summary
from benchmarks.trace_replay.workloads import SCALES, Workload, cycle, mixtures, read_workload, redrawn
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceError

__all__ = ["main"]

_CYCLE = "cycle"
_TIMERS = {"cpu": time.thread_time_ns, "wall": time.perf_counter_ns}


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print tables, write rows and plot; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    try:
        compared = [find_policy(name) for name in options.policy]
    except ValueError as error:
        parser.error(f"--policy: {error}")
    try:
        workloads = list(_workloads(options))
    except (TraceError, OSError) as error:
        parser.error(f"--trace: {error}")
    if options.tier:
        return _replay_below(options, workloads)
    if options.halves:
        return _replay_halves(options, workloads)
    if options.gpu:
        return _replay_above(options, workloads)
    notes = report.load_note()
    for note in notes:
        print(note)
    began = time.monotonic()
    try:
        rows = [row for workload in workloads for row in _replay(workload, compared, options)]
    finally:
        gc.unfreeze()
    asked = [row for row in rows if row["policy"] in options.policy]
    lines = [line for line in summary(rows) if line["policy"] in options.policy]
    for table in format_tables(asked):
        print("\n" + table)
    print("\nover all traces and capacities, against leaf-LRU\n" + format_summary(lines))
    _write(options, workloads, asked, notes=notes, summary=lines, run_seconds=round(time.monotonic() - began))
    return 0


def _replay_below(options: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    rows = []
    for workload in workloads:
        for row in rows_below(workload, options.capacity, options.tier, options.block_tokens):
            rows.append(row)
            print(f"  {row}", file=sys.stderr, flush=True)
    print(format_below(rows))
    report.write(options.json, rows, settings=_settings(options))
    return 0


def _replay_halves(options: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    rows = []
    for workload in workloads:
        for row in rows_of_halves(workload, options.capacity, options.block_tokens):
            rows.append(row)
            print(f"  {row}", file=sys.stderr, flush=True)
    print(format_halves(rows))
    report.write(options.json, rows, settings=_settings(options))
    return 0


def _replay_above(options: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    rows = []
    for workload in workloads:
        sizes = options.gpu, options.gpu_pools, options.gpu_window
        for row in rows_above(workload, *sizes, options.block_tokens, has_scheduler=options.gpu_scheduler):
            rows.append(row)
            print(f"  {row}", file=sys.stderr, flush=True)
    print(format_above(rows))
    report.write(options.json, rows, settings=_settings(options))
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {**settings_of(options), "trace": [Path(each).stem for each in options.trace]}


def _workloads(options: argparse.Namespace) -> Iterator[Workload]:
    traces: list[Workload] = []
    for given in options.trace:
        if given == _CYCLE:
            yield cycle(options.documents, options.pool_documents, options.passes, options.document_blocks)
            continue
        trace = read_workload(Path(given), options.requests)
        if trace.name in [each.name for each in traces]:
            raise TraceError(
                f"{given}: another trace is called {trace.name!r} too; give it another file name"
            )
        traces.append(trace)
        yield trace
    for trace in traces if options.draws else ():
        yield from redrawn(trace, options.draws)
    if options.mix:
        scales = SCALES if not options.gpu else ()
        yield from mixtures(traces, scales)


def _replay(workload: Workload, compared: Sequence[Policy], options: argparse.Namespace) -> Iterator[Row]:
    model = PrefillModel(options.prefill_us_per_token / 1e6, options.prefill_ns_per_pair / 1e9)
    timer = _TIMERS[options.timer]
    arguments = (compared, options.capacity, options.block_tokens, model, options.rounds, timer)
    for row in compare(workload, *arguments):
        yield row
        if row["pass"] is None:
            spent = row["us_per_access"]
            timed = "" if spent is None else f", {spent:.2f} us per block"
            what = f"{row['trace']}, {row['capacity_fraction']:.1%}, {row['policy']}"
            print(f"  {what}: {row['hit_rate']:.2%}{timed}", file=sys.stderr, flush=True)


def _write(
    options: argparse.Namespace, workloads: Sequence[Workload], rows: Sequence[Row], **more: Any
) -> None:
    report.write(options.json, rows, settings=_settings(options), **more)
    plot = options.plot or (options.json and options.json.with_suffix(".png"))
    if plot:
        shown = {workload.name for workload in workloads if not workload.is_mixture}
        title = f"Hits in the CPU pool, blocks of {options.block_tokens} tokens"
        write_plot(plot, [row for row in rows if row["trace"] in shown], title)
        print(f"plot: {plot}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("trace_replay", __doc__)
    add = parser.add_argument
    add("--trace", nargs="+", default=[_CYCLE], metavar=f"FILE|{_CYCLE}", help=f"default: {_CYCLE}")
    add("--mix", action="store_true", help="mixtures of the traces given, too")
    names = policies.known_names()
    add(
        "--policy",
        type=lambda text: list(dict.fromkeys(text.split(","))),
        default=names,
        metavar="NAME,...",
        help=f"default: {','.join(names)}",
    )
    add(
        "--capacity",
        type=_fractions,
        default=[0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8],
        metavar="F,...",
        help="of pools, as fractions of the distinct blocks (default: 0.01,0.02,0.03,0.05,0.1,0.2,0.4,0.8)",
    )
    add(
        "--block-tokens",
        type=_block_tokens,
        default=IDS_BLOCK_TOKENS,
        metavar="N",
        help=f"of a block; each id of a trace becomes {IDS_BLOCK_TOKENS}/N (default: {IDS_BLOCK_TOKENS})",
    )
    add("--tier", type=_times, default=[], metavar="N,...", help="sizes of tiers, in sizes of the pool")
    add("--halves", action="store_true", help="learn from half of the sessions, be judged by the others")
    add("--gpu", type=_fractions, default=[], metavar="F,...", help="sizes of the GPU's cache above the pool")
    add("--draws", type=at_least(0), default=0, metavar="N", help="other starts of sessions (default: 0)")
    add("--requests", type=positive, metavar="N", help="only the first N of each trace (default: all)")
    add_numbers(parser, ("rounds", 1, "medians of their times are told"))
    add("--timer", choices=_TIMERS, default="cpu", help="of this thread, or of the wall (default: cpu)")
    add("--plot", type=Path, metavar="FILE", help="write a PNG (default: beside the JSON)")
    above = parser.add_argument_group("--gpu").add_argument
    above(
        "--gpu-pools",
        type=_times,
        default=[1.0, 2.0, 4.0, 8.0],
        metavar="N,...",
        help="sizes of pools, in sizes of the GPU's cache (default: 1,2,4,8)",
    )
    above("--gpu-scheduler", action="store_true", help="vLLM's real scheduler as well, in each mode")
    above(
        "--gpu-window",
        type=_fractions,
        default=[0.01, 0.1],
        metavar="F,...",
        help="of the GPU's cache, which is copied before it is evicted (default: 0.01,0.1)",
    )
    add_numbers(
        parser.add_argument_group(f"--trace {_CYCLE}"),
        ("documents", 64, "asked one after the other"),
        ("pool-documents", 30, "that the pool has room for"),
        ("passes", 8, "over all documents"),
        ("document-blocks", 20, f"of a document, of {IDS_BLOCK_TOKENS} tokens"),
    )
    model = PrefillModel()
    add_numbers(
        parser.add_argument_group("model of prefill on a GPU (see benchmarks.trace_replay.prefill)"),
        ("prefill-us-per-token", model.seconds_per_token * 1e6, "that every token takes", none_below_zero),
        ("prefill-ns-per-pair", model.seconds_per_pair * 1e9, "that a pair of tokens takes", none_below_zero),
    )
    return parser


def _fractions(text: str) -> list[float]:
    found = {none_below_zero(part) for part in text.split(",")}
    if not all(0 < each <= 1 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: must be fractions above 0, at most 1")
    return sorted(found)


def _times(text: str) -> list[float]:
    return sorted({above_zero(part) for part in text.split(",")})


def _block_tokens(text: str) -> int:
    value = positive(text)
    if IDS_BLOCK_TOKENS % value:
        raise argparse.ArgumentTypeError(f"{value}: must divide {IDS_BLOCK_TOKENS}")
    return value


if __name__ == "__main__":
    sys.exit(main())
