"""What does it cost a step when the pool is made smaller, or larger?

    python -m benchmarks.resizing [--slots 1000000] [--chains 8 64 1000] [--json FILE]

A pool full of chains of one length, under `hazard`, is made half as large, and then as large as it was.
Its memory goes slot by slot, as where it is not pinned, or in units of 2,048 slots: 256 MiB of 128 KiB each.
Ranks do at once what they are told. Milliseconds of the scheduler's thread: the median step and the longest,
and how many steps it takes.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from allocator import CpuOffloadingBlockAllocator, serve
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.stopwatch import frozen_heap, processor_seconds
from benchmarks.common.tables import Column, table
from evictor import HintedPolicy, make_policy
from offload.messages import Resized
from offload.scheduler.pool_target import PoolBounds, PoolTarget
from offload.scheduler.resizing import PoolResizing

__all__ = ["main"]

_UNITS = (1, 2048)
_COLUMNS = (
    Column("chain", "chain"),
    Column("unit", "unit_slots"),
    Column("to", "to"),
    Column("steps", "steps"),
    Column("median ms", "median_ms"),
    Column("longest ms", "longest_ms"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("resizing", __doc__)
    add_numbers(parser, ("slots", 1_000_000, "of the pool"))
    parser.add_argument("--chains", type=int, nargs="+", default=[8, 64, 1000], help="lengths in blocks")
    args = parser.parse_args(argv)
    rows = [
        row for length in args.chains for unit in _UNITS for row in _there_and_back(args.slots, length, unit)
    ]
    print(table(_COLUMNS, rows))
    report.write(args.json, rows, slots=args.slots)
    return 0


def _there_and_back(slots: int, length: int, unit: int) -> list[dict[str, Any]]:
    policy = HintedPolicy(make_policy("hazard", slots), slots // 4, time.monotonic)
    allocator, rng = CpuOffloadingBlockAllocator(slots, policy=policy), random.Random(0)
    for _ in range(slots // length):
        serve(allocator, fresh_hashes(rng, length))
    target = PoolTarget(lambda num_bytes: None)
    bounds = PoolBounds(1.0, 1.0, slots, slots, unit, 1, 1 << 17)
    resizing = PoolResizing(allocator, target, bounds, 1, lambda: None, time.monotonic)

    def step() -> None:
        for order in resizing.step():
            resizing.hear({order.number: Resized(1)})
        allocator.tidy()

    rows = []
    for to, gib in (("half", 0.5), ("whole", 1.0)):
        target.ask(gib)
        seconds = []
        with frozen_heap():
            while target.told["gib"] != target.told["target_gib"] or resizing.is_moving:
                seconds.append(processor_seconds(step))
        rows.append(
            {
                "chain": length,
                "unit_slots": unit,
                "to": to,
                "steps": len(seconds),
                "median_ms": round(1e3 * statistics.median(seconds), 2),
                "longest_ms": round(1e3 * max(seconds), 2),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
