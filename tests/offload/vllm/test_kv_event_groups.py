"""KV events of hybrid models: each group by its name, and what several bags have in common once."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from allocator import BagEvicted, BagStored, Event, Evicted, Stored
from offload.scheduler.groups import Group, Kind
from offload.vllm import kv_events
from offload.vllm.groups import EventGroup
from offload.vllm.kv_events import KvEventStream

BLOCK = 16
FULL, HALF = Group(Kind.FULL, BLOCK), Group(Kind.FULL, BLOCK // 2)
WINDOW, SMALL_WINDOW = Group(Kind.WINDOW, BLOCK, 32), Group(Kind.WINDOW, BLOCK // 2, 24)
CHUNK, STATE = Group(Kind.CHUNK, BLOCK, 4 * BLOCK), Group(Kind.STATE, BLOCK)
SAID = {
    0: ("full_attention", None),
    1: ("sliding_window", 33),
    2: ("mla_attention", None),
    3: ("chunked_local_attention", None),
    4: ("mamba", None),
    5: ("sliding_window", 33),
    7: ("sliding_window", 25),
}


@pytest.fixture(autouse=True)
def as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(envs.__dict__, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", False)


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [random.Random(index).randbytes(32) for index in range(first, first + count)]


CHAIN = hashes(20)


def stream_of(groups: dict[int, Group]) -> KvEventStream:
    return KvEventStream([EventGroup(index, *SAID[index], each) for index, each in groups.items()], BLOCK)


def bag(depth: int, chain: Sequence[bytes] = CHAIN) -> BagStored:
    """As of an allocator that names four positions."""
    return BagStored(depth, list(chain[max(0, depth - 4) : depth]))


def stored(group_id: int, block_size: int, some: Sequence[bytes], parent: bytes | None = None) -> BlockStored:
    kind, window = SAID[group_id]
    return BlockStored(
        block_hashes=list(some),
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=group_id,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def removed(group_id: int, some: Sequence[bytes]) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(some), medium="CPU", group_idx=group_id)


def drained(stream: KvEventStream, news: Sequence[Event]) -> Iterator[list[Any]]:
    """What each step publishes until nothing is left."""
    yield stream.take(news)
    while stream.is_behind:
        stream.check_invariants()
        yield stream.take([])


def test_each_with_full_attention_has_events_of_its_own() -> None:
    """Where blocks are smaller than a position, only hashes of positions are known."""
    stream = stream_of({0: FULL, 2: HALF})
    parts = [(CHAIN[:2], None), (CHAIN[2:3], CHAIN[1])]
    events = stream.take([Stored(some, parent) for some, parent in parts])
    assert events == [stored(group, BLOCK, *part) for part in parts for group in (0, 2)]
    events = stream.take([Evicted(CHAIN[2:3]), Evicted(CHAIN[:2])])
    gone = [CHAIN[2], *CHAIN[:2]]
    assert events == [removed(0, gone), removed(2, gone)]


def test_a_storm_of_several_groups_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES", 50)
    some = hashes(60)
    steps = list(drained(stream_of({0: FULL, 2: FULL}), [Evicted(some)]))
    assert [[len(event.block_hashes) for event in step] for step in steps] == [[25, 25], [25, 25], [10, 10]]
    for index, group in enumerate((0, 2)):
        events = [step[index] for step in steps]
        assert {event.group_idx for event in events} == {group}
        assert [each for event in events for each in event.block_hashes] == some


def test_what_two_windows_have_in_common_is_stored_once() -> None:
    stream = stream_of({0: FULL, 1: WINDOW, 5: WINDOW})
    assert stream.take([bag(6)]) == [stored(group, BLOCK, CHAIN[4:6], CHAIN[3]) for group in (1, 5)]
    assert stream.take([bag(7)]) == [stored(group, BLOCK, CHAIN[6:7], CHAIN[5]) for group in (1, 5)]
    stream.check_invariants()
    assert stream.take([BagEvicted(CHAIN[5])]) == [removed(group, CHAIN[4:5]) for group in (1, 5)]
    assert stream.take([bag(6)]) == [stored(group, BLOCK, CHAIN[4:5], CHAIN[3]) for group in (1, 5)]
    gone = [*CHAIN[6:7], *CHAIN[4:6]]
    events = stream.take([BagEvicted(CHAIN[6]), BagEvicted(CHAIN[5])])
    assert events == [removed(group, gone) for group in (1, 5)]
    stream.check_invariants()
    assert not stream._bags


def test_removals_of_a_group_that_follow_each_other_are_one_event() -> None:
    stream = stream_of({0: FULL, 1: WINDOW})
    stream.take([bag(3), bag(9)])
    news = [BagEvicted(CHAIN[8]), Evicted(CHAIN[4:9]), BagEvicted(CHAIN[2]), Evicted(CHAIN[:4])]
    assert stream.take(news) == [
        removed(1, [*CHAIN[7:9], *CHAIN[1:3]]),
        removed(0, [*CHAIN[4:9], *CHAIN[:4]]),
    ]


def test_what_is_stored_between_two_removals_stays_between_them() -> None:
    stream = stream_of({0: FULL, 1: WINDOW})
    stream.take([Stored(CHAIN[:6], None), bag(6)])
    news = [BagEvicted(CHAIN[5]), bag(6), BagEvicted(CHAIN[5])]
    assert stream.take(news) == [
        removed(1, CHAIN[4:6]),
        stored(1, BLOCK, CHAIN[4:6], CHAIN[3]),
        removed(1, CHAIN[4:6]),
    ]


def test_a_bag_at_the_start_of_a_chain() -> None:
    stream = stream_of({0: FULL, 1: WINDOW})
    assert stream.take([bag(1)]) == [stored(1, BLOCK, CHAIN[:1])]
    assert stream.take([bag(2)]) == [stored(1, BLOCK, CHAIN[1:2], CHAIN[0])]


def test_windows_of_forks_are_told_apart() -> None:
    stream = stream_of({0: FULL, 1: WINDOW})
    fork = [*CHAIN[:5], *hashes(3, 50)]
    stream.take([bag(6)])
    assert stream.take([bag(6, fork)]) == [stored(1, BLOCK, fork[5:6], CHAIN[4])]
    assert stream.take([BagEvicted(CHAIN[5])]) == [removed(1, CHAIN[5:6])]


def test_what_a_fork_has_may_lie_between_what_is_new() -> None:
    """Other bags have the second block of three."""
    stream = stream_of({1: Group(Kind.WINDOW, BLOCK, 3 * BLOCK)})
    fork = [*CHAIN[:2], *hashes(3, 50)]
    assert stream.take([bag(4, fork)]) == [stored(1, BLOCK, fork[1:4], CHAIN[0])]
    assert stream.take([bag(3)]) == [stored(1, BLOCK, CHAIN[:1]), stored(1, BLOCK, CHAIN[2:3], CHAIN[1])]
    assert stream.take([BagEvicted(CHAIN[2])]) == [removed(1, [CHAIN[0], CHAIN[2]])]


def test_of_blocks_smaller_than_a_position_that_at_its_end_is_named() -> None:
    """Three blocks of 8 tokens are a position and a half; the hash of the one in between is not known."""
    stream = stream_of({2: HALF, 7: SMALL_WINDOW})
    assert stream.take([bag(6)]) == [stored(7, BLOCK // 2, CHAIN[4:6], CHAIN[3])]


def test_chunks_and_states() -> None:
    stream = stream_of({0: FULL, 3: CHUNK, 4: STATE})
    assert stream.take([bag(6)]) == [
        stored(3, BLOCK, CHAIN[4:6], CHAIN[3]),
        stored(4, BLOCK, CHAIN[5:6], CHAIN[4]),
    ]
    assert stream.take([bag(8)]) == [stored(4, BLOCK, CHAIN[7:8], CHAIN[6])], "the chunk is over"
    assert stream.take([BagEvicted(CHAIN[7])]) == [removed(4, CHAIN[7:8])]


def test_without_full_attention_there_are_bags_only() -> None:
    stream = stream_of({1: WINDOW})
    news = [Stored(CHAIN[:6], None), bag(6), BagEvicted(CHAIN[5]), Evicted(CHAIN[:6])]
    assert stream.take(news) == [stored(1, BLOCK, CHAIN[4:6], CHAIN[3]), removed(1, CHAIN[4:6])]
    assert not stream.is_behind


def test_a_storm_of_bags_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of({0: FULL, 1: WINDOW})
    depths = range(2, 16, 2)
    stream.take([bag(depth) for depth in depths])
    monkeypatch.setattr(kv_events, "MAX_HASHES", 100)
    steps = list(drained(stream, [BagEvicted(CHAIN[depth - 1]) for depth in depths]))
    assert [[event.block_hashes for event in step] for step in steps] == [
        [CHAIN[:4]], [CHAIN[4:8]], [CHAIN[8:12]], [CHAIN[12:14]]
    ]  # fmt: skip
    assert not stream._bags


@pytest.mark.parametrize(
    ("groups", "news"),
    [
        ({0: FULL, 3: Group(Kind.CHUNK, BLOCK, 20 * BLOCK)}, [bag(depth) for depth in range(2, 18)]),
        ({1: WINDOW}, [Stored([each], None) for each in CHAIN]),
        ({1: WINDOW}, [Evicted([each]) for each in CHAIN]),
    ],
    ids=["blocks of other bags", "positions without blocks", "evicted ones"],
)
def test_what_is_not_published_counts_too(
    groups: dict[int, Group], news: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step looks at no more than so many hashes, also where it finds nothing to publish."""
    monkeypatch.setattr(kv_events, "_EVENT_COST", 0)
    monkeypatch.setattr(kv_events, "MAX_HASHES", 10)
    news = [
        each._replace(hashes=CHAIN[: each.depth]) if isinstance(each, BagStored) else each for each in news
    ]
    stream = stream_of(groups)
    stream.take(news)
    assert stream.is_behind
    assert len(stream._waiting) >= len(news) - 10
    for _ in news:
        stream.take([])
    assert not stream.is_behind
