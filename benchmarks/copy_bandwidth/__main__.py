"""How fast do blocks move between a paged KV cache on the GPU and the pinned pool?

    python -m benchmarks.copy_bandwidth [--device cuda|cpu] [--shapes NAME ...] [--blocks 1,8,64,...]
                                        [--rounds 5] [--gib G] [--json FILE]

Blocks of real models (`benchmarks.copy_bandwidth.shapes`) go down into the pool, up again, and both ways at
once. Each goes in one piece and in one piece per layer. Ways:

- `ours`: the product's layout and copier on its own host memory, pinned as it pins it. It begins with the ids
  of blocks and slots, so addresses are worked out within the time of submission.
- `vllm`: the handlers of vLLM's own offloading worker, unmodified, on the same blocks and slots.
- `torch`: `Tensor.copy_` for each piece, up to `--torch-pieces` of them.
- `peak`: one copy of one large pinned buffer in each direction, and both at once; what the link can do.

Ids and slots are `contiguous`, runs of neighbours as a fresh pool hands them out, or `scattered`. Each round
draws others, the same for all ways. All ways and the peak take turns within a round, in an order of chance; a
first round does not count. Figures are medians over the rounds, shares of the peak and ratios to vLLM medians
of those of single rounds. `both` moves as many blocks up as down, all of them different ones; its share is
that of the sum of the two peaks.

On a GPU GB/s are of CUDA events around the copies, from the first start to the last end. `host_seconds` is
from before the submission until the end is known. Submission is the time on the calling thread, that of two
event records per direction for the clock included. Before it is timed, every way has to bring the right bytes
in each shape. Where a copy fails, what was measured before is told all the same. Rows are written after every
shape, for a driver that takes the process with it.

Without a GPU (`--device cpu`) the same script copies within host memory, without vLLM: a dry run.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch

from benchmarks.common import report
from benchmarks.common.arguments import above_zero, parser_of, positive, settings_of
from benchmarks.copy_bandwidth.arena import arenas
from benchmarks.copy_bandwidth.devices import CpuDevice, CudaDevice, Device
from benchmarks.copy_bandwidth.measure import Bench, Row
from benchmarks.copy_bandwidth.shapes import SHAPES, Shape
from benchmarks.copy_bandwidth.tables import format_missed, format_rows, format_runs, format_targets
from benchmarks.copy_bandwidth.targets import Verdict, judge
from benchmarks.copy_bandwidth.ways import PeakWay

__all__ = ["main"]

_GIB = 1 << 30
_MIB = 1 << 20
_Kind = type[CpuDevice] | type[CudaDevice]
_KINDS: dict[str, _Kind] = {kind.name: kind for kind in (CudaDevice, CpuDevice)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify, measure, print tables and write rows; returns 0.

    Wrong bytes or a failed copy end it with an exception, after what was measured before has been told.
    """
    parser = _parser()
    options = _with_defaults(parser, parser.parse_args(arguments))
    logging.disable(logging.WARNING)
    rows: list[Row] = []
    with closing(_make_device(options.device)) as device:
        notes = [device.remark] if device.remark else []
        notes += report.load_note()
        for note in notes:
            print(note)
        try:
            for row in _rows(device, options, notes):
                if rows and row["shape"] != rows[-1]["shape"]:
                    _write(rows, notes, options, judge(rows))
                rows.append(row)
        except Exception as error:
            notes.append(f"ended early: {type(error).__name__}: {error}")
            raise
        finally:
            if rows:
                _tell(rows, notes, options)
    if not rows:
        parser.error(f"--blocks, --gib: nothing to measure: {'; '.join(notes)}")
    return 0


def _rows(device: Device, options: argparse.Namespace, notes: list[str]) -> Iterator[Row]:
    """All rows, those of the peak last; adds to the notes what did not fit."""
    with PeakWay.opened(device, options.peak_mib * _MIB) as peak:
        bench = Bench(device, peak, options.rounds, options.torch_pieces)
        for shapes in _of_one_size(options.shapes):
            limit = device.limit_bytes() if options.gib is None else int(options.gib * _GIB)
            counts, clipped = _clipped(options.blocks, shapes[0], limit)
            if clipped:
                notes.append(clipped)
                print(clipped)
            if counts:
                yield from _measure(bench, device, shapes, counts)
        yield from bench.peak_rows()


