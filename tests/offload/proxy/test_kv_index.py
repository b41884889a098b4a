"""What engines have, by their KV events, as vLLM encodes them; and events that are wrong in every way."""

import random
from collections.abc import Sequence
from itertools import permutations
from math import gcd
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from offload.proxy import kv_messages
from offload.proxy.kv_index import EngineIndex, Prompt
from offload.proxy.kv_messages import events_in

BLOCK = 16
IDS = random.Random(4).choices(range(100_000), k=40 * BLOCK)


def batch(*events: Any) -> bytes:
    """As vLLM's publisher encodes it."""
    return msgspec.msgpack.Encoder().encode(KVEventBatch(ts=1.0, events=list(events)))


def hashes_of(ids: Sequence[int], size: int = BLOCK, about: object = None) -> list[bytes]:
    """Any function of all that is before will do."""
    return [repr((about, hash(tuple(ids[:end])))).encode() for end in range(size, len(ids) + 1, size)]


def stored(
    ids: Sequence[int], start: int = 0, size: int = BLOCK, about: object = None, **more: Any
) -> BlockStored:
    """The blocks of a prompt from that token on."""
    hashes = hashes_of(ids, size, about)[start // size :]
    parent = hashes_of(ids[:start], BLOCK, about)[-1] if start else None
    known = {"medium": "CPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention", "lora_name": None}
    own = list(ids[start : len(ids) // size * size])
    return BlockStored(hashes, parent, own, size, None, **{**known, **more})


def removed(hashes: Sequence[bytes], medium: str = "CPU", group: int = 0, **more: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group, **more)


def hear(index: EngineIndex, *events: Any) -> None:
    for event in events_in(batch(*events)):
        assert event is not None
        index.hear(event)
        index.check_invariants()


def depth(index: EngineIndex, ids: Sequence[int], model: str = "", salt: str = "") -> int:
    return index.depth(Prompt(ids, model, salt))


@pytest.fixture
def index() -> EngineIndex:
    return EngineIndex(1000)


def test_the_longest_beginning_is_found(index: EngineIndex) -> None:
    hear(index, stored(IDS[: 10 * BLOCK]), stored(IDS[: 20 * BLOCK], 10 * BLOCK))
    assert depth(index, IDS) == 20 * BLOCK
    assert depth(index, IDS[: 15 * BLOCK + 3]) == 15 * BLOCK
    assert depth(index, [*IDS[:BLOCK], 7, *IDS[BLOCK:]]) == BLOCK
    assert depth(index, [7, *IDS]) == 0
    hear(index, removed(hashes_of(IDS)[12:20]))
    assert depth(index, IDS) == 12 * BLOCK
    hear(index, stored(IDS[: 16 * BLOCK], 12 * BLOCK))
    assert depth(index, IDS) == 16 * BLOCK


def test_media_go_together_and_one_of_them_is_cleared(index: EngineIndex) -> None:
    """An extent of a tier covers what the pool has lost of it."""
    hear(index, stored(IDS[: 4 * BLOCK], medium="GPU"), stored(IDS[: 2 * BLOCK]))
    hear(index, stored(IDS[: 6 * BLOCK], 4 * BLOCK, medium="GPU"))
    assert depth(index, IDS) == 6 * BLOCK
    hear(index, AllBlocksCleared())
    assert depth(index, IDS) == 2 * BLOCK
    hear(index, stored(IDS[: 16 * BLOCK], 0, 8 * BLOCK, medium="STORAGE", locality="LOCAL"))
    assert depth(index, IDS) == 16 * BLOCK
    hear(index, removed(hashes_of(IDS)[:2]))
    assert depth(index, IDS) == 16 * BLOCK
    hear(index, removed(hashes_of(IDS, 8 * BLOCK)[1:], "STORAGE", locality="LOCAL"))
    assert depth(index, IDS) == 8 * BLOCK


def test_what_engines_share_and_what_windows_have_is_not_counted(index: EngineIndex) -> None:
    hear(index, stored(IDS, medium="STORAGE", locality="REMOTE"))
    hear(index, stored(IDS, kv_cache_spec_kind="sliding_window", group_idx=1))
    assert not len(index) and depth(index, IDS) == 0
    hear(index, stored(IDS[: 2 * BLOCK]))
    hear(index, removed(hashes_of(IDS), group=1))
    assert depth(index, IDS) == 2 * BLOCK


def test_salts_and_adapters_are_apart(index: EngineIndex) -> None:
    plain, salted, adapted = IDS[: 2 * BLOCK], IDS[: 4 * BLOCK], IDS[: 6 * BLOCK]
    hear(index, stored(plain))
    hear(index, stored(salted, about="salt", extra_keys=[("salt",), *[None] * 3]))
    hear(index, stored(adapted, about="poems", lora_name="poems", extra_keys=[("poems",)] * 6))
    both = stored(
        IDS[: 8 * BLOCK], about=1, lora_name="poems", extra_keys=[("poems", "salt"), *[("poems",)] * 7]
    )
    hear(index, both)
    assert depth(index, IDS, "model") == len(plain)
    assert depth(index, IDS, "model", "salt") == len(salted)
    assert depth(index, IDS, "model", "other") == 0
    assert depth(index, IDS, "poems") == len(adapted)
    assert depth(index, IDS, "poems", "salt") == 8 * BLOCK


def test_an_adapter_has_none_of_the_models_blocks(index: EngineIndex) -> None:
    hear(index, stored(IDS[: 3 * BLOCK], about="poems", lora_name="poems", extra_keys=[("poems",)] * 3))
    assert depth(index, IDS, "model") == 0
    assert depth(index, IDS, "poems") == 3 * BLOCK


def test_nothing_is_found_behind_a_gap(index: EngineIndex) -> None:
    """However large the blocks of another medium are."""
    extent = stored(IDS[: 4 * BLOCK], 0, 4 * BLOCK, medium="STORAGE", locality="LOCAL")
    hear(index, stored(IDS[: 4 * BLOCK]), extent, removed(hashes_of(IDS)[1:2]))
    assert depth(index, IDS) == 4 * BLOCK
    hear(index, removed(extent.block_hashes, "STORAGE", locality="LOCAL"))
    hear(index, stored(IDS[: 9 * BLOCK], 8 * BLOCK))
    assert depth(index, IDS) == BLOCK
    hear(index, stored(IDS[: 2 * BLOCK], BLOCK, medium="GPU"))
    assert depth(index, IDS) == 4 * BLOCK
    hear(index, AllBlocksCleared())
    assert depth(index, IDS) == BLOCK


def test_images_are_not_their_placeholders(index: EngineIndex) -> None:
    """The same token ids with another picture: nobody knows that it is the same."""
    hear(index, stored(IDS[: 4 * BLOCK], extra_keys=[None, None, ("picture", 3), None]))
    assert depth(index, IDS) == 2 * BLOCK


def test_what_is_behind_something_unknown_is_left_out(index: EngineIndex) -> None:
    index.clear(is_whole=True)
    hear(index, stored(IDS[: 4 * BLOCK], 2 * BLOCK))
    assert depth(index, IDS) == 0 and index.num_left_out == 2 and not index.is_whole
    hear(index, stored(IDS[: 2 * BLOCK]), stored(IDS[: 4 * BLOCK], 2 * BLOCK))
    assert depth(index, IDS) == 4 * BLOCK
    silent = stored(IDS[: 6 * BLOCK], 4 * BLOCK)
    silent.token_ids = []
    hear(index, silent)
    assert depth(index, IDS) == 4 * BLOCK


def test_it_is_bounded(index: EngineIndex) -> None:
    """The beginning of what does not fit is there; what leaves makes room."""
    small = EngineIndex(10)
    hear(small, stored(IDS))
    assert len(small) == 10 and depth(small, IDS) == 10 * BLOCK and not small.is_whole
    hear(small, removed(hashes_of(IDS)[8:10]), stored([7, *IDS[: 2 * BLOCK]]))
    assert len(small) == 10 and depth(small, [7, *IDS]) == 2 * BLOCK
    for number in range(20):
        hear(index, stored(IDS[: 2 * BLOCK], medium=f"M{number}"))
    for number in range(200):
        hear(index, stored(IDS[: 2 * BLOCK], group_idx=number))
    for number in range(2000):
        hear(index, stored(IDS[:BLOCK], about=number, lora_name=f"n{number}", extra_keys=[(f"n{number}",)]))


def test_smaller_blocks_begin_anew(index: EngineIndex) -> None:
    hear(index, stored(IDS[: 8 * BLOCK]))
    hear(index, stored(IDS[:24], 0, 8, medium="GPU"))
    assert depth(index, IDS) == 0 and len(index) == 0 and not index.is_whole
    hear(index, stored(IDS[: 2 * BLOCK]), stored(IDS[:24], 0, 8, medium="GPU"))
    assert depth(index, IDS) == 2 * BLOCK
    hear(index, stored(IDS[:9], 0, 3))
    assert depth(index, IDS) == 2 * BLOCK, "no engine has blocks of three"


@pytest.mark.parametrize("sizes", list(permutations((8, 16, 24, 32))), ids=str)
def test_blocks_of_many_sizes_have_one_kind_of_pieces(index: EngineIndex, sizes: tuple[int, ...]) -> None:
    """What comes with smaller pieces empties the index, itself included. Windows' blocks are no blocks."""
    piece, known = 0, dict[str, int]()
    for size in (*sizes, *sizes):
        hear(index, stored(IDS[:48], 0, 4, about="window", kv_cache_spec_kind="sliding_window", group_idx=1))
        hear(index, stored(IDS[:480], 0, size, medium=f"M{size}"))
        before, piece = piece, gcd(piece, size)
        if piece != before and known:
            known = {}
        else:
            known[f"M{size}"] = 480 // size
        assert index.by_medium() == known
        assert depth(index, IDS) == (480 if known else 0)


@pytest.mark.parametrize("seed", range(10))
def test_it_says_what_a_slow_model_says(seed: int) -> None:
    """A tree of prompts in three media, stored and removed at random; of all sizes."""
    rng, index, held = random.Random(seed), EngineIndex(10_000), set[tuple[str, int, tuple[int, ...]]]()
    sizes = {"GPU": BLOCK, "CPU": 2 * BLOCK, "STORAGE": 8 * BLOCK}
    prompts = [IDS]
    for _ in range(5):
        cut = rng.randrange(0, 36) * BLOCK
        prompts.append([*rng.choice(prompts)[:cut], *(rng.randrange(1000) for _ in range(40 * BLOCK - cut))])
    hear(index, stored([7] * BLOCK, medium="GPU"))  # the smallest block tells how long pieces are
    held.add(("GPU", BLOCK, (7,) * BLOCK))
    known: set[tuple[int, ...]] = set()
    for _ in range(200):
        medium = rng.choice(list(sizes))
        size, ids = sizes[medium], rng.choice(prompts)
        if rng.random() < 0.6:
            ends = [0, *(len(each) for each in known if tuple(ids[: len(each)]) == each)]
            start = rng.choice(ends) // size * size
            if start not in ends:
                continue
            stop = min(start + rng.randrange(1, 5) * size, len(ids))
            hear(index, stored(ids[:stop], start, size, medium=medium))
            held.update((medium, size, tuple(ids[:end])) for end in range(start + size, stop + 1, size))
        else:
            gone = rng.sample(sorted(held), min(len(held), rng.randrange(4)))
            held.difference_update(gone)
            for at, own, each in gone:
                hear(index, removed(hashes_of(each, own)[-1:], at))
        known = {each for _, _, each in held}
        for ids in prompts:
            reach = 0
            for end in range(BLOCK, len(ids) + 1, BLOCK):
                ending = [size for _, size, each in held if each == tuple(ids[:end])]
                reach = end if any(end - size <= reach for size in ending) else reach
            assert depth(index, ids) == reach
    assert len(index) == len(held)


def test_prompts_that_are_none() -> None:
    for ids in ([-1], [1 << 32], [1 << 70]):
        with pytest.raises(ValueError, match="32 bits"):
            Prompt(ids, "", "")


# What is wrong

HASHES = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.binary(max_size=40), st.sampled_from([1, 2, b"a"])
)
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=8), st.floats()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS: dict[str, Any] = {
    "block_hashes": st.lists(HASHES, max_size=4),
    "parent_block_hash": st.one_of(st.none(), HASHES),
    "block_size": st.one_of(st.sampled_from([0, 1, 4, 8, 12, 16]), st.integers(-5, 1 << 62)),
    "medium": st.sampled_from([None, "GPU", "CPU", "STORAGE", "?"]),
    "lora_name": st.sampled_from([None, "a", ""]),
    "extra_keys": st.one_of(st.none(), st.lists(ANYTHING, max_size=4)),
    "group_idx": st.one_of(st.none(), st.integers(0, 3)),
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
    "locality": st.sampled_from([None, "LOCAL", "REMOTE"]),
}


@st.composite
def events(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "New"]))
    told: dict[str, Any] = {name: draw(field) for name, field in FIELDS.items()}
    size = told["block_size"]
    if kind == "BlockStored" and 0 < size <= 16 and draw(st.booleans()):
        count = len(told["block_hashes"])
        told["token_ids"] = [draw(st.integers(0, 1 << 33)) for _ in range(size)] * count
        if told["extra_keys"] is not None:
            told["extra_keys"] = (told["extra_keys"] * count)[:count]
    else:
        told["token_ids"] = draw(st.lists(st.integers(-1, 1 << 40), max_size=8))
    for name in draw(st.lists(st.sampled_from(list(FIELDS)), max_size=1)):
        told[name] = draw(ANYTHING)
    return {"type": kind, **told}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(events(), events(), events(), ANYTHING), max_size=12),
    st.lists(st.integers(0, 20), max_size=40),
)
def test_nothing_that_an_event_says_does_harm(told: list[Any], ids: list[int]) -> None:
    index = EngineIndex(6)
    for event in events_in(msgspec.msgpack.encode([0.0, told, None, "more"])):
        if event is not None:
            index.hear(event)
            index.check_invariants()
    for model, salt in (("", ""), ("a", "b")):
        assert 0 <= depth(index, ids, model, salt) <= len(ids)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.binary(max_size=200), ANYTHING.map(msgspec.msgpack.encode)),
    st.integers(0, 200),
    st.binary(max_size=3),
)
def test_messages_are_parsed_whole_or_refused(payload: bytes, at: int, other: bytes) -> None:
    sound = batch(stored(IDS[:BLOCK]), removed([b"a"]), AllBlocksCleared())
    for each in (payload, sound[:at], sound[:at] + other + sound[at + len(other) :]):
        try:
            list(events_in(each))
        except ValueError:
            continue


def test_deep_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no batch"):
        list(events_in(b"\x91" * 100_000))
    deep = b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 100_000
    with pytest.raises(ValueError, match="no batch"):
        list(events_in(deep))
    monkeypatch.setattr(kv_messages, "MOST_EVENTS", 3)
    assert len(list(events_in(batch(*[AllBlocksCleared()] * 3)))) == 3
    with pytest.raises(ValueError, match="4 events in one message"):
        list(events_in(batch(*[AllBlocksCleared()] * 4)))
