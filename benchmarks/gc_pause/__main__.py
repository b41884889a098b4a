"""How long does a garbage collection stop the engine for our bookkeeping, and how much memory has a slot?

    python -m benchmarks.gc_pause [--slots 1000000] [--chains 1 8 64 1000] [--policies hazard lru]
                                  [--json FILE]

CPython visits every object that may refer to others, and all that it refers to, in each collection of the
oldest generation. Nothing else runs meanwhile. Each case is a process of its own:

1. it imports what the engine core imports of ours and freezes the heap as vLLM does after its start
   (`gc.collect` of each generation, then `gc.freeze`);
2. collections of the oldest generation are timed: the *base*, without our bookkeeping;
3. an allocator with the policy inside `HintedPolicy`, as the connector makes it, is filled and churned: new
   chains of random length with that mean, until six times its slots have been asked for and stored. Each
   tenth request asks for an earlier chain again;
4. collections are timed again. *pause* is their median less that of the base.

Bytes per slot: what the process has grown in memory since (2), by the slots; tree, pool, policy and its
history together. The longest call is that of one request: lookup, touch, plan and commit. Its processor time
stands beside it, because a busy machine interrupts a process for longer than any call takes. The longest ones
are those in which the dict of the tree's index grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from allocator import CpuOffloadingBlockAllocator, serve
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.tables import Column, table
from evictor import HintedPolicy, available_policies, make_policy

__all__ = ["main"]

_TURNS = 6
_AGAIN_SHARE = 0.1
_COLLECTIONS = 7
_COLUMNS = (
    Column("policy", "policy"),
    Column("mean chain", "mean_chain"),
    Column("nodes", "nodes"),
    Column("pause ms", "pause_ms", ".2f"),
    Column("base ms", "base_ms", ".2f"),
    Column("bytes per slot", "bytes_per_slot"),
    Column("longest request ms", "longest_request_ms", ".1f"),
    Column("most processor ms", "longest_request_processor_ms", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.case is not None:
        print(json.dumps(_case(*args.case)))
        return 0
    rows = []
    for policy in args.policies:
        for chain in args.chains:
            rows.append(_in_child(policy, chain, args.slots))
            print(table(_COLUMNS, rows[-1:]), flush=True)
    print(table(_COLUMNS, rows))
    report.write(args.json, rows, slots=args.slots, turns=_TURNS)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("gc_pause", __doc__)
    add_numbers(parser, ("slots", 1_000_000, "of the pool"))
    parser.add_argument(
        "--chains", type=int, nargs="+", default=[1, 8, 64, 1000], help="mean lengths in blocks"
    )
    parser.add_argument("--policies", nargs="+", choices=available_policies(), default=["hazard", "lru"])
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    return parser


def _in_child(policy: str, chain: int, slots: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gc_pause", "--case", policy, str(chain), str(slots)]
    row: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return row


def _case(policy: str, chain: str, slots: str) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    mean_chain, capacity = int(chain), int(slots)
    process = psutil.Process()
    _freeze()
    base_ms = _collection_ms()
    memory = process.memory_info().rss
    allocator = CpuOffloadingBlockAllocator(
        capacity, policy=HintedPolicy(make_policy(policy, capacity), capacity // 4, time.monotonic)
    )
    longest, processor = _churn(allocator, mean_chain)
    pause_ms = _collection_ms()
    return {
        "policy": policy,
        "mean_chain": mean_chain,
        "slots": capacity,
        "nodes": sum(1 for _ in allocator._tree.nodes()),
        "tracked_objects": len(gc.get_objects()),
        "pause_ms": round(pause_ms - base_ms, 3),
        "base_ms": round(base_ms, 3),
        "bytes_per_slot": round((process.memory_info().rss - memory) / capacity),
        "longest_request_ms": round(longest * 1e3, 2),
        "longest_request_processor_ms": round(processor * 1e3, 2),
    }


def _freeze() -> None:
    """As `vllm.utils.gc_utils.freeze_gc_heap`."""
    for generation in range(3):
        gc.collect(generation)
    gc.freeze()


def _collection_ms() -> float:
    gc.collect()
    times = []
    for _ in range(_COLLECTIONS):
        begin = time.perf_counter()
        gc.collect()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def _churn(allocator: CpuOffloadingBlockAllocator, mean_chain: int) -> tuple[float, float]:
    """Ask for and store chains until six times the pool has come by.

    Returns seconds of the longest request, and of the one that took most of the processor's time.
    """
    rng, blocks = random.Random(0), random.Random(1)
    recent: list[list[bytes]] = []
    num_new, longest, processor = 0, 0.0, 0.0
    while num_new < _TURNS * allocator.capacity:
        if recent and rng.random() < _AGAIN_SHARE:
            chain = rng.choice(recent)
        else:
            size = max(1, math.ceil(rng.expovariate(1 / mean_chain)) if mean_chain > 1 else 1)
            chain = fresh_hashes(blocks, size)
            num_new += size
            recent.append(chain)
            if len(recent) > 100:
                recent.pop(rng.randrange(100))
        begin, processor_begin = time.perf_counter(), time.process_time()
        serve(allocator, chain)
        processor = max(processor, time.process_time() - processor_begin)
        longest = max(longest, time.perf_counter() - begin)
    return longest, processor


if __name__ == "__main__":
    sys.exit(main())
