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
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, settings_of
from benchmarks.common.tables import Column, grouped, table
from benchmarks.copy_bandwidth.shapes import Shape, layer_by_layer
from offload.config import Verify
from offload.messages import Ids
from offload.scheduler import amounts
from offload.testing.copiers.paced import Link, Pace, PacedCopier, RealClock
from offload.worker.copiers import Copier, CpuCopier, Direction
from offload.worker.layout import BlockLayout, Region
from offload.worker.pool.memory import HostMemory
from offload.worker.seals import Seals
from offload.worker.transfer import TransferEngine

__all__ = ["main"]

_KIB = 1 << 10
_MIB = 1 << 20
_TURNOVER_BYTES = 256 * _MIB
"""The least size of blocks and of slots: several times a processor's cache."""
_POLL_SECONDS = 50e-6
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200


_SHAPES = (
    Shape("64 KiB", 1, 64 * _KIB),
    Shape("512 KiB", 1, 512 * _KIB),
    Shape("2 MiB", 1, 2 * _MIB),
    Shape("2 MiB in 32", 32, 64 * _KIB),
)
_LOADS = tuple(Verify)
_STORES = (Verify.ALWAYS, Verify.NEVER)


class _Blocks(NamedTuple):
    """Where the engine's blocks are, and what copies them."""

    address: int
    make_copier: Callable[[], Copier]


@dataclass(frozen=True, slots=True)
class _Case:
    """What settings are compared in. `copies` is as in the rows."""

    direction: Direction
    shape: Shape
    num_blocks: int
    copies: str
    of_blocks: bool


