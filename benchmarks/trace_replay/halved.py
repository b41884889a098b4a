"""What the default policy has learned of half of the sessions, judged by the other half.

The policy is trained in a replay of one half. Then the pool is emptied. The policy stays: it has counts of
reuse, names of what is gone, and classes of endings. With these the other half is replayed behind the first
one, in a pool of the same size. That is a fraction of the distinct blocks of the half that is judged. Each
half is judged once. The same is done without telling the policy how answers ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain

from benchmarks.common.tables import Column, table
from benchmarks.trace_replay.optimum import OfflineOptimum
from benchmarks.trace_replay.policies import LRU, OPTIMAL
from benchmarks.trace_replay.replay import Chain, OurPool, TraceClock, replay
from benchmarks.trace_replay.rows import Row, gap_closed
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks, halves, later
from evictor import make_policy
from evictor.endings import Endings
from offload.config import DEFAULT_POLICY
from offload.sizing.ends import ends_of

__all__ = ["UNTOLD", "format_halves", "rows_of_halves"]

UNTOLD = f"{DEFAULT_POLICY}, not told of endings"

_COLUMNS = (
    Column("judged by", "judged"),
    Column("pool", "capacity_fraction", ".1%"),
    Column("blocks", "capacity_blocks"),
    Column("policy", "policy"),
    Column("hits", "hit_rate", ".2%"),
    Column("of the gap", "gap_closed", ".1%"),
)


def rows_of_halves(workload: Workload, fractions: Sequence[float], block_tokens: int) -> Iterator[Row]:
    """Rows of each half that is judged, pool and policy; leaf-LRU and the optimum learn nothing before.

    Args:
        workload: to replay.
        fractions: sizes of pools, as fractions of the distinct blocks of the half that is judged.
        block_tokens: tokens of a block.
    """
    one, other = halves(workload)
    for learned, judged in ((other, one), (one, other)):
        chains: list[Chain] = [*chains_in_blocks(judged.requests, block_tokens)]
        accessed, distinct = sum(map(len, chains)), len({*chain(*chains)})
        optimum = OfflineOptimum(chains)
        for fraction in fractions:
            capacity = max(1, round(fraction * distinct))
            hits = {
                LRU: _found(LRU, capacity, [judged], block_tokens),
                UNTOLD: _found(DEFAULT_POLICY, capacity, [learned, judged], block_tokens),
                DEFAULT_POLICY: _found(
                    DEFAULT_POLICY, capacity, [learned, judged], block_tokens, are_told=True
                ),
                OPTIMAL: sum(optimum.hits(capacity)),
            }
            rates = {policy: each / accessed for policy, each in hits.items()}
            for policy, rate in rates.items():
                share = None if policy == OPTIMAL else gap_closed(rate, rates[LRU], rates[OPTIMAL])
                yield {
                    "judged": judged.name,
                    "capacity_fraction": fraction,
                    "capacity_blocks": capacity,
                    "policy": policy,
                    "hit_rate": round(rate, 6),
                    "gap_closed": None if share is None else round(share, 4),
                }


def format_halves(rows: Sequence[Row]) -> str:
    """A table with a line for each."""
    return table(_COLUMNS, rows)


def _found(
    policy: str, capacity: int, parts: Sequence[Workload], block_tokens: int, *, are_told: bool = False
) -> int:
    """Hits in the last of ``parts``, one after the other, with an empty pool before each of them."""
    clock, classes, hits = TraceClock(), Endings(), 0
    pool = OurPool(capacity, make_policy(policy, capacity, clock))
    for part in parts:
        pool.forget_kv()
        chains = chains_in_blocks(part.requests, block_tokens)
        requests = later(part.requests, clock.seconds)
        arrivals = [request.timestamp_seconds for request in requests]
        ends = ends_of(requests, classes) if are_told else ()
        hits = sum(replay(pool, chains, arrivals, clock, time.thread_time_ns, ends).hits)
    return hits
