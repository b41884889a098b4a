"""What is replayed: a trace, traces put together, or documents asked in a cycle."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain, permutations
from operator import attrgetter
from pathlib import Path

import xxhash

from offload.observe.trace import IDS_BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from offload.sizing.capacity import chains_of

__all__ = [
    "SCALES",
    "Workload",
    "chains_in_blocks",
    "cycle",
    "halves",
    "later",
    "mixtures",
    "read_workload",
    "redrawn",
]

SCALES = (0.1, 10)
"""What the times of a trace are multiplied by."""

_Trace = list[TraceRequest]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by time of arrival.

    Attributes:
        name: of the trace, or ``a+b`` both at once, ``a>b`` one after the other, ``a*10`` with its times
            multiplied by 10.
        requests: with ids of blocks of ``IDS_BLOCK_TOKENS`` tokens.
        passes: how often the same requests come, one pass after the other; 1 for a trace.
        is_mixture: made of traces that are workloads themselves.
        pool_blocks: the only capacity it is for, in blocks of ``IDS_BLOCK_TOKENS``; None for any.
    """

    name: str
    requests: _Trace
    passes: int = 1
    is_mixture: bool = False
    pool_blocks: int | None = None

    def pass_slices(self) -> list[slice]:
        """The requests of each pass."""
        each = len(self.requests) // self.passes
        return [slice(number * each, (number + 1) * each) for number in range(self.passes)]


def read_workload(path: Path, limit: int | None = None) -> Workload:
    """The first ``limit`` requests of a trace (None: all), named after its file. O(file).

    Raises:
        TraceError: a line that is not a request, or no full block in all of them.
        OSError: the file cannot be read.
    """
    trace = Workload(path.stem.removesuffix("_trace"), read_trace(path, limit))
    if not any(request.hash_ids for request in trace.requests):
        raise TraceError(f"{path}: no prompt fills a block of {IDS_BLOCK_TOKENS} tokens")
    return trace


def mixtures(traces: Sequence[Workload], scales: Sequence[float] = SCALES) -> Iterator[Workload]:
    """All traces at once, one after the other in every order, and each with its times multiplied.

    Blocks of different traces are different blocks, whatever their ids. O(requests) memory for each.
    """
    if len(traces) > 1:
        apart = {
            trace.name: _own_ids(trace.requests, number, len(traces)) for number, trace in enumerate(traces)
        }
        together = list(merge(*apart.values(), key=attrgetter("timestamp_seconds")))
        yield Workload("+".join(apart), together, is_mixture=True)
        for order in permutations(apart):
            one_by_one = _concatenated([apart[name] for name in order])
            yield Workload(">".join(order), one_by_one, is_mixture=True)
    for trace in traces:
        for times in scales:
            scaled = [_scaled(each, times) for each in trace.requests]
            yield Workload(f"{trace.name}*{times:g}", scaled, is_mixture=True)


def halves(trace: Workload) -> tuple[Workload, Workload]:
    """Every other session by its first request, and the others; each request at its own time. O(requests).

    Where the trace names no sessions, one is all requests whose prompts begin with the same block.
    """
    sessions: dict[Hashable, int] = {}
    parts: tuple[_Trace, _Trace] = ([], [])
    for request in trace.requests:
        if request.hash_ids:
            session = request.session if request.session is not None else ("", request.hash_ids[0])
            parts[sessions.setdefault(session, len(sessions)) % 2].append(request)
    one, other = (Workload(f"{trace.name}, half {number}", part) for number, part in enumerate(parts, 1))
    return one, other


def later(requests: _Trace, seconds: float) -> _Trace:
    """The same, so much later."""
    return [replace(each, timestamp_seconds=seconds + each.timestamp_seconds) for each in requests]


def redrawn(trace: Workload, draws: int) -> Iterator[Workload]:
    """The same sessions with other starts, so many times, each by chance within the time that they had.

    A session is all requests whose prompts begin with the same block. Its requests stay as far apart as they
    were. The drawn workloads are the same each time. O(requests) memory for each.
    """
    starts: dict[int, float] = {}
    for request in trace.requests:
        if request.hash_ids:
            starts.setdefault(request.hash_ids[0], request.timestamp_seconds)
    last = max(starts.values())
    for seed in range(1, draws + 1):
        rng = random.Random(seed)
        moved = {first: rng.uniform(0.0, last) - start for first, start in starts.items()}
        requests = [
            replace(each, timestamp_seconds=each.timestamp_seconds + moved[each.hash_ids[0]])
            for each in trace.requests
            if each.hash_ids
        ]
        requests.sort(key=attrgetter("timestamp_seconds"))
        yield Workload(f"{trace.name}, draw {seed}", requests, is_mixture=True)


def cycle(documents: int, pool_documents: int, passes: int, document_blocks: int) -> Workload:
    """So many documents asked one after the other, a second apart, again and again; the pool holds fewer."""
    each = range(document_blocks)
    requests = [
        TraceRequest(
            timestamp_seconds=float(number),
            input_length=document_blocks * IDS_BLOCK_TOKENS,
            output_length=1,
            hash_ids=tuple(number % documents * document_blocks + position for position in each),
        )
        for number in range(documents * passes)
    ]
    pool_blocks = pool_documents * document_blocks
    return Workload(f"cycle {documents}/{pool_documents}", requests, passes, pool_blocks=pool_blocks)


def chains_in_blocks(requests: Sequence[TraceRequest], block_tokens: int) -> list[list[bytes]]:
    """A chain of prefix hashes for every request, in blocks of so many tokens. O(blocks).

    An id's block of ``IDS_BLOCK_TOKENS`` becomes as many smaller ones as it has room for. What a prompt has
    after its last id is less than an id stands for and stays unknown.
    """
    chains = chains_of(requests)
    parts = IDS_BLOCK_TOKENS // block_tokens
    if parts == 1:
        return chains
    numbers = [str(part).encode() for part in range(parts)]
    known = {
        each: [xxhash.xxh3_128_digest(each + number) for number in numbers] for each in {*chain(*chains)}
    }
    return [list(chain.from_iterable(map(known.__getitem__, each))) for each in chains]


def _scaled(request: TraceRequest, times: float) -> TraceRequest:
    seconds, took = times * request.timestamp_seconds, times * request.answer_seconds
    return replace(request, timestamp_seconds=seconds, answer_seconds=took)


def _own_ids(requests: _Trace, number: int, of: int) -> _Trace:
    """With ids that only trace ``number`` of ``of`` has."""
    return [replace(each, hash_ids=tuple(of * one + number for one in each.hash_ids)) for each in requests]


def _concatenated(traces: Sequence[_Trace]) -> _Trace:
    """Each trace begins when the one before it has had its last request."""
    joined: _Trace = []
    for trace in traces:
        joined += later(trace, joined[-1].timestamp_seconds if joined else 0.0)
    return joined
