"""What do requests cost that leave a document at many places, and what is left of that when they are gone?

    python -m benchmarks.splits [--blocks 16384] [--every 4] [--policies hazard lru] [--json FILE]

One document of that many blocks is stored and asked for. Then a request leaves it after every so many blocks,
and its own block is stored there: the document is in that many pieces. Then those blocks are dropped one by
one, and the document is asked for again. At each of these times, in milliseconds of the processor:

- touch: what an admitted request costs the policy; median of several.
- pin and unpin: what a restore of all of it costs the allocator.
- mending: the touch that begins to make the pieces one again, after the last of the others is gone, or the
  longest of the steps after it, which go on with that; and how many steps it takes.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from allocator import CpuOffloadingBlockAllocator, serve
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.stopwatch import processor_seconds
from benchmarks.common.tables import Column, table
from evictor import HintedPolicy, available_policies, make_policy

__all__ = ["main"]

_TIMES = 9
_COLUMNS = (
    *(Column(name, name) for name in ("policy", "state", "segments")),
    Column("touch ms", "touch_ms"),
    Column("pin and unpin ms", "pin_ms"),
    Column("mending ms", "mending_ms"),
    Column("steps", "mending_steps"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("splits", __doc__)
    every = "blocks from one request that leaves it to the next"
    add_numbers(parser, ("blocks", 16_384, "of the document"), ("every", 4, every))
    parser.add_argument("--policies", nargs="+", choices=available_policies(), default=["hazard", "lru"])
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    rows = [row for policy in args.policies for row in _measure(policy, args.blocks, args.every)]
    print(table(_COLUMNS, rows))
    report.write(args.json, rows, blocks=args.blocks, every=args.every)
    return 0


def _measure(policy: str, num_blocks: int, every: int) -> list[dict[str, Any]]:
    capacity = 4 * num_blocks
    inner = make_policy(policy, capacity)
    allocator = CpuOffloadingBlockAllocator(capacity, policy=HintedPolicy(inner, num_blocks, time.monotonic))
    rng = random.Random(0)
    document = fresh_hashes(rng, num_blocks)
    serve(allocator, document)
    rows = [_row(allocator, document, policy, "one segment")]
    depths = range(every, num_blocks, every)
    others = [[*document[:depth], *fresh_hashes(rng, 1)] for depth in depths]
    for chain in others:
        serve(allocator, chain)
    rows.append(_row(allocator, document, policy, "others leave it"))
    for depth, chain in zip(depths, others, strict=True):
        allocator.drop(chain, depth)
        allocator.tidy()
    mending = _mend(allocator, document)
    return [*rows, _row(allocator, document, policy, "they are gone") | mending]


def _mend(allocator: CpuOffloadingBlockAllocator, document: list[bytes]) -> dict[str, Any]:
    """Ask for the document once, and step on until its pieces are one, or no step brings them nearer."""
    steps = [processor_seconds(lambda: allocator.touch(document))]
    before, num_pieces = math.inf, _num_segments(allocator, document)
    while 1 < num_pieces < before:
        steps.append(processor_seconds(allocator.tidy))
        before, num_pieces = num_pieces, _num_segments(allocator, document)
    return {"mending_ms": round(max(steps) * 1e3, 3), "mending_steps": len(steps)}


def _num_segments(allocator: CpuOffloadingBlockAllocator, document: list[bytes]) -> int:
    return len(allocator._tree.path(allocator._tree.find(document, len(document)).node))


def _row(
    allocator: CpuOffloadingBlockAllocator, document: list[bytes], policy: str, state: str
) -> dict[str, Any]:
    touch = _median_ms(lambda: allocator.touch(document))
    pin = _median_ms(lambda: allocator.unpin(allocator.pin(document, 0, len(document))))
    return {
        "policy": policy,
        "state": state,
        "segments": _num_segments(allocator, document),
        "touch_ms": round(touch, 3),
        "pin_ms": round(pin, 3),
    }


def _median_ms(call: Callable[[], object]) -> float:
    return statistics.median(processor_seconds(call) for _ in range(_TIMES)) * 1e3


if __name__ == "__main__":
    sys.exit(main())
