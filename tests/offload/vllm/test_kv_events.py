"""KV events: every hash once for each group that has it, in order, so many in a step."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from allocator import Event, Evicted, Stored
from offload.scheduler.groups import Group, Kind
from offload.scheduler.spelling import Spelling
from offload.vllm import kv_events
from offload.vllm.groups import EventGroup
from offload.vllm.kv_events import KvEventStream

BLOCK = 16
PLAIN = [EventGroup(0, "full_attention", None, Group(Kind.FULL, BLOCK))]


@pytest.fixture(params=[True, False], ids=["numbers", "bytes"])
def as_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(envs.__dict__, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", request.param)
    return bool(request.param)


def hashes(count: int, first: int = 0, size: int = 32) -> list[bytes]:
    return [random.Random(index).randbytes(size) for index in range(first, first + count)]


def converted(each: bytes | None) -> Any:
    return None if each is None else maybe_convert_block_hash(BlockHash(each))


def drained(stream: KvEventStream, news: Sequence[Event]) -> Iterator[list[KVCacheEvent]]:
    """What each step publishes until nothing is left."""
    yield stream.take(news)
    stream.check_invariants()
    while stream.is_behind:
        yield stream.take([])
        stream.check_invariants()


def changes_of(events: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Hash by hash: what happened to it, and the hash before it if it was stored."""
    changes = []
    for event in events:
        assert (event.medium, event.group_idx) == ("CPU", 0)
        if isinstance(event, BlockRemoved):
            changes += [("removed", each, None) for each in event.block_hashes]
        else:
            assert isinstance(event, BlockStored)
            assert (event.block_size, event.token_ids) == (BLOCK, [])
            assert event.kv_cache_spec_kind == "full_attention"
            assert event.kv_cache_spec_sliding_window is None
            parents = [event.parent_block_hash, *event.block_hashes]
            changes += [
                ("stored", each, parent) for each, parent in zip(event.block_hashes, parents, strict=False)
            ]
    return changes


def expected_of(news: Sequence[Stored | Evicted]) -> list[tuple[str, Any, Any]]:
    expected: list[tuple[str, Any, Any]] = []
    for each in news:
        if isinstance(each, Evicted):
            expected += [("removed", converted(one), None) for one in each.hashes]
        else:
            parents = [each.parent_hash, *each.hashes]
            expected += [
                ("stored", converted(one), converted(parent))
                for one, parent in zip(each.hashes, parents, strict=False)
            ]
    return expected


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_hashes_are_those_that_vllm_publishes(size: int, as_numbers: bool) -> None:
    assert isinstance(converted(b"some hash"), int if as_numbers else bytes)
    news = [Stored(hashes(3, 0, size), None), Evicted(hashes(2, 1, size)), Stored(hashes(1, 9, size), b"x")]
    assert changes_of(KvEventStream(PLAIN, BLOCK).take(news)) == expected_of(news)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_is_spread_over_steps_in_order(
    seed: int, as_numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES", 50)
    rng = random.Random(seed)
    news: list[Stored | Evicted] = []
    for index in range(30):
        some = hashes(rng.choice([1, 1, 2, 40, 50, 51, 130]), 1000 * index)
        parent = rng.choice([None, b"parent %025d" % index])
        news.append(rng.choice([Stored(some, parent), Evicted(some)]))
    steps = list(drained(KvEventStream(PLAIN, BLOCK), news))
    assert changes_of([event for step in steps for event in step]) == expected_of(news)
    for step in steps:
        assert sum(len(event.block_hashes) for event in step) <= 50  # type: ignore[attr-defined]
        assert len(step) <= 50 // 32 + 1


@pytest.mark.parametrize("most", [50, 34])
def test_a_part_of_a_plan_is_spelled_as_its_place_in_it(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step publishes a part of that part."""
    monkeypatch.setattr(kv_events, "MAX_HASHES", most)
    spelling = Spelling(range(9 * BLOCK), BLOCK)  # of nine positions, of which these are the fourth to sixth
    steps = drained(KvEventStream(PLAIN, BLOCK), [Stored(hashes(3), None, spelling, num_behind=3)])
    token_ids = [one for step in steps for event in step for one in event.token_ids]  # type: ignore[attr-defined]
    assert token_ids == list(range(3 * BLOCK, 6 * BLOCK))


def test_what_comes_meanwhile_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES", 50)
    stream = KvEventStream(PLAIN, BLOCK)
    first, second = Evicted(hashes(80)), Stored(hashes(10, 100), None)
    events = [*stream.take([first]), *(event for step in drained(stream, [second]) for event in step)]
    assert changes_of(events) == expected_of([first, second])


def test_many_small_removals_are_one_event(as_numbers: bool) -> None:
    news = [Evicted(hashes(1, index)) for index in range(100)]
    (event,) = KvEventStream(PLAIN, BLOCK).take(news)
    assert isinstance(event, BlockRemoved)
    assert len(event.block_hashes) == 100


def test_nothing_is_nothing() -> None:
    stream = KvEventStream(PLAIN, BLOCK)
    assert stream.take([]) == []
    assert not stream.is_behind