def _measure(bench: Bench, device: Device, shapes: Sequence[Shape], counts: Sequence[int]) -> Iterator[Row]:
    with arenas(device, shapes, 2 * max(counts)) as memories:
        for arena in memories:
            print(f"  {arena.shape.name}: {', '.join(map(str, counts))} blocks", file=sys.stderr, flush=True)
            yield from bench.rows(arena, counts)


def _of_one_size(names: Sequence[str]) -> Iterator[list[Shape]]:
    """The shapes, those whose blocks have the same size together: they can share memory."""
    chosen = [shape for name, shape in SHAPES.items() if name in names]
    for _, shapes in itertools.groupby(chosen, key=lambda shape: shape.block_bytes):
        yield list(shapes)


def _clipped(counts: Sequence[int], shape: Shape, limit_bytes: int) -> tuple[list[int], str | None]:
    """The numbers of blocks that fit, both ways at once; instead of larger ones the largest power of two."""
    most = limit_bytes // (2 * shape.block_bytes)
    fitting = [count for count in counts if count <= most]
    if len(fitting) == len(counts):
        return fitting, None
    instead = 1 << (most.bit_length() - 1) if most else 0
    if instead > max(fitting, default=0):
        fitting.append(instead)
    left_out = ", ".join(str(count) for count in counts if count > most)
    told = f"{instead} instead" if instead in fitting else "left out"
    return fitting, (
        f"{shape.name}, {left_out} blocks each way: more than fits in {limit_bytes / _GIB:.3g} GiB, {told}"
    )


def _tell(rows: Sequence[Row], notes: Sequence[str], options: argparse.Namespace) -> None:
    """Print tables and notes, and write the rows if asked to."""
    verdicts = judge(rows)
    for title, table in (
        ("copies", format_rows(rows)),
        ("ours, contiguous against scattered: what runs of slots are worth", format_runs(rows)),
        ("goals on a GPU", format_targets(verdicts)),
        ("rows that miss one", format_missed(verdicts)),
    ):
        if table:
            print(f"\n{title}\n\n{table}")
    print()
    for note in notes:
        print(note)
    _write(rows, notes, options, verdicts)
    if options.json:
        print(f"rows: {options.json}")


def _write(
    rows: Sequence[Row], notes: Sequence[str], options: argparse.Namespace, verdicts: Sequence[Verdict]
) -> None:
    if not options.json:
        return
    targets = [
        {"target": each.target.text, "answer": each.answer, "rows": each.num_rows, "missed": len(each.missed)}
        for each in verdicts
    ]
    report.write_json(
        options.json, report.meta(settings=settings_of(options), notes=notes, targets=targets), rows
    )


def _make_device(name: str) -> Device:
    if name == CpuDevice.name:
        return CpuDevice()
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("copy_bandwidth", __doc__)
    counts = _by_device(lambda kind: ",".join(map(str, kind.block_counts)))
    peaks = _by_device(lambda kind: str(kind.peak_bytes // _MIB))
    add = parser.add_argument
    add("--device", choices=_KINDS, help="default: cuda where there is a GPU; cpu is a dry run")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    add("--blocks", type=_counts, metavar="N,...", help=f"moved each way (default: {counts})")
    add("--rounds", type=positive, default=5, metavar="N", help="that count (default: 5)")
    add("--gib", type=above_zero, metavar="G", help="of blocks, and of slots, at most (default: what fits)")
    add("--peak-mib", type=positive, metavar="M", help=f"of the large copy (default: {peaks})")
    add(
        "--torch-pieces",
        type=positive,
        default=4096,
        metavar="N",
        help="torch sits out where a transfer has more (default: 4096)",
    )
    return parser


def _by_device(told: Callable[[_Kind], str]) -> str:
    return "; ".join(f"{told(kind)} on {name}" for name, kind in _KINDS.items())


def _with_defaults(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the device."""
    has_gpu = torch.cuda.is_available()
    options.device = options.device or (CudaDevice.name if has_gpu else CpuDevice.name)
    if options.device == CudaDevice.name and not has_gpu:
        parser.error("--device cuda: torch finds no CUDA device here; --device cpu is a dry run")
    kind = _KINDS[options.device]
    options.blocks = options.blocks or list(kind.block_counts)
    options.peak_mib = options.peak_mib or kind.peak_bytes // _MIB
    return options


def _counts(text: str) -> list[int]:
    return sorted({positive(part) for part in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
