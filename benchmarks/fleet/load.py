"""A trace as the load of a fleet: as many copies as it takes, and faster."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from benchmarks.trace_replay.prefill import PrefillModel
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceRequest, read_trace

__all__ = ["Load", "conversations", "load_of", "read_load_trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a fleet, by time of arrival.

    Attributes:
        trace: its name.
        requests: all of them; blocks of different copies of the trace are different blocks.
        copies: of the trace, all at once.
        speed: how many times as fast as in the trace they come.
    """

    trace: str
    requests: list[TraceRequest]
    copies: int
    speed: float


def load_of(name: str, trace: Sequence[TraceRequest], engines: int, per_engine: int, share: float) -> Load:
    """The load of so many engines.

    Args:
        name, trace: of one hour or more.
        per_engine: requests of each engine, at least; the trace is copied until there are so many.
        share: of the engines' time that prefill takes if nothing is ever found again, and all have the same.
    """
    copies = max(1, -(-engines * per_engine // len(trace)))
    seconds = PrefillModel().seconds(each.input_length for each in trace) * copies
    lasts = trace[-1].timestamp_seconds
    speed = lasts * engines * share / seconds
    requests = sorted(_copied(trace, copies, speed), key=attrgetter("timestamp_seconds"))
    return Load(name, requests, copies, speed)


def _copied(trace: Sequence[TraceRequest], copies: int, speed: float) -> Iterator[TraceRequest]:
    """Each copy begins a little later than the one before, so that they do not go in step."""
    stagger = trace[-1].timestamp_seconds / len(trace) / copies
    for each in trace:
        for copy in range(copies):
            yield TraceRequest(
                (each.timestamp_seconds + copy * stagger) / speed,
                each.input_length,
                each.output_length,
                tuple(one * copies + copy for one in each.hash_ids),
            )


def conversations(count: int, turns: int, seed: int) -> list[TraceRequest]:
    """A trace of talks that begin within a quarter of an hour, each turn with all that was said before."""
    rng, requests = random.Random(seed), []
    for talk in range(count):
        at, ids = rng.uniform(0, 900), [0, 1]
        for turn in range(turns):
            ids = [*ids, *(1000 * (talk + 1) + 10 * turn + part for part in range(4))]
            at += rng.uniform(20, 60)
            requests.append(TraceRequest(at, IDS_BLOCK_TOKENS * len(ids) + 9, 50, tuple(ids)))
    return sorted(requests, key=attrgetter("timestamp_seconds"))


def read_load_trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace that fill a block. TraceError and OSError as ``read_trace``."""
    return [each for each in read_trace(path) if each.input_length >= IDS_BLOCK_TOKENS]
