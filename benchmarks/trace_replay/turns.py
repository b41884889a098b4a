"""A trace with answers: each is what the next turn's prompt has in its place, or nothing that anybody has.

The trace tells prompts and the lengths of answers. A request whose prompt begins with another one's and is
long enough for its answer counts as that one's next turn. In the variant `returned` an answer's blocks are
those of that prompt, in the variant `stripped` nobody else's; without a next turn they are nobody else's.
Answers end `_SECONDS_PER_TOKEN` for each of their tokens after their request has come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from allocator import CpuOffloadingBlockAllocator
from benchmarks.trace_replay.replay import TraceClock
from evictor import make_policy
from offload.config import DEFAULT_POLICY
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceRequest
from offload.scheduler.answers import AnswerReuse

__all__ = ["chains_of", "next_turns", "replay_turns"]

_BLOCK = 64
_PER_ID = IDS_BLOCK_TOKENS // _BLOCK
_SECONDS_PER_TOKEN = 0.02
_FRACTIONS = (0.05, 0.2, 1.0)


def next_turns(trace: Sequence[TraceRequest]) -> list[int | None]:
    """By request the index of its next turn, None where there is none."""
    found: list[int | None] = [None] * len(trace)
    waiting: dict[int, int] = {}  # by the last id of their prompts, those that have had none
    for index, request in enumerate(trace):
        for prefix_id in reversed(request.hash_ids):
            before = waiting.get(prefix_id)
            if before is not None and _has_room(trace[before], request):
                found[before] = index
                del waiting[prefix_id]
                break
        if request.hash_ids:
            waiting[request.hash_ids[-1]] = index
    return found


def _has_room(before: TraceRequest, request: TraceRequest) -> bool:
    return before.input_length + before.output_length <= request.input_length


def chains_of(trace: Sequence[TraceRequest], returns: bool) -> list[list[bytes]]:
    """Prefix hashes of prompt and answer of each request, in blocks of 64 tokens."""
    chains = []
    for index, (request, after) in enumerate(zip(trace, next_turns(trace), strict=True)):
        num_prompt = request.input_length // _BLOCK
        num_all = (request.input_length + request.output_length) // _BLOCK
        ids: Sequence[int] = request.hash_ids
        num_shared = len(ids) * _PER_ID
        if after is not None:
            ids = trace[after].hash_ids
            num_shared = min(len(ids) * _PER_ID, num_all if returns else num_prompt)
        chain = [_shared(ids[place // _PER_ID], place % _PER_ID) for place in range(min(num_shared, num_all))]
        chain += [_own(index, place) for place in range(len(chain), num_all)]
        chains.append(chain)
    return chains


def replay_turns(name: str, trace: Sequence[TraceRequest], count_from: int) -> Iterator[dict[str, Any]]:
    """A row per variant, pool and mode, as `benchmarks.answers` has them."""
    num_blocks = len({each for request in trace for each in request.hash_ids}) * _PER_ID
    for returns in (True, False):
        chains = chains_of(trace, returns)
        for fraction in _FRACTIONS:
            with_all: dict[str, int] = {}
            for store in (True, False, "auto"):
                found = _replay(trace, chains, max(1, int(num_blocks * fraction)), store, count_from)
                with_all = with_all or found
                after = with_all["answer_blocks_after"]
                yield {
                    "scene": f"{name}, {'returned' if returns else 'stripped'}",
                    "pool": f"{fraction:.0%}",
                    "store_decode_blocks": store,
                    **found,
                    "hits_of_true": round(found["hit_tokens"] / max(1, with_all["hit_tokens"]), 4),
                    "saved_of_true": round(1 - found["answer_blocks_after"] / after, 4) if after else None,
                }


def _replay(
    trace: Sequence[TraceRequest],
    chains: list[list[bytes]],
    capacity: int,
    store: bool | str,
    count_from: int,
) -> dict[str, int]:
    clock = TraceClock()
    allocator = CpuOffloadingBlockAllocator(capacity, policy=make_policy(DEFAULT_POLICY, capacity, clock))
    answers = AnswerReuse(store if isinstance(store, bool) else None)
    counts = {"prompt_tokens": 0, "hit_tokens": 0, "answer_blocks": 0, "answer_blocks_after": 0}
    running: list[tuple[float, int, Any]] = []

    def end_until(seconds: float) -> None:
        while running and running[0][0] <= seconds:
            clock.seconds, index, kind = heapq.heappop(running)
            chain, num_prompt = chains[index], trace[index].input_length // _BLOCK
            answers.ended(chain, num_prompt, kind)
            if answers.are_stored(kind):
                num_stored = _store(allocator, chain, len(chain))
                counts["answer_blocks"] += num_stored
                counts["answer_blocks_after"] += num_stored * (index >= count_from)

    for index, (request, chain) in enumerate(zip(trace, chains, strict=True)):
        end_until(request.timestamp_seconds)
        clock.seconds = request.timestamp_seconds
        num_prompt = request.input_length // _BLOCK
        num_found = allocator.known_depth(chain, num_prompt)
        kind = answers.arrived(chain, num_prompt, num_found)
        counts["prompt_tokens"] += request.input_length
        counts["hit_tokens"] += num_found * _BLOCK
        allocator.touch(chain[:num_prompt])
        _store(allocator, chain, num_prompt)
        if len(chain) > num_prompt:
            end = request.timestamp_seconds + _SECONDS_PER_TOKEN * request.output_length
            heapq.heappush(running, (end, index, kind))
    end_until(float("inf"))
    allocator.check_invariants()
    answers.check_invariants()
    return counts


def _store(allocator: CpuOffloadingBlockAllocator, chain: Sequence[bytes], stop: int) -> int:
    plan = allocator.plan_store(chain, stop)
    if plan is None:
        return 0
    allocator.commit(plan)
    return len(plan.hashes)


def _shared(prefix_id: int, place: int) -> bytes:
    return (prefix_id * _PER_ID + place).to_bytes(16)


def _own(index: int, place: int) -> bytes:
    return ((1 << 126) + (index << 40) + place).to_bytes(16)
