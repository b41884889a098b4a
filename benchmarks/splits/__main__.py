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
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from allocator import CpuOffloadingBlockAllocator, serve
from benchmarks.common import report
from benchmarks.common.arguments import parser_of
from benchmarks.common.tables import Column, table
from evictor import HintedPolicy, available_policies, make_policy

__all__ = ["main"]

_HASH_BYTES = 32
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
    parser.add_argument("--blocks", type=int, default=16_384, help="of the document (default %(default)s)")
    parser.add_argument(
        "--every", type=int, default=4, help="blocks from one request that leaves it to the next"
    )
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
    document = [os.urandom(_HASH_BYTES) for _ in range(num_blocks)]
    serve(allocator, document)
    rows = [_row(allocator, document, policy, "one segment")]
    depths = range(every, num_blocks, every)
    others = [[*document[:depth], os.urandom(_HASH_BYTES)] for depth in depths]
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
    steps = [_ms(lambda: allocator.touch(document))]
    before, num_pieces = math.inf, _num_segments(allocator, document)
    while 1 < num_pieces < before:
        steps.append(_ms(allocator.tidy))
        before, num_pieces = num_pieces, _num_segments(allocator, document)
    return {"mending_ms": round(max(steps), 3), "mending_steps": len(steps)}


def _num_segments(allocator: CpuOffloadingBlockAllocator, document: list[bytes]) -> int:
    return len(allocator._tree.path(allocator._tree.find(document, len(document)).node))


def _row(
    allocator: CpuOffloadingBlockAllocator, document: list[bytes], policy: str, state: str
) -> dict[str, Any]:
    touch = statistics.median(_ms(lambda: allocator.touch(document)) for _ in range(_TIMES))
    pin = statistics.median(
        _ms(lambda: allocator.unpin(allocator.pin(document, 0, len(document)))) for _ in range(_TIMES)
    )
    return {
        "policy": policy,
        "state": state,
        "segments": _num_segments(allocator, document),
        "touch_ms": round(touch, 3),
        "pin_ms": round(pin, 3),
    }


def _ms(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3


if __name__ == "__main__":
    sys.exit(main())
