"""Hit rate against capacity: by hand, against sets, and against LRU over single blocks."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from evictor import EvictionPolicy, LruPolicy, available_policies, registry
from offload.errors import OffloadError
from offload.observe.trace import TraceRequest
from offload.settings import GIB
from offload.sizing.capacity import FRACTIONS, chains_of, replay, size_pool
from tests.evictor.test_golden_hits import CAPACITIES, GOLDEN, TRACES, chains

TOKEN = GIB // 512
"""Bytes per token with which a block takes a GiB."""


def request(*ids: int, at: float = 0.0, rest: int = 0) -> TraceRequest:
    return TraceRequest(at, 512 * len(ids) + rest, 1, ids)


def random_trace(seed: int) -> list[TraceRequest]:
    """Conversations that grow, over a few shared beginnings."""
    rng = random.Random(seed)
    users: list[list[int]] = [[rng.randrange(3)] for _ in range(12)]
    trace = []
    for number in range(200):
        ids = rng.choice(users)
        ids += [1000 + 10 * number + index for index in range(rng.randrange(4))]
        trace.append(request(*ids, at=number / 10, rest=rng.randrange(512)))
    return trace


def found_without_limit(trace: Iterable[TraceRequest]) -> int:
    known: set[int] = set()
    found = 0
    for each in trace:
        found += len(known.intersection(each.hash_ids))
        known.update(each.hash_ids)
    return found


def test_by_hand() -> None:
    """Two documents of two blocks in turns; with room for two blocks LRU finds none, with four all."""
    trace = [request(1, 2), request(3, 4, rest=100), request(1, 2), request(3, 4)]
    sizing = size_pool(trace, TOKEN, policy="lru", gib=[2, 3, 4, 99])
    assert (sizing.requests, sizing.prompt_tokens, sizing.prompt_blocks) == (4, 4 * 1024 + 100, 8)
    assert sizing.distinct_blocks == 4
    rows = [(row.capacity_blocks, row.gib, row.capacity_fraction) for row in sizing.rows]
    assert rows == [(2, 2.0, 0.5), (3, 3.0, 0.75), (4, 4.0, 1.0)]
    assert [row.hit_rate for row in sizing.rows] == [0, 2 / 8, 4 / 8]
    assert [row.points_per_gib for row in sizing.rows] == [0, 25, 25]
    assert sizing.enough(0.5).gib == 3
    assert sizing.enough(0.51).gib == 4


@pytest.mark.parametrize("policy", available_policies())
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_without_limit_finds_what_was_ever_there(seed: int, policy: str) -> None:
    trace = random_trace(seed)
    sizing = size_pool(trace, TOKEN, policy=policy)
    assert sizing.rows[-1].hit_rate == found_without_limit(trace) / sizing.prompt_blocks > 0.3
    assert sizing.rows[-1].capacity_blocks == sizing.distinct_blocks
    assert [row.capacity_blocks for row in sizing.rows] == sorted(
        {max(1, round(fraction * sizing.distinct_blocks)) for fraction in FRACTIONS}
    )


@pytest.mark.parametrize("trace", TRACES)
def test_lru_finds_its_golden_numbers(trace: str) -> None:
    requests = list(chains(TRACES[trace]))
    hits = replay(requests, list(range(len(requests))), CAPACITIES, "lru")
    assert tuple(hits) == GOLDEN["lru"][trace]


def test_each_capacity_is_as_if_alone() -> None:
    trace = random_trace(7)
    together = size_pool(trace, TOKEN, gib=[5, 20, 80])
    for row in together.rows:
        alone = size_pool(trace, TOKEN, gib=[row.gib]).rows[0]
        assert (alone.capacity_blocks, alone.hit_rate) == (row.capacity_blocks, row.hit_rate)


def test_policies_read_the_time_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    class Watching(LruPolicy[Any]):
        def __init__(self, capacity: int, clock: registry.Clock) -> None:
            super().__init__()
            self.capacity, self.clock = capacity, clock

        def used(self, path: Sequence[Any], chain: Sequence[Any], depth: int) -> None:
            seen.append((self.capacity, self.clock()))
            super().used(path, chain, depth)

    def make(capacity: int, clock: registry.Clock) -> EvictionPolicy[Any]:
        return Watching(capacity, clock)

    monkeypatch.setitem(registry._FACTORIES, "watching", make)
    size_pool([request(1, at=2.5), request(1, 2, at=7.0)], TOKEN, policy="watching", gib=[1])
    assert set(seen) == {(1, 2.5), (2, 2.5), (1, 7.0), (2, 7.0)}


def test_policies_are_told_how_answers_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, and each pool of its own request."""
    told: list[tuple[int, float, int, int]] = []

    class Watching(LruPolicy[Any]):
        def __init__(self, capacity: int, clock: registry.Clock) -> None:
            super().__init__()
            self.capacity, self.clock, self.number = capacity, clock, 100 * capacity

        @property
        def turn(self) -> int:
            self.number += 1
            return self.number

        def ended(self, path: Any, chain: Any, depth: int, turn: int, ending: int) -> None:
            told.append((self.capacity, self.clock(), turn, ending))

    monkeypatch.setitem(registry._FACTORIES, "watching", Watching)
    ends = ((1.0, "tool"), (9.0, None), (2.0, "turn"), (0.5, "tool"), (50.0, "tool"), (0.0, None))
    trace = [
        replace(request(number + 1, at=float(number)), stop=stop, answer_seconds=took)
        for number, (took, stop) in enumerate(ends)
    ]
    size_pool(trace, TOKEN, policy="watching", gib=[1])
    assert told == [
        (each, when, 100 * each + turn, ending)
        for when, turn, ending in ((1.0, 1, 1), (3.5, 4, 1), (4.0, 3, 2))
        for each in (1, 6)
    ]


def test_an_id_after_something_else_is_another_block() -> None:
    first, second, third = chains_of([request(1, 2), request(2, 1), request(1, 2, 2)])
    assert third[:2] == first
    assert len({*first, *second, *third}) == 5
    assert min(map(len, first)) >= 8


def test_what_cannot_be_sized_is_refused() -> None:
    with pytest.raises(OffloadError, match="no prompt of this trace fills a block of 512 tokens"):
        size_pool([request(rest=500)], TOKEN)
    for size in (0.9, 0.0, -1.0, float("nan")):
        with pytest.raises(OffloadError, match=f"a pool of {size} GiB holds no block: .* give at least"):
            size_pool([request(1)], TOKEN, gib=[size])
    assert size_pool([request(1)], TOKEN, gib=[float("inf")]).rows[0].capacity_blocks == 1
