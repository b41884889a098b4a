"""How much smaller do lossless codecs make KV, and how fast?

    python -m benchmarks.codecs [--dtype bfloat16,float32] [--extents N] [--rounds N] [--json FILE]

A real engine on the CPU backend computes prompts of random tokens, and its disk tier writes their KV
(`benchmarks.codecs.kv`). Each extent of a MiB is compressed and decompressed on one thread: as it is, and
with its elements' bytes sorted into planes, all first bytes before all second ones. What comes back is
compared. The model's weights are random, so what a trained model's KV is like is another question.

Codecs: `zlib`, which Python has, and `lz4` and `zstd` where the packages `lz4` and `zstandard` are installed.
`copy` is a copy of the bytes, for comparison.

Rows: `ratio`, bytes before per byte after; `compress_gb_s` and `decompress_gb_s`, of bytes before, with the
planes; medians of rounds over all extents.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codecs.kv import HIDDEN_SIZE, extents_of
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, one_of, parser_of, settings_of
from benchmarks.common.tables import Column, table

__all__ = ["Codec", "codecs", "main", "measure"]

_SIZES = {"bfloat16": 2, "float32": 4}
_COLUMNS = (
    Column("KV", "dtype"),
    Column("codec", "codec"),
    Column("planes", lambda row: "yes" if row["planes"] else "no"),
    Column("ratio", "ratio", ".2f"),
    Column("compress, GB/s", "compress_gb_s", ".2f"),
    Column("decompress, GB/s", "decompress_gb_s", ".2f"),
)


class Codec(NamedTuple):
    """Makes bytes smaller, and gives them back."""

    name: str
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def codecs() -> list[Codec]:
    """Those that are installed here."""
    found = [
        Codec("copy", lambda each: bytes(bytearray(each)), lambda each: bytes(bytearray(each))),
        Codec("zlib 1", lambda each: zlib.compress(each, 1), zlib.decompress),
    ]
    try:
        lz4: Any = importlib.import_module("lz4.frame")
        found.append(Codec("lz4", lz4.compress, lz4.decompress))
    except ImportError:
        print("lz4 is not installed: pip install lz4", file=sys.stderr)
    try:
        zstd: Any = importlib.import_module("zstandard")
    except ImportError:
        print("zstandard is not installed: pip install zstandard", file=sys.stderr)
        return found
    for level in (1, 3):
        compressor = zstd.ZstdCompressor(level=level)
        found.append(Codec(f"zstd {level}", compressor.compress, zstd.ZstdDecompressor().decompress))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write rows; returns 0."""
    options = _parser().parse_args(arguments)
    notes = report.load_note()
    rows = []
    for dtype in options.dtype:
        extents = extents_of(dtype)[: options.extents]
        rows += measure(dtype, extents, options.rounds)
    print(table(_COLUMNS, rows))
    report.write(options.json, rows, settings=settings_of(options), notes=notes, hidden_size=HIDDEN_SIZE)
    return 0


def measure(dtype: str, extents: Sequence[bytes], rounds: int) -> list[dict[str, Any]]:
    """A row for each codec, with planes and without. Raises AssertionError if bytes come back changed."""
    size, rows = _SIZES[dtype], []
    num_bytes = sum(map(len, extents))
    for codec in codecs():
        for planes in (False, True):
            seconds: list[tuple[float, float]] = []
            num_small = 0
            for _ in range(rounds):
                began = time.perf_counter()
                small = [codec.compress(_sorted(each, size) if planes else each) for each in extents]
                made = time.perf_counter()
                back = [codec.decompress(each) for each in small]
                if planes:
                    back = [_unsorted(each, size) for each in back]
                seconds.append((made - began, time.perf_counter() - made))
                assert back == list(extents), f"{codec.name} changes bytes"
                num_small = sum(map(len, small))
            rows.append(
                {
                    "dtype": dtype,
                    "codec": codec.name,
                    "planes": planes,
                    "num_extents": len(extents),
                    "ratio": round(num_bytes / num_small, 4),
                    "compress_gb_s": round(num_bytes / median(each for each, _ in seconds) / 1e9, 4),
                    "decompress_gb_s": round(num_bytes / median(each for _, each in seconds) / 1e9, 4),
                }
            )
    return rows


def _sorted(content: bytes, size: int) -> bytes:
    """First bytes of all elements, then the second ones, and so on."""
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, size).T.tobytes()


def _unsorted(content: bytes, size: int) -> bytes:
    return np.frombuffer(content, dtype=np.uint8).reshape(size, -1).T.tobytes()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("codecs", __doc__)
    parser.add_argument(
        "--dtype", type=one_of(_SIZES), default=tuple(_SIZES), metavar="T,...", help=f"of {', '.join(_SIZES)}"
    )
    add_numbers(
        parser, ("extents", 64, "of a MiB, at most, of each type"), ("rounds", 5, "medians of their times")
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
