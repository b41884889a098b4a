"""A pool with a tier below it: what the tier adds, and what is written for that.

Prompts go through the connector's scheduler side, request by request: its pool, the tier's directory, and
what decides about spills and fetches are the product's. There is no engine, no GPU cache and no byte, and a
fetch always pays (`benchmarks.trace_replay.engine`). Compared are the pool alone, one pool as large as pool
and tier together, and the tier with each way to admit. Those have no budget for writes. The default budget,
one size of the tier a day, comes last, with `policy`.

Rows: `hit_rate` of prompt blocks, `tier_rate` of those that the pool did not have when their request came,
`written_blocks`, `fetched_blocks`, and `written_per_served`: blocks written per block that the tier served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from benchmarks.common.tables import Column, table
from benchmarks.trace_replay.engine import Moved, TierReplay
from benchmarks.trace_replay.rows import Row
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks
from offload.config import DEFAULT_POLICY
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit

__all__ = ["ALONE", "BUDGET", "ONE_POOL", "format_below", "rows_below"]

ALONE, ONE_POOL, BUDGET = "no tier", "one pool of both", "policy, default budget"

_NO_BUDGET = 1e30
_COLUMNS = (
    Column("trace", "trace"),
    Column("pool", "capacity_fraction", ".1%"),
    Column("tier", "tier_pools", "g"),
    Column("admit", "admit"),
    Column("hits", "hit_rate", ".1%"),
    Column("of the tier", "tier_rate", ".1%"),
    Column("written", "written_blocks", ","),
    Column("written per served", "written_per_served", ".2f"),
)


class _Case(NamedTuple):
    """A pool of so many blocks, and a tier of so many, perhaps none."""

    admit: str
    pool_blocks: int
    tier_blocks: int
    limits: TierLimits = TierLimits()


def rows_below(
    workload: Workload, fractions: Sequence[float], times: Sequence[float], block_tokens: int
) -> Iterator[Row]:
    """Rows of each pool and tier.

    Args:
        workload: to replay.
        fractions: sizes of pools, as fractions of the distinct blocks.
        times: sizes of tiers, in sizes of the pool.
        block_tokens: tokens of a block.
    """
    chains = chains_in_blocks(workload.requests, block_tokens)
    num_distinct = len({*chain(*chains)})
    for fraction in fractions:
        pool_blocks = max(1, round(fraction * num_distinct))
        alone: Moved | None = None
        for each in times:
            for case in _cases(pool_blocks, round(each * pool_blocks)):
                if case.admit == ALONE and alone is not None:
                    moved = alone
                else:
                    moved = _replay(case, chains, workload, block_tokens)
                alone = moved if case.admit == ALONE else alone
                yield {
                    "trace": workload.name,
                    "capacity_fraction": fraction,
                    "capacity_blocks": pool_blocks,
                    "tier_pools": each,
                    "admit": case.admit,
                    "hit_rate": round(moved.hits / moved.accessed, 6),
                    "tier_rate": round(moved.from_tier / moved.accessed, 6),
                    "written_blocks": moved.written,
                    "fetched_blocks": moved.fetched,
                    "written_per_served": (
                        round(moved.written / moved.from_tier, 4) if moved.from_tier else None
                    ),
                }


def format_below(rows: Sequence[Row]) -> str:
    """A table with a line for each."""
    return table(_COLUMNS, rows)


def _cases(pool_blocks: int, tier_blocks: int) -> Iterator[_Case]:
    yield _Case(ALONE, pool_blocks, 0)
    yield _Case(ONE_POOL, pool_blocks + tier_blocks, 0)
    for admit in Admit:
        yield _Case(str(admit), pool_blocks, tier_blocks, TierLimits(admit=admit, bytes_per_day=_NO_BUDGET))
    yield _Case(BUDGET, pool_blocks, tier_blocks)


def _replay(case: _Case, chains: Sequence[Sequence[bytes]], workload: Workload, block_tokens: int) -> Moved:
    engine = TierReplay(
        case.pool_blocks,
        case.tier_blocks,
        case.limits,
        policy=DEFAULT_POLICY,
        most_blocks=max(map(len, chains)),
        block_tokens=block_tokens,
    )
    for each, request in zip(chains, workload.requests, strict=True):
        if each:
            engine.serve(each, request.timestamp_seconds)
    engine.check_invariants()
    return engine.moved
