"""Hit rate against capacity: what pools of several sizes would have found for a trace of requests."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import make_policy
from offload.config import DEFAULT_POLICY
from offload.errors import OffloadError
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceRequest
from offload.settings import GIB
from offload.sizing.ends import End, ends_of

FRACTIONS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
"""Default pool sizes, as fractions of the distinct blocks of the trace."""

_POINTS = 100


@dataclass(frozen=True, slots=True)
class SizeRow:
    """What one size of the pool is worth.

    Attributes:
        capacity_blocks: blocks of ``IDS_BLOCK_TOKENS`` tokens that fit.
        capacity_fraction: the same, as a fraction of the distinct blocks of the trace.
        gib: memory that takes.
        hit_rate: tokens found in the pool, as a fraction of those in full blocks of prompts.
        points_per_gib: percentage points of hit rate that each GiB adds from the row before on, or from
            nothing on.
    """

    capacity_blocks: int
    capacity_fraction: float
    gib: float
    hit_rate: float
    points_per_gib: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """Pools of several sizes over one trace.

    Attributes:
        policy: name of the eviction policy.
        bytes_per_token: of KV.
        requests: in the trace.
        prompt_tokens: of all requests, those after the last full block too.
        prompt_blocks: full blocks of all prompts.
        distinct_blocks: different ones among them; a pool of so many never evicts.
        rows: by capacity; the last is the pool that never evicts.
    """

    policy: str
    bytes_per_token: int
    requests: int
    prompt_tokens: int
    prompt_blocks: int
    distinct_blocks: int
    rows: tuple[SizeRow, ...]

    def enough(self, share: float) -> SizeRow:
        """The smallest of these pools with at least ``share`` of the hits of one that never evicts."""
        return next(row for row in self.rows if row.hit_rate >= share * self.rows[-1].hit_rate)


def size_pool(
    trace: Sequence[TraceRequest],
    bytes_per_token: int,
    *,
    policy: str = DEFAULT_POLICY,
    gib: Iterable[float] | None = None,
) -> Sizing:
    """What pools of these sizes would have found, and one that never evicts.

    Args:
        trace: requests by time of arrival.
        bytes_per_token: of KV, over all layers and ranks; at least 1.
        policy: one of ``evictor.available_policies()``.
        gib: sizes in GiB; None for ``FRACTIONS`` of the distinct blocks.

    Raises:
        OffloadError: no prompt fills a block, or a size is smaller than one.
    """
    chains = chains_of(trace)
    num_blocks = sum(map(len, chains))
    distinct = len({each for chain in chains for each in chain})
    if not distinct:
        raise OffloadError(
            f"no prompt of this trace fills a block of {IDS_BLOCK_TOKENS} tokens: nothing can be found again"
        )
    block_gib = IDS_BLOCK_TOKENS * bytes_per_token / GIB
    if gib is None:
        sizes = {max(1, round(fraction * distinct)) for fraction in FRACTIONS}
    else:
        sizes = {_blocks_in(each, block_gib, distinct) for each in gib}
    capacities = sorted(sizes | {distinct})
    arrivals = [request.timestamp_seconds for request in trace]
    hits = replay(chains, arrivals, capacities, policy, ends_of(trace))
    curve = [
        (0.0, 0.0),
        *((capacity * block_gib, each / num_blocks) for capacity, each in zip(capacities, hits, strict=True)),
    ]
    rows = (
        SizeRow(capacity, capacity / distinct, size, rate, _POINTS * (rate - less) / (size - smaller))
        for capacity, ((smaller, less), (size, rate)) in zip(capacities, pairwise(curve), strict=True)
    )
    prompt_tokens = sum(request.input_length for request in trace)
    return Sizing(policy, bytes_per_token, len(trace), prompt_tokens, num_blocks, distinct, tuple(rows))


def chains_of(trace: Iterable[TraceRequest]) -> list[list[bytes]]:
    """A chain of prefix hashes for every request, equal where ids and all before them are. O(ids).

    An id that has something else before it, which no prefix hash has, counts as another one.
    """
    known: dict[tuple[bytes, int], bytes] = {}
    chains = []
    for request in trace:
        chain: list[bytes] = []
        parent = b""
        for each in request.hash_ids:
            found = known.get((parent, each))
            if found is None:
                found = known[parent, each] = xxhash.xxh3_128_digest(parent + str(each).encode())
            chain.append(found)
            parent = found
        chains.append(chain)
    return chains


def replay(
    chains: Sequence[Sequence[bytes]],
    arrivals: Sequence[float],
    capacities: Sequence[int],
    policy: str,
    ends: Sequence[End] = (),
) -> list[int]:
    """Blocks found in pools of so many blocks: for each pool, all requests together.

    One pass over the requests feeds one allocator per capacity, the connector's own with its own policy.
    Nothing is sampled or modelled: each number is what a replay for that capacity alone would count. A
    policy's clock shows the time of the request, or of the end of an answer that it is told of. A replay
    simplifies: a request's blocks are in the pool as soon as the next one arrives. Blocks of answers are not
    in a trace.

    O(requests * capacities) calls of O(log n) each, plus array work on what is stored and evicted.
    """
    now = 0.0

    def clock() -> float:
        return now

    pools = [
        CpuOffloadingBlockAllocator(capacity, policy=make_policy(policy, capacity, clock))
        for capacity in capacities
    ]
    hits = [0] * len(pools)
    turns: list[list[int]] = []  # by request, then by pool
    to_come = deque(ends)
    for chain, arrival in zip(chains, arrivals, strict=True):
        while to_come and to_come[0].is_told(arrival, len(turns)):
            end = to_come.popleft()
            now = end.seconds
            for pool, turn in zip(pools, turns[end.request], strict=True):
                pool.ended(chains[end.request], turn, end.ending)
        now = arrival
        served = [serve(pool, chain) for pool in pools]
        turns.append([each.turn for each in served])
        hits = [total + each.depth for total, each in zip(hits, served, strict=True)]
    return hits


def _blocks_in(gib: float, block_gib: float, most: int) -> int:
    if not gib >= block_gib:
        raise OffloadError(
            f"a pool of {gib} GiB holds no block: {IDS_BLOCK_TOKENS} tokens of this model take "
            f"{block_gib:.3g} GiB; give at least that"
        )
    return int(min(gib / block_gib, most))
