"""The GPU's cache above the pool: what is found in either, and what is stored for that, in rows and a table.

`benchmarks.trace_replay.two_levels` says what is compared. Each mode runs with the same requests, a GPU cache
of a part of the distinct blocks, at least as large as the longest prompt, and a pool of so many times that.

Rows: `found_rate` of prompt blocks, `gpu_rate` in the GPU's cache and `pool_rate` behind that in the pool;
`stored_blocks`, and `stored_times` as many as by storing at once, null for the bound; `gap_closed`, the share
of the way from storing at once to no block in both, null where that is below 0.1 percentage points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from benchmarks.common.tables import Column, table
from benchmarks.trace_replay.replay import TraceClock
from benchmarks.trace_replay.rows import Row, gap_closed
from benchmarks.trace_replay.two_levels import EAGER, MODES, ONCE, Found, make_levels
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks

__all__ = ["SCHEDULER", "format_above", "rows_above"]

SCHEDULER = {"eager, vLLM's scheduler": "eager", "auto, vLLM's scheduler": "auto"}
"""Modes of the connector in vLLM's scheduler, and what its configuration says then."""

_COLUMNS = (
    Column("trace", "trace"),
    Column("GPU blocks", "gpu_blocks", ","),
    Column("pool", "pool_times", "g"),
    Column("stores", "mode"),
    Column("window", "window", "g"),
    Column("found", "found_rate", ".2%"),
    Column("on the GPU", "gpu_rate", ".2%"),
    Column("in the pool", "pool_rate", ".2%"),
    Column("stored", "stored_blocks", ","),
    Column("times", "stored_times", ".2f"),
    Column("of the gap", "gap_closed", ".0%"),
)


def rows_above(
    workload: Workload,
    fractions: Sequence[float],
    times: Sequence[float],
    windows: Sequence[float],
    block_tokens: int,
    *,
    has_scheduler: bool = False,
) -> Iterator[Row]:
    """Rows of each GPU cache, pool and mode.

    Args:
        workload: to replay.
        fractions: sizes of the GPU's cache, as fractions of the distinct blocks.
        times: sizes of the pool, in sizes of that cache.
        windows: parts of that cache whose blocks are copied before they are evicted.
        block_tokens: tokens of a block.
        has_scheduler: also have vLLM's real scheduler replay the requests, with each mode of the connector.
    """
    chains = [each for each in chains_in_blocks(workload.requests, block_tokens) if each]
    distinct, longest = len({*chain(*chains)}), max(map(len, chains))
    for gpu_blocks in {max(longest, round(fraction * distinct)): None for fraction in fractions}:
        for each in times:
            pool_blocks = max(1, round(each * gpu_blocks))
            cases = [
                (mode, window)
                for mode in MODES
                for window in (windows if mode not in (EAGER, ONCE) else [0.0])
            ]
            found = {case: _replay(*case, chains, gpu_blocks, pool_blocks) for case in cases}
            if has_scheduler:
                for mode, store in SCHEDULER.items():
                    sizes = gpu_blocks, pool_blocks, block_tokens
                    found[mode, 0.0] = _in_scheduler(chains, *sizes, store)
            eager, once = found[EAGER, 0.0], found[ONCE, 0.0]
            stores = {mode for mode, _ in found if mode != ONCE}
            for (mode, window), seen in found.items():
                share = gap_closed(_rate(seen), _rate(eager), _rate(once))
                yield {
                    "trace": workload.name,
                    "gpu_blocks": gpu_blocks,
                    "gpu_fraction": round(gpu_blocks / distinct, 6),
                    "pool_times": each,
                    "pool_blocks": pool_blocks,
                    "mode": mode,
                    "window": window or None,
                    "found_rate": round(_rate(seen), 6),
                    "gpu_rate": round(seen.on_gpu / seen.accessed, 6),
                    "pool_rate": round(seen.in_pool / seen.accessed, 6),
                    "stored_blocks": seen.stored if mode in stores else None,
                    "stored_times": round(seen.stored / max(1, eager.stored), 4) if mode in stores else None,
                    "gap_closed": None if share is None else round(share, 4),
                }


def format_above(rows: Sequence[Row]) -> str:
    """A table with a line for each."""
    return table(_COLUMNS, rows)


def _rate(found: Found) -> float:
    return (found.on_gpu + found.in_pool) / found.accessed


def _in_scheduler(
    chains: Sequence[Sequence[bytes]], gpu_blocks: int, pool_blocks: int, block_tokens: int, store: str
) -> Found:
    from benchmarks.trace_replay.scheduler import replay_scheduler

    return replay_scheduler(chains, gpu_blocks, pool_blocks, block_tokens, store)


def _replay(
    mode: str, window: float, chains: Sequence[Sequence[bytes]], gpu_blocks: int, pool_blocks: int
) -> Found:
    levels = make_levels(mode, gpu_blocks, pool_blocks, window, TraceClock())
    for each in chains:
        levels.serve(each)
    levels.check_invariants()
    return levels.found