class _Turn(NamedTuple):
    """One load or store: seconds until its end was polled, of CPU beside, of the longest pause."""

    seconds: float
    cpu_seconds: float
    pause: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; returns 0."""
    options = _parser().parse_args(arguments)
    notes = report.load_note()
    if not _has_gpu():
        notes.append("cuda: not measured, no GPU here")
    pairs = [
        (shape, blocks)
        for shape, blocks in itertools.product(_SHAPES, options.blocks)
        if shape.block_bytes * blocks <= options.mib * _MIB
    ]
    started, busy_before = time.perf_counter(), _others_cpu_seconds()
    rows = _measure(pairs, options.bandwidths, options.seconds)
    others = (_others_cpu_seconds() - busy_before) / (time.perf_counter() - started)
    notes.append(f"during the run other work kept {others:.1f} of {psutil.cpu_count()} cores busy")
    for title, text in (
        ("checksums, one thread", table(_CHECKSUMS, [row for row in rows if row["kind"] == "checksum"])),
        ("loads and stores", table(_CASES, [row for row in rows if row["kind"] == "case"])),
        ("share of restore time over all shapes and sizes", table(_SUMMARY, _compared(rows))),
    ):
        print(f"\n{title}\n\n{text}")
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


def _measure(
    pairs: Sequence[tuple[Shape, int]], bandwidths: Sequence[float], seconds: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    seen: set[Shape] = set()
    for shape, num_blocks in tqdm(pairs, desc="shapes and sizes", unit="pair", dynamic_ncols=True):
        num_slots = max(num_blocks, _TURNOVER_BYTES // shape.block_bytes)
        for on_gpu in (False, True) if _has_gpu() else (False,):
            with _memories(num_slots, shape, on_gpu) as (gpu, pool):
                if shape not in seen and not on_gpu:
                    seen.add(shape)
                    rows.append(_checksum_row(shape, gpu, pool, num_slots))
                for case in _cases(shape, num_blocks, on_gpu, bandwidths):
                    make = gpu.make_copier
                    if case.copies.endswith("GB/s"):
                        make = _pacer(float(case.copies.split()[0]))
                    rows += _compare(case, _Blocks(gpu.address, make), pool, num_slots, seconds)
    return rows


def _cases(shape: Shape, num_blocks: int, on_gpu: bool, bandwidths: Sequence[float]) -> Iterator[_Case]:
    if on_gpu:
        kinds = [("cuda", False)]
    else:
        kinds = [("cpu", True), ("cpu", False)]
        if shape.num_pieces == 1:  # checksums of slots do not see how many pieces a block has
            kinds += [(f"{bandwidth:g} GB/s", False) for bandwidth in bandwidths]
    for copies, of_blocks in kinds:
        yield _Case(Direction.LOAD, shape, num_blocks, copies, of_blocks)
    for copies, of_blocks in kinds:
        if copies in ("cpu", "cuda"):
            yield _Case(Direction.STORE, shape, num_blocks, copies, of_blocks)


def _compare(
    case: _Case, blocks: _Blocks, pool: HostMemory, num_slots: int, seconds: float
) -> list[dict[str, Any]]:
    """Let the settings take turns for that long; returns one row per setting."""
    settings = _LOADS if case.direction is Direction.LOAD else _STORES
    layout = layer_by_layer(case.shape, num_slots, blocks.address, pool)
    benches = {each: _Bench(case, layout, num_slots, each, blocks.make_copier()) for each in settings}
    turns: dict[Verify, list[_Turn]] = {each: [] for each in settings}
    for bench in benches.values():
        bench.take_turn()  # threads start, pages come
    until = time.monotonic() + seconds
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        first = number % len(settings)
        for each in (*settings[first:], *settings[:first]):
            turns[each].append(benches[each].take_turn())
    for bench in benches.values():
        bench.close()
    base = [turn.seconds for turn in turns[Verify.NEVER]]
    base_cpu_ms = _median_ms(turn.cpu_seconds for turn in turns[Verify.NEVER])
    gib = case.num_blocks * case.shape.block_bytes / 2**30
    rows = []
    for each in sorted(settings, key=list(reversed(Verify)).index):
        shares = [turn.seconds / never - 1 for turn, never in zip(turns[each], base, strict=True)]
        low, high = np.percentile(shares, [25, 75])
        cpu_ms = _median_ms(turn.cpu_seconds for turn in turns[each])
        rows.append(
            {
                "kind": "case",
                "direction": case.direction.value,
                "shape": case.shape.name,
                "blocks": case.num_blocks,
                "copies": case.copies,
                "of_blocks": case.of_blocks,
                "verify": each.value,
                "rounds": len(shares),
                "ms": round(_median_ms(turn.seconds for turn in turns[each]), 4),
                "share_of_restore": round(statistics.median(shares), 4),
                "share_quartiles": [round(float(low), 4), round(float(high), 4)],
                "cpu_ms": round(cpu_ms, 4),
                "cpu_ms_per_gib": round((cpu_ms - base_cpu_ms) / gib, 2),
                "longest_pause_ms": round(_median_ms(turn.pause for turn in turns[each]), 4),
            }
        )
    return rows


class _Bench:
    """A transfer engine with one setting, and the jobs of one case."""

    def __init__(
        self, case: _Case, layout: BlockLayout, num_slots: int, verify: Verify, copier: Copier
    ) -> None:
        self._case = case
        self._engine = TransferEngine(
            layout, copier, Seals(layout, num_slots, verify, of_blocks=case.of_blocks)
        )
        self._num_slots = num_slots
        self._job_ids = itertools.count(1)
        self._start = 0
        self._fills = np.zeros(num_slots, dtype=np.int64)
        if case.direction is Direction.LOAD:
            everything = np.arange(num_slots)
            self._fills[:] = job_id = next(self._job_ids)
            self._engine.store(job_id, everything, everything)
            self._wait(1)

    def take_turn(self) -> _Turn:
        case, engine = self._case, self._engine
        self._start = self._start if self._start + case.num_blocks <= self._num_slots else 0
        block_ids = np.arange(self._start, self._start + case.num_blocks)
        self._start += case.num_blocks
        cpu_before = time.process_time() - time.thread_time()
        started = time.perf_counter()
        if case.direction is Direction.STORE:
            engine.fence(Direction.STORE)
            engine.store(next(self._job_ids), block_ids, block_ids)
            num_jobs = 1
        else:
            engine.fence(Direction.LOAD)
            parts = amounts.load_parts(case.num_blocks, amounts.first_part_blocks(case.shape.block_bytes))
            for start, stop in parts:
                ids: Ids = block_ids[start:stop]
                engine.load(next(self._job_ids), ids, self._fills[ids], ids)
            num_jobs = len(parts)
        pause = self._wait(num_jobs)
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - time.thread_time() - cpu_before
        return _Turn(seconds, max(0.0, cpu_seconds), pause)

    def close(self) -> None:
        self._engine.close(5.0)

    def _wait(self, num_jobs: int) -> float:
        """Poll until so many jobs have ended; returns the longest pause between two polls."""
        pause, last = 0.0, time.perf_counter()
        while True:
            for end in self._engine.poll():
                if end.error is not None:
                    raise RuntimeError(f"{end.direction.value} of {len(end.block_ids)} blocks: {end.error}")
                num_jobs -= 1
            now = time.perf_counter()
            pause, last = max(pause, now - last), now
            if not num_jobs:
                return pause
            time.sleep(_POLL_SECONDS)


def _checksum_row(shape: Shape, blocks: _Blocks, pool: HostMemory, num_slots: int) -> dict[str, Any]:
    """Time checksums of all blocks on this thread, and the same bytes taken in one piece."""
    layout = layer_by_layer(shape, num_slots, blocks.address, pool)
    seals = Seals(layout, num_slots, of_blocks=True)
    whole = Seals(BlockLayout([Region(blocks.address, 1, num_slots * shape.block_bytes)], pool.address), 1)
    everything, one = np.arange(num_slots), np.zeros(1, dtype=np.int64)
    seals.seal(0, everything, everything)
    timed: list[tuple[float, float]] = []
    for _ in range(_LEAST_ROUNDS):
        before = time.thread_time()
        seals.num_intact(everything, everything)
        between = time.thread_time()
        whole.num_intact(one, one)
        timed.append((between - before, time.thread_time() - between))
    seconds = statistics.median(each for each, _ in timed)
    beyond = statistics.median(each - whole_seconds for each, whole_seconds in timed)
    return {
        "kind": "checksum",
        "shape": shape.name,
        "gb_per_s": round(num_slots * shape.block_bytes / seconds / 1e9, 2),
        "us_per_block": round(seconds / num_slots * 1e6, 2),
        "us_per_block_beyond_one_piece": round(beyond / num_slots * 1e6, 2),
    }


@contextmanager
def _memories(num_slots: int, shape: Shape, on_gpu: bool) -> Iterator[tuple[_Blocks, HostMemory]]:
    """Blocks and a pool of as many slots, the blocks filled with random bytes."""
    nbytes = num_slots * shape.block_bytes
    if not on_gpu:
        with (
            closing(HostMemory(num_slots, shape.block_bytes)) as blocks,
            closing(HostMemory(num_slots, shape.block_bytes)) as pool,
        ):
            _fill(blocks.address, nbytes)
            yield _Blocks(blocks.address, CpuCopier), pool
        return
    import torch

    from offload.vllm.copy_paths import copy_engine
    from offload.worker.copiers import CudaCopier
    from offload.worker.copiers.cuda import register_host_memory, unregister_host_memory

    device = torch.device("cuda", torch.cuda.current_device())
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    pinned = HostMemory(
        num_slots, shape.block_bytes, register=register_host_memory, unregister=unregister_host_memory
    )
    with closing(pinned):
        torch.cuda.synchronize(device)
        yield _Blocks(raw.data_ptr(), lambda: CudaCopier(device, copy_engine())), pinned


def _fill(address: int, nbytes: int) -> None:
    """Random bytes, the same 16 MiB again and again."""
    random = np.random.default_rng(1).bytes(min(nbytes, 16 * _MIB))
    for offset in range(0, nbytes, len(random)):
        ctypes.memmove(address + offset, random, min(len(random), nbytes - offset))


def _pacer(gb_per_second: float) -> Callable[[], Copier]:
    pace = Pace(gb_per_second * 1e9)
    return lambda: PacedCopier(Link(RealClock(), lambda: pace))


def _median_ms(seconds: Iterator[float]) -> float:
    return statistics.median(seconds) * 1e3


def _others_cpu_seconds() -> float:
    """CPU seconds that this machine has spent so far on anything but this process."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    return float(sum(times) - idle - time.process_time())


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _compared(rows: Sequence[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """What was measured beside `never`, of one kind together."""
    cases = [row for row in rows if row["kind"] == "case" and row["verify"] != Verify.NEVER]
    return grouped(cases, "direction", "copies", "of_blocks", "verify").values()


def _worst(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(group, key=lambda row: row["share_of_restore"])


def _share(row: dict[str, Any]) -> str | None:
    return None if row["verify"] == Verify.NEVER else f"{row['share_of_restore']:+.1%}"


def _quartiles(row: dict[str, Any]) -> str | None:
    low, high = row["share_quartiles"]
    return None if row["verify"] == Verify.NEVER else f"{low:+.1%} to {high:+.1%}"


def _hashed(row: dict[str, Any]) -> str:
    return "blocks" if row["of_blocks"] else "slots"


def _median_of(key: str) -> Callable[[Sequence[dict[str, Any]]], float]:
    return lambda group: statistics.median(row[key] for row in group)


_CHECKSUMS = (
    Column("shape", "shape"),
    Column("GB/s", "gb_per_s", ".1f"),
    Column("us per block", "us_per_block", ".1f"),
    Column("of these beyond hashing one piece", "us_per_block_beyond_one_piece", ".1f"),
)
_CASES = (
    *(Column(name, name) for name in ("direction", "shape", "blocks", "copies")),
    Column("checksums of", _hashed),
    Column("verify", "verify"),
    Column("rounds", "rounds"),
    Column("ms", "ms", ".2f"),
    Column("share of restore", _share),
    Column("quartiles", _quartiles),
    Column("CPU ms", "cpu_ms", ".2f"),
    Column("longest pause ms", "longest_pause_ms", ".2f"),
)
_SUMMARY = (
    Column("direction", lambda group: group[0]["direction"]),
    Column("copies", lambda group: group[0]["copies"]),
    Column("checksums of", lambda group: _hashed(group[0])),
    Column("verify", lambda group: group[0]["verify"]),
    Column("cases", len),
    Column("median", _median_of("share_of_restore"), "+.1%"),
    Column("largest", lambda group: _worst(group)["share_of_restore"], "+.1%"),
    Column("in the case", lambda group: "{blocks} x {shape}".format(**_worst(group))),
    Column("CPU ms per GiB", _median_of("cpu_ms_per_gib"), ".0f"),
)


if __name__ == "__main__":
    sys.exit(main())
