"""All policies over one workload, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from benchmarks.trace_replay.optimum import OfflineOptimum
from benchmarks.trace_replay.policies import LRU, OPTIMA, OPTIMAL, Policy, find_policy
from benchmarks.trace_replay.prefill import PrefillModel
from benchmarks.trace_replay.replay import Chain, Replayed, TraceClock, freeze_garbage, replay
from benchmarks.trace_replay.rows import Row, Setting, rows_of
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks
from offload.observe.trace import IDS_BLOCK_TOKENS
from offload.sizing.ends import ends_of

__all__ = ["compare"]


def compare(
    workload: Workload,
    policies: Sequence[Policy],
    fractions: Sequence[float],
    block_tokens: int,
    model: PrefillModel,
    rounds: int,
    timer: Callable[[], int],
) -> Iterator[Row]:
    """Rows of all policies, and of leaf-LRU if it is not among them, capacity by capacity.

    Leaves objects frozen: see ``freeze_garbage``.

    Args:
        workload: to replay, in pools of its own size if it has one.
        policies: to compare.
        fractions: sizes of pools otherwise, as fractions of the distinct blocks.
        block_tokens: tokens of a block.
        model: of the time of prefill.
        rounds: replays of each; the policies take turns, and everybody is first in one of them.
        timer: nanoseconds.
    """
    chains: list[Chain] = [*chains_in_blocks(workload.requests, block_tokens)]
    arrivals = [request.timestamp_seconds for request in workload.requests]
    ends = ends_of(workload.requests)
    distinct = len({*chain(*chains)})
    optimum = OfflineOptimum(chains)
    asked = list(policies)
    if LRU not in [policy.real_name for policy in asked]:
        asked.append(find_policy(LRU))
    measured = list({policy.real_name: policy for policy in asked if policy.make_pool}.values())
    if workload.pool_blocks is not None:
        capacity = workload.pool_blocks * IDS_BLOCK_TOKENS // block_tokens
        capacities = {capacity / distinct: capacity}
    else:
        capacities = {fraction: max(1, round(fraction * distinct)) for fraction in fractions}
    for fraction, capacity in capacities.items():
        setting = Setting(
            workload.name,
            capacity,
            fraction,
            [*map(len, chains)],
            [request.input_length for request in workload.requests],
            block_tokens,
            workload.pass_slices(),
            model,
        )
        found: dict[str, list[Replayed]] = {
            name: [Replayed(optimum.hits(capacity, bypass=bypass), [], [], [])]
            for name, bypass in OPTIMA.items()
            if name == OPTIMAL or name in [policy.name for policy in asked]
        }
        for number in range(rounds):
            first = number % len(measured)
            for policy in (*measured[first:], *measured[:first]):
                assert policy.make_pool is not None
                clock = TraceClock()
                freeze_garbage()
                replayed = replay(policy.make_pool(capacity, clock), chains, arrivals, clock, timer, ends)
                found.setdefault(policy.real_name, []).append(replayed)
        for policy in asked:
            yield from rows_of(
                setting, policy, found[policy.real_name], lru=found[LRU][0], optimal=found[OPTIMAL][0]
            )
