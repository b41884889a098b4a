"""How fast do extents move between the pool and a slab on disk, beside fio on the same file?

    python -m benchmarks.disk_bandwidth [--path DIR] [--extents 1 2 4] [--pairs 15] [--mib 256] [--json FILE]

Every extent of a pool is put into a slab and got back, in an order of chance, by the product's medium. Slots
are scattered over the pool. Ways:

- `verified`: as the product does it: what is put is checked against its seals, and what is got, too.
- `unverified`: the same without checksums.
- `bare`: one `pwritev` or `preadv` per extent, from as many threads on the same memory, and nothing else.
- `bare, hot`: the same, but each thread moves a buffer of its own again and again, as fio does.
- `fio`: `psync`, the same file, size of blocks, number of threads, and O_DIRECT where the slab uses it. It
  moves one buffer per thread again and again, which stays in the processor's cache; but for `bare, hot` the
  others move all of the pool.
- `files`, `sqlite`, `rocksdb`: one file per extent, a table of blobs, values in RocksDB; see `others`.

A pair is one turn of each way, in an order of chance; within a turn all is put, then all is got. Shares are
medians of the shares within a pair. Seconds are from the first job submitted to the last end polled, of fio
what it says. CPU seconds are of all threads. Nothing is synced within them. A first pair does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, positive, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.disk_bandwidth.fio import fio_version, run_fio
from benchmarks.disk_bandwidth.others import Files, Other, RocksDB, SQLite, reason_against_rocksdb
from benchmarks.disk_bandwidth.turns import Slabs, Turn
from offload.worker.media.base import Verb
from offload.worker.media.slab import SlabOptions

__all__ = ["main"]

_MIB = 1 << 20
_COLUMNS = [
    *(Column("extent MiB", "extent_mib"), Column("verb", "verb"), Column("way", "way")),
    *(Column(name, key, ".2f") for name, key in (("GB/s", "gb_per_s"), ("least", "least"), ("most", "most"))),
    Column("CPU s per GB", "cpu_s_per_gb", ".3f"),
    Column("share of bare", "share_of_bare", ".2f"),
    Column("share of fio", "share_of_fio", ".2f"),
]

OTHERS: dict[str, type[Other]] = {"files": Files, "sqlite": SQLite, "rocksdb": RocksDB}
_Turns = dict[tuple[Verb, str], list[Turn]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write rows; returns 0."""
    options = _parser().parse_args(arguments)
    notes, rows = report.load_note(), []
    version = fio_version()
    notes.append(version or "fio: not installed, nothing to compare with (apt-get install fio)")
    no_rocksdb = reason_against_rocksdb()
    notes += [] if no_rocksdb is None else [no_rocksdb]
    ways = ["verified", "unverified", "bare", "bare, hot"] + ["fio"] * (version is not None)
    ways += [way for way in OTHERS if way != "rocksdb" or no_rocksdb is None]
    options.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for extent_mib in options.extents:
            rows += _measure(Path(folder) / str(extent_mib), extent_mib, options, ways)
    print(table(_COLUMNS, rows))
    print()
    for note in notes:
        print(note)
    settings = {name: str(value) if name == "path" else value for name, value in settings_of(options).items()}
    report.write(options.json, rows, settings=settings, notes=notes)
    return 0


def _measure(
    path: Path, extent_mib: int, options: argparse.Namespace, ways: list[str]
) -> list[dict[str, Any]]:
    slab_options = SlabOptions(
        get_threads=options.get_threads,
        put_threads=options.put_threads,
        sync_seconds=3600.0,
        direct=not options.buffered,
    )
    num_extents = max(options.mib // extent_mib, options.get_threads * options.put_threads)
    num_extents -= num_extents % (options.get_threads * options.put_threads)
    slabs = Slabs(
        path,
        extent_bytes=extent_mib * _MIB,
        slot_bytes=options.slot_kib << 10,
        num_extents=num_extents,
        options=slab_options,
        huge_pages=options.huge_pages,
    )
    turns: _Turns = {(verb, way): [] for verb in (Verb.PUT, Verb.GET) for way in ways}
    rng = random.Random(extent_mib)
    with closing(slabs):
        slabs.turn(Verb.PUT, rng)  # makes the file, which fio and the bare ways use
        for pair in range(-1, options.pairs):
            for way in rng.sample(ways, len(ways)):
                slabs.with_options(replace(slab_options, verify=way == "verified"))
                for verb in (Verb.PUT, Verb.GET):
                    turn = _turn(slabs, verb, way, num_extents, extent_mib, options, rng)
                    if pair >= 0:
                        turns[verb, way].append(turn)
        (path / "slab").unlink()
    return [_row(verb, way, turns, extent_mib, slabs.is_direct) for verb, way in turns]


def _turn(
    slabs: Slabs,
    verb: Verb,
    way: str,
    num_extents: int,
    extent_mib: int,
    options: argparse.Namespace,
    rng: random.Random,
) -> Turn:
    if way in ("bare", "bare, hot"):
        return slabs.bare_turn(verb, rng, is_hot=way != "bare")
    if way in OTHERS:
        return slabs.other_turn(verb, rng, OTHERS[way])
    if way != "fio":
        return slabs.turn(verb, rng)
    return run_fio(
        verb,
        slabs.file,
        direct=not options.buffered,
        extent_bytes=extent_mib * _MIB,
        num_extents=num_extents,
        threads=options.put_threads if verb is Verb.PUT else options.get_threads,
        huge_pages=options.huge_pages,
    )


def _row(verb: Verb, way: str, turns: _Turns, extent_mib: int, is_direct: bool) -> dict[str, Any]:
    mine = turns[verb, way]
    speeds = [turn.nbytes / turn.seconds / 1e9 for turn in mine]
    return {
        "extent_mib": extent_mib,
        "verb": verb.value,
        "way": way,
        "direct": is_direct,
        "pairs": len(mine),
        "gb_per_s": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "cpu_s_per_gb": statistics.median(turn.cpu_seconds / turn.nbytes * 1e9 for turn in mine),
        "share_of_bare": _share(speeds, turns[verb, "bare"]),
        "share_of_fio": _share(speeds, turns.get((verb, "fio"))),
    }


def _share(speeds: Sequence[float], others: Sequence[Turn] | None) -> float | None:
    """Median of the shares within a pair."""
    if others is None:
        return None
    return statistics.median(
        speed * other.seconds * 1e9 / other.nbytes for speed, other in zip(speeds, others, strict=True)
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("disk_bandwidth", __doc__)
    add = parser.add_argument
    add("--path", type=Path, default=Path("benchmarks/out"), metavar="DIR", help="on the disk to measure")
    add("--extents", type=positive, nargs="+", default=[1, 2, 4], metavar="MIB", help="(default: 1 2 4)")
    add("--slot-kib", type=positive, default=128, metavar="K", help="of one slot (default: 128)")
    add("--mib", type=positive, default=256, metavar="M", help="moved in a turn (default: 256)")
    add("--pairs", type=positive, default=15, metavar="N", help="that count (default: 15)")
    add("--get-threads", type=positive, default=4, metavar="N", help="(default: 4)")
    add("--put-threads", type=positive, default=4, metavar="N", help="(default: 4)")
    add("--huge-pages", action="store_true", help="ask for huge pages, also for fio")
    add("--buffered", action="store_true", help="through the page cache, without O_DIRECT")
    return parser


if __name__ == "__main__":
    sys.exit(main())
