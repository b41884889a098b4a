"""What does a tier below the pool cost the scheduler, and how soon does an engine know again what it has?

    python -m benchmarks.disk_tier [--tokens 131072] [--pairs 20] [--engines 10]
        [--positions 1000000] [--json FILE]

*Idle*: a prompt is stored (cold) through vLLM's real scheduler, with our connector alone and with a tier
that has nothing and takes nothing. They take turns, in several processes each. Told are microseconds in the
connector's hooks, medians, and the median of the ratios side by side. Two kinds of processes have no tier:
their ratio would be 1 if nothing else were measured.

*Lookup*: how long a directory takes to say how much of a chain of 65,536 blocks it has, when it has all.

*Restart*: seconds from what ranks tell to a directory that knows all of it, for chains of several lengths and
extents of several sizes. The log that ranks read before is in `benchmarks.disk_bandwidth`'s slab; reading it
is told, too.

Times are those of a processor.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.tables import Column, table
from benchmarks.disk_tier.child import POSITIONS, child_of
from offload.files.private import PrivateDirectory
from offload.messages import TierFacts
from offload.scheduler.tiers.directory import Directory
from offload.scheduler.tiers.names import Grid
from offload.worker.media.base import Label
from offload.worker.media.seal_log import SealLog
from offload.worker.media.slab_file import SlabShape

__all__ = ["main"]

_BLOCK_TOKENS = 16
_BLOCKS = 65_536
_TIMES = 9
_COLUMNS = (
    Column("what", "what"),
    Column("of", "of"),
    Column("value", "value"),
    Column("unit", "unit"),
)


_ENGINES = ("without", "with", "again")
"""The last has no tier, like the first: how far these are apart is how well this can be measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("disk_tier", __doc__)
    add_numbers(
        parser,
        ("tokens", 131_072, "of a prompt"),
        ("pairs", 20, "of prompts of each engine"),
        ("engines", 10, "of each kind; where the memory of a process lies makes some percent"),
        ("positions", 1_000_000, "blocks that a tier has at a restart"),
    )
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    notes = report.load_note()
    rows = [
        *_idle(options.tokens, options.pairs, options.engines),
        *_lookup(),
        *_restarts(options.positions),
    ]
    print(table(_COLUMNS, rows))
    for note in notes:
        print(note)
    report.write(options.json, rows, settings=settings_of(options), notes=notes)
    return 0


def _idle(num_tokens: int, num_pairs: int, num_engines: int) -> list[dict[str, Any]]:
    slots = (num_pairs + 1) * num_tokens // _BLOCK_TOKENS
    spent: dict[str, list[float]] = {name: [] for name in _ENGINES}
    for number in range(num_engines):
        with ExitStack() as stack:
            children = {
                name: stack.enter_context(child_of(name == "with", num_tokens, slots))
                for name in _in_turn(number)
            }
            for pair in range(num_pairs):
                ask = methodcaller("cold", f"idle {pair}", num_tokens)
                for name in _in_turn(number + pair):
                    spent[name].append(sum(children[name].run(ask).values()) / 1000)
    of = f"a prompt of {num_tokens:,} tokens"
    middle = {name: statistics.median(times) for name, times in spent.items()}
    return [
        _row("hooks without a tier", of, middle["without"], "us"),
        _row("hooks with an idle tier", of, middle["with"], "us"),
        _row("with / without", of, _ratio(spent["with"], spent["without"]), "ratio"),
        _row("without / without", of, _ratio(spent["again"], spent["without"]), "ratio"),
    ]


def _ratio(spent: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios side by side."""
    return statistics.median(mine / other for mine, other in zip(spent, others, strict=True))


def _in_turn(number: int) -> list[str]:
    """Another one begins each time."""
    first = number % len(_ENGINES)
    return [*_ENGINES[first:], *_ENGINES[:first]]


def _lookup() -> Iterator[dict[str, Any]]:
    grid, chain = Grid.of(POSITIONS, 1), fresh_hashes(random.Random(0), _BLOCKS)
    directory = Directory([_facts(0)], policy="hazard", clock=time.monotonic)
    names = grid.names(chain)
    writing = directory.write(names, len(names), len(names))
    assert writing is not None
    directory.end_write(writing, is_good=True)
    spent = []
    for _ in range(_TIMES):
        began = time.thread_time_ns()
        depth = directory.depth(grid.names(chain))
        spent.append((time.thread_time_ns() - began) / 1000)
        assert depth == len(names)
    yield _row("lookup", f"{_BLOCKS:,} blocks", statistics.median(spent), "us")


def _restarts(num_positions: int) -> Iterator[dict[str, Any]]:
    for extent in (1, 4, 16):
        for length in (1000, 8):
            facts = _facts(num_positions // extent, length, extent)
            spent = []
            for _ in range(3):
                began = time.thread_time_ns()
                directory = Directory([facts], policy="hazard", clock=time.monotonic)
                spent.append((time.thread_time_ns() - began) / 1e9)
                assert directory.num_used == num_positions // extent
                del directory
            of = f"{num_positions:,} blocks in extents of {extent}, chains of {length} extents"
            yield _row("restart", of, statistics.median(spent), "s")
    num_extents = num_positions // POSITIONS
    yield _row("log read", f"{num_extents:,} extents", _log_seconds(num_extents), "s")


def _log_seconds(num_extents: int) -> float:
    """To read the log of so many extents, when it is in the page cache."""
    shape = SlabShape(65_536, POSITIONS, num_extents)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        directory = PrivateDirectory.open(Path(path) / "log")
        log = SealLog(directory, shape, "benchmark", spare_records=0)
        names = rng.integers(0, 256, (num_extents, 32), dtype=np.uint8)
        sums = rng.integers(0, 2**63, POSITIONS, dtype=np.uint64)
        for place in range(num_extents):
            log.add(place, (1 << 40) + place + 1, sums, Label(names[place]))
        log.close()
        spent = []
        for _ in range(3):
            began = time.perf_counter()
            log = SealLog(directory, shape, "benchmark", spare_records=0)
            spent.append(time.perf_counter() - began)
            assert len(log.kept().places) == num_extents
            log.close()
        directory.close()
    return statistics.median(spent)


def _facts(num_extents: int, length: int = 1, extent: int = POSITIONS) -> TierFacts:
    """Chains of so many extents of so many blocks; without any, of an empty tier with room for some."""
    rng = np.random.default_rng(0)
    names = rng.integers(0, 256, (num_extents, 32), dtype=np.uint8)
    parents = np.zeros_like(names)
    parents[1:] = names[:-1]
    parents[::length] = 0
    places = np.arange(num_extents)
    sizes = np.full(num_extents, extent)
    generations = (1 << 40) + 1 + places
    return TierFacts(2, num_extents or _BLOCKS, extent, places, generations, sizes, names, parents)


def _row(what: str, of: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "of": of, "value": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
