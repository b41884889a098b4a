"""How soon does an engine have a pool again that outlived the one before?

    python -m benchmarks.pool_restart [--mib 2048] [--beside-mib 512] [--path DIR] [--times 5] [--json FILE]

A region in shared memory is made, filled with chains of 1,000 blocks, and adopted again, as a worker does it:
mapped, its rows checked, its pages had. Then the scheduler's side puts chains together and hands them to a
fresh allocator. Told are medians, in seconds, for blocks of two sizes, beside making the region. What a later
load reads to prove it is not in it.

Then two engines of a smaller pool run beside each other. One asks what the other has, which makes its index
of that, and fetches all of it, verified. Beside that the same bytes are copied by NumPy, in turns.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allocator import CpuOffloadingBlockAllocator
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.pool_restart.beside import fetch_row
from offload.messages import EPOCH_SHIFT, Fingerprint, Kept, WorkerFacts
from offload.naming import WIDTH_SHIFT
from offload.scheduler.adoption import adopt
from offload.scheduler.groups import Group, Groups, Kind
from offload.worker.pool.region import RegionPlan
from offload.worker.replicas import ONE, Sharing, share_pool

__all__ = ["main"]

_CHAIN = 1000
_SIZES = (128 << 10, 2 << 20)
_GROUPS = Groups([Group(Kind.FULL, 16)], 16)
_COLUMNS = (
    Column("KiB of a block", "block_kib"),
    Column("blocks", "blocks", ","),
    Column("made, s", "made", ".3f"),
    Column("adopted by a worker, s", "adopted", ".3f"),
    Column("known to the scheduler, s", "known", ".3f"),
    Column("asked, s", "asked", ".4f"),
    Column("fetched, s/GiB", "fetched", ".3f"),
    Column("NumPy copies, s/GiB", "copied", ".3f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("pool_restart", __doc__)
    parser.add_argument("--path", default="/dev/shm", metavar="DIR", help="in memory (default: %(default)s)")
    add_numbers(
        parser,
        ("mib", 2048, "of the pool"),
        ("beside-mib", 512, "of each of two"),
        ("times", 5, "that each is done"),
    )
    options = parser.parse_args(argv)
    rows = [
        _row(options.path, options.mib << 20, size, options.times)
        | fetch_row(options.path, options.beside_mib << 20, size, options.times)
        for size in _SIZES
    ]
    print(table(_COLUMNS, rows))
    report.write(options.json, rows, settings=settings_of(options))
    return 0


def _row(path: str, num_bytes: int, slot_bytes: int, times: int) -> dict[str, Any]:
    facts = WorkerFacts(num_bytes // slot_bytes, slot_bytes, Fingerprint("", "", 1, 16, "", ""))
    spent: dict[str, list[float]] = {"made": [], "adopted": [], "known": []}
    for _ in range(times):
        folder = Path(tempfile.mkdtemp(prefix="pool-restart-", dir=path))
        try:
            _once(RegionPlan(folder, "benchmark", 0, 1), facts, spent)
        finally:
            shutil.rmtree(folder)
    medians = {name: statistics.median(each) for name, each in spent.items()}
    return {"block_kib": slot_bytes >> 10, "blocks": facts.num_slots, **medians}


def _once(plan: RegionPlan, facts: WorkerFacts, spent: dict[str, list[float]]) -> None:
    began = time.perf_counter()
    first = share_pool(ONE, facts, plan=plan)
    spent["made"].append(time.perf_counter() - began)
    _fill(first, facts.num_slots)
    began = time.perf_counter()
    second = share_pool(ONE, facts, plan=plan)
    spent["adopted"].append(time.perf_counter() - began)
    assert second.lasting is not None
    began = time.perf_counter()
    adoption = adopt([second.lasting.facts], facts.num_slots, _GROUPS)
    adoption.into(CpuOffloadingBlockAllocator(facts.num_slots, order=adoption.order))
    spent["known"].append(time.perf_counter() - began)
    assert adoption.num_slots == facts.num_slots
    second.lasting.close()


def _fill(held: Sharing, num_slots: int) -> None:
    """Rows of all slots; then the engine ends."""
    assert held.lasting is not None and held.tables is not None
    slots = np.arange(num_slots)
    generations = held.lasting.facts.epoch << EPOCH_SHIFT | slots // 100
    names = np.random.default_rng(0).integers(0, 256, (num_slots, 32), dtype=np.uint8)
    parents = np.roll(names, 1, axis=0)
    parents[::_CHAIN] = 0
    held.tables.fills[slots] = generations
    held.lasting._table.keep(Kept(slots, generations, names, parents, np.full(num_slots, 32 << WIDTH_SHIFT)))
    held.lasting.close()


if __name__ == "__main__":
    sys.exit(main())
