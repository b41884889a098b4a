"""Turns of all settings, and the rows they come to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.copy_bandwidth.shapes import Shape, layer_by_layer
from benchmarks.verification.bench import Bench, Turn
from benchmarks.verification.cases import MIB, Case, cases_of
from benchmarks.verification.memories import Blocks, has_gpu, make_pacer, memories
from offload.config import Verify
from offload.worker.layout import BlockLayout, Region
from offload.worker.pool.memory import HostMemory
from offload.worker.seals import Seals

__all__ = ["measure"]

_TURNOVER_BYTES = 256 * MIB
"""The least size of blocks and of slots: several times a processor's cache."""
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200


def measure(
    pairs: Sequence[tuple[Shape, int]], bandwidths: Sequence[float], seconds: float
) -> list[dict[str, Any]]:
    """All cases with these shapes and sizes, about so many seconds each: the rows."""
    rows: list[dict[str, Any]] = []
    seen: set[Shape] = set()
    for shape, num_blocks in tqdm(pairs, desc="shapes and sizes", unit="pair", dynamic_ncols=True):
        num_slots = max(num_blocks, _TURNOVER_BYTES // shape.block_bytes)
        for on_gpu in (False, True) if has_gpu() else (False,):
            with memories(num_slots, shape, on_gpu) as (gpu, pool):
                if shape not in seen and not on_gpu:
                    seen.add(shape)
                    rows.append(_checksum_row(shape, gpu, pool, num_slots))
                for case in cases_of(shape, num_blocks, on_gpu, bandwidths):
                    make = gpu.make_copier
                    if case.copies.endswith("GB/s"):
                        make = make_pacer(float(case.copies.split()[0]))
                    rows += _compare(case, Blocks(gpu.address, make), pool, num_slots, seconds)
    return rows


def _compare(
    case: Case, blocks: Blocks, pool: HostMemory, num_slots: int, seconds: float
) -> list[dict[str, Any]]:
    """Let the settings take turns for that long; returns one row per setting."""
    layout = layer_by_layer(case.shape, num_slots, blocks.address, pool)
    benches = {each: Bench(case, layout, num_slots, each, blocks.make_copier()) for each in case.settings}
    turns = _take_turns(benches, seconds)
    for bench in benches.values():
        bench.close()
    return [
        _row(case, each, turns[each], turns[Verify.NEVER])
        for each in sorted(case.settings, key=list(reversed(Verify)).index)
    ]


def _take_turns(benches: Mapping[Verify, Bench], seconds: float) -> dict[Verify, list[Turn]]:
    """In another order each round."""
    settings = tuple(benches)
    turns: dict[Verify, list[Turn]] = {each: [] for each in settings}
    for bench in benches.values():
        bench.take_turn()  # threads start, pages come
    until = time.monotonic() + seconds
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        first = number % len(settings)
        for each in (*settings[first:], *settings[:first]):
            turns[each].append(benches[each].take_turn())
    return turns


def _row(case: Case, setting: Verify, turns: Sequence[Turn], never: Sequence[Turn]) -> dict[str, Any]:
    shares = [turn.seconds / beside.seconds - 1 for turn, beside in zip(turns, never, strict=True)]
    low, high = np.percentile(shares, [25, 75])
    cpu_ms, never_ms = (_median_ms(turn.cpu_seconds for turn in each) for each in (turns, never))
    return {
        "kind": "case",
        "direction": case.route.verb,
        "shape": case.shape.name,
        "blocks": case.num_blocks,
        "copies": case.copies,
        "of_blocks": case.of_blocks,
        "verify": setting.value,
        "rounds": len(shares),
        "ms": round(_median_ms(turn.seconds for turn in turns), 4),
        "share_of_restore": round(statistics.median(shares), 4),
        "share_quartiles": [round(float(low), 4), round(float(high), 4)],
        "cpu_ms": round(cpu_ms, 4),
        "cpu_ms_per_gib": round((cpu_ms - never_ms) / (case.nbytes / 2**30), 2),
        "longest_pause_ms": round(_median_ms(turn.pause for turn in turns), 4),
    }


def _checksum_row(shape: Shape, blocks: Blocks, pool: HostMemory, num_slots: int) -> dict[str, Any]:
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


def _median_ms(seconds: Iterator[float]) -> float:
    return statistics.median(seconds) * 1e3
