"""What do checksums cost: sealing slots when a store ends, verifying blocks when a load brings them up?

    python -m benchmarks.verification [--blocks 16 256 1024] [--mib 512] [--seconds 0.5] [--json FILE]

The real transfer engine, copier, seals and pool run without an engine around them. Jobs go in as the
connector submits them (a load in parts, all at once), and the calling thread polls until all have ended.
Cases:

- direction: load (verify_loads = never, sampled, always) and store (never, always; sampled seals all too).
- shape: how many bytes a block has, in how many pieces, and blocks per load or store. Each round takes
  other blocks and slots than the one before, so that as a rule neither is in the processor's cache.
- copies: `cpu`, between two places in host memory, with checksums of the blocks (`of_blocks`, as on a CPU
  engine) or of the slots; `N GB/s`, a copier that copies nothing and ends when one with that bandwidth
  would have, a stand-in for a GPU's copy engine, with checksums of the slots; `cuda`, where there is a GPU.

The settings take turns, in another order each round. Per case and setting:

- ms: from `load` or `store` to the last end that was polled, median over the rounds.
- share of restore: median over the rounds of (ms - ms with never) / ms with never.
- CPU ms: spent on threads other than the caller's, which an engine with free cores does not see in its time.
  The summary has what is beyond that of never, per GiB moved.
- longest pause between two polls, median over the rounds. The calling thread polls every 0.05 ms, so the rest
  is waiting for the interpreter lock, or for a core.

A real engine polls once per step, so what it waits is rounded up to a step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, settings_of
from benchmarks.verification.cases import MIB, SHAPES
from benchmarks.verification.measure import measure
from benchmarks.verification.memories import has_gpu
from benchmarks.verification.tables import format_tables

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; returns 0."""
    options = _parser().parse_args(arguments)
    notes = report.load_note()
    if not has_gpu():
        notes.append("cuda: not measured, no GPU here")
    pairs = [
        (shape, blocks)
        for shape, blocks in itertools.product(SHAPES, options.blocks)
        if shape.block_bytes * blocks <= options.mib * MIB
    ]
    started, busy_before = time.perf_counter(), _others_cpu_seconds()
    rows = measure(pairs, options.bandwidths, options.seconds)
    others = (_others_cpu_seconds() - busy_before) / (time.perf_counter() - started)
    notes.append(f"during the run other work kept {others:.1f} of {psutil.cpu_count()} cores busy")
    print(format_tables(rows))
    print()
    for note in notes:
        print(note)
    report.write(options.json, rows, settings=settings_of(options), notes=notes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("verification", __doc__)
    add = parser.add_argument
    add("--blocks", type=int, nargs="+", default=[16, 256, 1024], metavar="N", help="per load or store")
    add("--mib", type=int, default=512, metavar="M", help="leave larger loads and stores out (default: 512)")
    add("--bandwidths", type=float, nargs="*", default=[25, 50], metavar="GB/S", help="of pretended copies")
    add("--seconds", type=float, default=0.5, metavar="S", help="for each case, about (default: 0.5)")
    return parser


def _others_cpu_seconds() -> float:
    """CPU seconds that this machine has spent so far on anything but this process."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    return float(sum(times) - idle - time.process_time())


if __name__ == "__main__":
    sys.exit(main())
