"""What does it cost a step when hundreds of thousands of slots change at once?

    python -m benchmarks.storms [--slots 300000] [--chains 8 64 1000] [--json FILE]

A pool of the allocator, full of chains of one length. Milliseconds of the step in which it happens, of the
longest step after it, and how many steps it takes, with `tidy` in each:

- `unpin`: loads of all chains end; `unpin after reset`: the pool was reset meanwhile. `at once` is what the
  allocator's own calls would take in one step; `carried over` is what the connector does.
- `drop`: all loads failed, at the first block of each chain.
- `reset`, without and with KV events recorded.
- `bites`: one chain of all slots loses its tail, 100 at a time: microseconds of a bite.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from allocator import CpuOffloadingBlockAllocator
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.stopwatch import frozen_heap, processor_seconds
from benchmarks.common.tables import Column, table
from offload.scheduler.carryover import Carryover

__all__ = ["main"]

_BITES = 200
_COLUMNS = (
    Column("storm", "storm"),
    Column("chain", "chain"),
    Column("first step ms", "first_step_ms"),
    Column("longest later ms", "longest_later_ms"),
    Column("steps", "steps"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("storms", __doc__)
    add_numbers(parser, ("slots", 300_000, "of the pool"))
    parser.add_argument("--chains", type=int, nargs="+", default=[8, 64, 1000], help="lengths in blocks")
    args = parser.parse_args(argv)
    rows = [row for length in args.chains for row in _storms(args.slots, length)]
    rows.append(_bites(args.slots))
    print(table(_COLUMNS, rows))
    report.write(args.json, rows, slots=args.slots)
    return 0


def _storms(slots: int, length: int) -> list[dict[str, Any]]:
    rows = []
    for label, carries_over in (("at once", False), ("carried over", True)):
        for is_reset in (False, True):
            allocator, chains = _full(slots, length)
            pins = [allocator.pin(chain, 0, length) for chain in chains]
            if is_reset:
                allocator.reset()
                _until_tidy(allocator)
            carryover = Carryover(allocator)
            unpin = carryover.unpin if carries_over else allocator.unpin
            name = f"unpin{' after reset' if is_reset else ''}, {label}"
            rows.append(_row(name, length, partial(_each, unpin, pins), allocator, carryover))
        allocator, chains = _full(slots, length)
        carryover = Carryover(allocator)
        drop = partial(_drop_from_start, carryover.drop if carries_over else allocator.drop)
        rows.append(_row(f"drop, {label}", length, partial(_each, drop, chains), allocator, carryover))
    for has_events in (False, True):
        allocator, _ = _full(slots, length, has_events)
        name = "reset with events" if has_events else "reset"
        rows.append(_row(name, length, allocator.reset, allocator, Carryover(allocator)))
    return rows


def _full(
    slots: int, length: int, has_events: bool = False
) -> tuple[CpuOffloadingBlockAllocator, list[list[bytes]]]:
    allocator = CpuOffloadingBlockAllocator(slots, record_events=has_events)
    chains, rng = [], random.Random(0)
    for _ in range(slots // length):
        chains.append(fresh_hashes(rng, length))
        plan = allocator.plan_store(chains[-1], length)
        assert plan is not None
        allocator.commit(plan)
    allocator.take_events()
    allocator.tidy()
    return allocator, chains


def _row(
    name: str,
    length: int,
    storm: Callable[[], object],
    allocator: CpuOffloadingBlockAllocator,
    carryover: Carryover,
) -> dict[str, Any]:
    def step() -> None:
        carryover.tidy()
        allocator.tidy()
        allocator.take_events()

    with frozen_heap():
        steps = [processor_seconds(lambda: (storm(), step()))]
        while len(carryover) or allocator._tree.has_dead:
            steps.append(processor_seconds(step))
    return {
        "storm": name,
        "chain": length,
        "first_step_ms": round(1e3 * steps[0], 2),
        "longest_later_ms": round(1e3 * max(steps[1:], default=0.0), 2),
        "steps": len(steps),
    }


def _bites(slots: int) -> dict[str, Any]:
    allocator, _ = _full(slots, slots)
    seconds = [processor_seconds(lambda: allocator.evict(100)) for _ in range(_BITES)]
    return {
        "storm": f"bite of 100 to {100 + slots // 1024}: first, median",
        "chain": slots,
        "first_step_ms": round(1e3 * seconds[0], 3),
        "longest_later_ms": round(1e3 * statistics.median(seconds), 3),
        "steps": _BITES,
    }


def _each(call: Callable[[Any], object], arguments: Sequence[Any]) -> None:
    for argument in arguments:
        call(argument)


def _drop_from_start(drop: Callable[[Sequence[bytes], int], None], chain: Sequence[bytes]) -> None:
    drop(chain, 0)


def _until_tidy(allocator: CpuOffloadingBlockAllocator) -> None:
    while allocator._tree.has_dead:
        allocator.tidy()
    allocator.tidy()


if __name__ == "__main__":
    sys.exit(main())
