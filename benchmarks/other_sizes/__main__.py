"""How well do miniatures tell what pools of other sizes would find, and what do they cost?

    python -m benchmarks.other_sizes [--trace FILE...] [--capacity 0.01,0.02,0.05] [--block-tokens 128]
                                     [--positions 512] [--engine 1000] [--json FILE]

Each trace goes through the connector's own allocator with pools of half, one, two and four times a size, as
in `benchmarks.trace_replay`: that is what is true. It goes once through the miniatures of a pool of that size
(`offload.scheduler.miniatures`), which see a sample and are given all the time they need. The clock is that
of the trace, and nothing fades. `--trace cycle`, the default, is 64 documents asked one after the other.

Rows: `hit_rate`, of blocks that were asked for; `estimated`, by the miniatures; `error`, in percentage
points; `rate`, the part of all blocks in the sample; `us_per_request`, processor time of the miniatures of
all sizes together, for each request; `us_per_request_real`, that of the real pool of one size.

Then the first `--engine` requests of each trace go through vLLM's real scheduler, as in
`benchmarks.engine_replay`, and the miniatures have the time that the product gives them. Rows: `percent`,
their processor time in percent of that of the scheduler, `schedule` and `update_from_output`; and the `rate`
that they ended with.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, none_below_zero, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.engine_replay import ReplayEngine, ReplaySettings
from benchmarks.engine_replay.driver import replay as replay_engine
from benchmarks.engine_replay.workloads import fits, of_trace
from benchmarks.trace_replay.replay import OurPool, TraceClock, replay
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks, cycle, read_workload
from evictor import make_policy
from offload.config import DEFAULT_POLICY
from offload.scheduler.miniatures import MOST_POSITIONS, SIZES, Miniatures

__all__ = ["main"]

_COLUMNS = (
    *(Column(name, name) for name in ("trace", "capacity", "blocks", "size")),
    Column("hit rate", "hit_rate"),
    *(Column(name, name) for name in ("estimated", "error", "rate")),
    Column("us per request", "us_per_request"),
)

_CYCLE = "cycle"
_SHARES = tuple(Column(name, name) for name in ("trace", "requests", "percent", "us_per_request", "rate"))
_GPU_BLOCKS, _CPU_BLOCKS, _BLOCK, _LONGEST = 16_384, 65_536, 16, 131_072


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print a table, write rows; returns the exit code."""
    parser = parser_of("other_sizes", __doc__)
    parser.add_argument("--trace", nargs="+", default=[_CYCLE], metavar=f"FILE|{_CYCLE}")
    fractions = "of the pool, as fractions of the distinct blocks, with commas between; '': none"
    parser.add_argument("--capacity", default="0.01,0.02,0.05", help=fractions)
    parser.add_argument("--policy", default=DEFAULT_POLICY, help=f"default: {DEFAULT_POLICY}")
    add_numbers(
        parser,
        ("block-tokens", 128, "of a block; divides 512"),
        ("engine", 1000, "requests that go through a scheduler; 0: none", none_below_zero),
        ("positions", MOST_POSITIONS, "of the miniature of the pool's own size"),
    )
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    rows = []
    workloads = [
        cycle(64, 30, 8, 20) if each == _CYCLE else read_workload(Path(each)) for each in options.trace
    ]
    for workload in workloads:
        chains = chains_in_blocks(workload.requests, options.block_tokens)
        arrivals = [each.timestamp_seconds for each in workload.requests]
        known: dict[int, tuple[float, float]] = {}
        num_distinct = len({each for chain in chains for each in chain})
        for fraction in sorted(map(float, filter(None, options.capacity.split(",")))):
            for row in _rows(int(num_distinct * fraction), chains, arrivals, options, known):
                rows.append({"trace": workload.name, "capacity": fraction, **row})
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    print(table(_COLUMNS, rows))
    shares = [_share(each, int(options.engine)) for each in workloads] if options.engine else []
    print(table(_SHARES, shares))
    settings = {**settings_of(options), "trace": [Path(each).stem for each in options.trace]}
    report.write(options.json, rows, settings=settings, shares=shares)
    return 0


def _rows(
    num_blocks: int,
    chains: Sequence[list[bytes]],
    arrivals: Sequence[float],
    options: Any,
    known: dict[int, tuple[float, float]],
) -> list[dict[str, Any]]:
    clock = TraceClock()
    miniatures = Miniatures(
        num_blocks, options.policy, clock, timer=lambda: 0.0, most_positions=options.positions
    )
    began = time.thread_time()
    for chain, arrival in zip(chains, arrivals, strict=True):
        clock.seconds = arrival
        miniatures.asked(chain)
        miniatures.step()
    spent = time.thread_time() - began
    num_asked, num_missed = miniatures.take()
    rows = []
    for size, missed in zip(SIZES, num_missed, strict=True):
        estimated = 1 - missed / num_asked
        hit_rate, real = _real(int(num_blocks * size), chains, arrivals, options.policy, known)
        rows.append(
            {
                "blocks": num_blocks,
                "size": size,
                "hit_rate": round(hit_rate, 5),
                "estimated": round(estimated, 5),
                "error": round(100 * (estimated - hit_rate), 2),
                "rate": round(miniatures.rate, 6),
                "us_per_request": round(1e6 * spent / len(chains), 1),
                "us_per_request_real": round(1e6 * real / len(chains), 1),
            }
        )
    return rows


def _real(
    num_blocks: int,
    chains: Sequence[list[bytes]],
    arrivals: Sequence[float],
    policy: str,
    known: dict[int, tuple[float, float]],
) -> tuple[float, float]:
    """Hit rate and seconds of a pool of that size."""
    if num_blocks not in known:
        clock = TraceClock()
        pool = OurPool(num_blocks, make_policy(policy, num_blocks, clock))
        seen = replay(pool, chains, arrivals, clock, time.thread_time_ns)
        known[num_blocks] = sum(seen.hits) / sum(map(len, chains)), sum(seen.spent_ns) / 1e9
    return known[num_blocks]


def _share(workload: Workload, num_requests: int) -> dict[str, Any]:
    """What miniatures cost beside vLLM's scheduler."""
    requests = [each for each in workload.requests if fits(each, _LONGEST, _GPU_BLOCKS, _BLOCK)]
    requests = requests[:num_requests]
    engine = ReplayEngine(
        ReplaySettings(
            connector="offload",
            gpu_blocks=_GPU_BLOCKS,
            cpu_blocks=_CPU_BLOCKS,
            max_model_len=_LONGEST,
            watch=False,
            timer=time.thread_time_ns,
        )
    )
    took = replay_engine(engine, of_trace(requests, _BLOCK, 1.0))
    miniatures = engine.connector._scheduler._other_sizes.miniatures
    seconds = miniatures.seconds
    return {
        "trace": workload.name,
        "requests": len(requests),
        "percent": round(100 * seconds / (sum(took.step_ns) / 1e9), 3),
        "us_per_request": round(1e6 * seconds / len(requests), 1),
        "rate": round(miniatures.rate, 6),
    }


if __name__ == "__main__":
    sys.exit(main())
