"""How much of what a fleet has does it find, how even is its load, and what does the choice cost?

    python -m benchmarks.fleet [--trace FILE...] [--engines 8,64,256] [--policy NAME,...] [--json FILE]

A simulation. Each engine has the connector's own allocator with the default policy, a pool of `--pool-blocks`
blocks of 512 tokens, and computes one prompt at a time: a constant per token, and one per pair of tokens. A
token of an answer takes 20 ms. Requests are those of traces of prefix hashes (see `offload.observe.trace`).
The trace is copied until there are `--per-engine` requests for each engine, each copy with blocks of its own.
It is played so fast that prefill would take `--load` of all engines' time if nothing were found.

What chooses is the proxy's own policy, called as the proxy calls it, with what the proxy knows: requests that
run, prompt tokens that wait for their first token, and what the policy itself has learned or asked for.

- round_robin, least_load: these policies of the proxy.
- prefix: by what the policy remembers of where prompts went.
- trees: by asking all engines how much of the prompt they have.
- events: by what engines publish of their pools, `--events-after` seconds later.

`of one pool` compares with a single pool as large as all together, in which each request is complete before
the next one comes. `KiB per engine` is what the policy keeps, as Python allocates it. Garbage collection is
on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from allocator import CpuOffloadingBlockAllocator, serve
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, none_below_zero, one_of, parser_of, settings_of
from benchmarks.fleet.choosers import POLICIES, chooser_of
from benchmarks.fleet.engines import Asked, FleetEngine
from benchmarks.fleet.load import Load, conversations, load_of, read_load_trace
from benchmarks.fleet.rows import Row, format_tables, row_of
from benchmarks.fleet.simulation import Simulation
from benchmarks.trace_replay.replay import TraceClock, freeze_garbage
from evictor import make_policy
from offload.config import DEFAULT_POLICY
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceError
from offload.sizing.capacity import chains_of

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all fleets, print tables, write rows; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    try:
        traces = {_name(path): read_load_trace(path) for path in options.trace}
        traces = traces or {"talks": conversations(600, 5, 0)}
    except (TraceError, OSError) as error:
        parser.error(f"--trace: {error}")
    notes = report.load_note()
    rows: list[Row] = []
    for name, trace in traces.items():
        for engines in options.engines:
            load = load_of(name, trace, engines, options.per_engine, options.load)
            rows += _fleet(load, engines, options)
    for text in format_tables(rows):
        print("\n" + text)
    settings = {**settings_of(options), "trace": list(traces)}
    report.write(options.json, rows, settings=settings, notes=notes)
    return 0


def _fleet(load: Load, engines: int, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all policies with one load."""
    chains = chains_of(load.requests)
    one = _found_by_one(load, chains, options.pool_blocks * engines)
    for policy in options.policy:
        began = time.monotonic()
        row = _run(load, chains, engines, policy, options)
        row = {
            "trace": load.trace,
            "copies": load.copies,
            "speed": round(load.speed, 2),
            "policy": policy,
            **row,
        }
        row |= {"found_by_one": one, "seconds": round(time.monotonic() - began, 1)}
        print(f"  {row}", file=sys.stderr, flush=True)
        yield row


def _found_by_one(load: Load, chains: Sequence[Sequence[bytes]], pool_blocks: int) -> float:
    """The share of all prompt tokens that one pool finds, each request complete before the next one comes."""
    clock = TraceClock()
    allocator = CpuOffloadingBlockAllocator(
        pool_blocks, policy=make_policy(DEFAULT_POLICY, pool_blocks, clock)
    )
    found = 0
    for chain, each in zip(chains, load.requests, strict=True):
        clock.seconds = each.timestamp_seconds
        found += serve(allocator, chain).depth * IDS_BLOCK_TOKENS
    return round(found / sum(each.input_length for each in load.requests), 4)


def _run(
    load: Load,
    chains: Sequence[Sequence[bytes]],
    engines: int,
    policy: str,
    options: argparse.Namespace,
) -> Row:
    clock = TraceClock()
    has_events = policy == "events"
    fleet = [
        FleetEngine.make(f"http://e{at}", options.pool_blocks, clock, has_events) for at in range(engines)
    ]
    asked = [
        Asked(number, chain, each.input_length, each.output_length, each.timestamp_seconds)
        for number, (chain, each) in enumerate(zip(chains, load.requests, strict=True))
    ]
    freeze_garbage()
    try:
        chooser = chooser_of(policy, fleet)
        asyncio.run(Simulation(fleet, chooser, clock, options.events_after).run(asked))
        for engine in fleet:
            engine.check()
        row = row_of(asked, fleet, chooser.spent_ns)
        row["kib_per_engine"] = round(chooser.num_bytes() / 1024 / engines, 1)
        if chooser.num_events:
            row["events_per_request"] = round(chooser.num_events / len(asked), 2)
            row["us_per_request_for_events"] = round(chooser.told_ns / 1e3 / len(asked), 1)
        return row
    finally:
        gc.unfreeze()


def _name(path: Path) -> str:
    return path.stem.removesuffix("_trace")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fleet", __doc__)
    add = parser.add_argument
    add("--trace", nargs="+", type=Path, default=[], metavar="FILE", help="default: 600 talks of 5 turns")
    add("--engines", type=_counts, default=[8, 64, 256], metavar="N,...", help="default: 8,64,256")
    add(
        "--policy",
        type=one_of(POLICIES),
        default=POLICIES,
        metavar="NAME,...",
        help=f"default: {','.join(POLICIES)}",
    )
    add_numbers(
        parser,
        ("per-engine", 40, "requests of each engine, at least"),
        ("pool-blocks", 1024, "of an engine, of 512 tokens each: 64 GiB with 128 KiB a token"),
        ("load", 0.7, "of the engines' time that prefill takes if nothing is found"),
        ("events-after", 0.2, "seconds until a change of a pool is known", none_below_zero),
    )
    return parser


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas between")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
