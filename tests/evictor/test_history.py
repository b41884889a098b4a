"""What is remembered of positions that are not here: as a plain dict would, and in little memory."""

import gc
import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from hashlib import sha256

import pytest

from evictor.history import History, Past, Run


def number(each: int) -> int:
    return each


def digest(each: int) -> bytes:
    return sha256(each.to_bytes(8, "big", signed=True)).digest()


def short(each: int) -> bytes:
    """As vLLM's keys of several KV cache groups: they differ at the end, and are no multiple of 8 long."""
    return digest(each)[:20] + b"group"


@pytest.mark.parametrize("name", [number, digest, short])
def test_runs_match_as_far_as_they_go(name: Callable[[int], Hashable]) -> None:
    past = Past(1, 2, 3)
    for size in (1, 2, 3, 31, 32, 33, 100, 1000):
        keys = [name(each) for each in range(size)]
        other = name(-5)
        whole = Run.of([name(-1), *keys], 1, size + 1, past)
        history = History(2000)
        history.add(whole)
        for run in (history.get(keys[0]), whole):
            assert run is not None
            assert run.size == size
            assert len(run.marks or "") <= 8 * 34
            assert run.num_common(keys, 0) == size
            assert run.num_common([*keys, other], 0) == size
            assert run.num_common([name(-7), name(-7), *keys], 2) == size
            assert run.num_common([other], 0) == 0
            for common in (1, size // 2, size - 1):
                found = run.num_common([*keys[:common], *[other] * size], 0)
                assert common - (size - 1) // 32 - 1 < found <= common
            if size > 1:
                run.behead(size // 2, keys[size // 2])
            run.check_invariants()
            assert run.size == size - size // 2
            assert run.num_common(keys, size // 2) == run.size
            found = run.num_common([*keys[:-1], other], size // 2)
            assert run.size - 1 - (size - 1) // 32 - 1 < found <= max(0, run.size - 1)


def test_history_is_bounded_and_forgets_the_oldest() -> None:
    history = History(10)
    lost: list[Run] = []
    for key in range(5):
        lost += history.add(Run.of([key] * 3, 0, 3, Past(key, 0, 0)))
    history.check_invariants()
    assert [run.past.last_use for run in lost] == [0, 1]
    assert history.get(0) is None
    assert history.get(2) is not None
    lost = list(history.add(Run.of([3], 0, 1, Past(9, 0, 0))))
    assert [run.past.last_use for run in lost] == [3]
    history.check_invariants()


def test_a_run_longer_than_the_history_is_forgotten_at_once() -> None:
    history = History(10)
    history.add(Run.of([0], 0, 1, Past(0, 0, 0)))
    keys = list(range(1, 12))
    [lost] = history.add(Run.of(keys, 0, 11, Past(1, 0, 0)))
    assert lost.size == 11
    assert (history.size, len(history)) == (1, 1)
    history.check_invariants()


@pytest.mark.parametrize("limit", [1, 7, 40])
@pytest.mark.parametrize("names", ["few places", "many"])
def test_as_a_plain_dict_would(limit: int, names: str) -> None:
    """Any order of calls, also where names share their places in the index."""
    rng = random.Random(limit)
    history = History(limit)
    model: OrderedDict[int, tuple[int, int]] = OrderedDict()  # tick and size, by name
    scale = 1 if names == "many" else 64
    for tick in range(800):
        key = scale * rng.randrange(40)
        if rng.random() < 0.3:
            popped = history.pop(key)
            expected = model.pop(key, None)
            assert (popped and (popped.past.last_use, popped.size)) == expected
        else:
            size = rng.choice([1, 1, 1, 2, 5])
            past = Past(tick, tick % 7, tick % 96)
            lost = history.add(Run.of(range(key, key + size), 0, size, past))
            gone = [model.pop(key)] if key in model else []
            model[key] = tick, size
            while sum(each for _, each in model.values()) > limit:
                if size > limit:
                    gone.append(model.pop(key))
                else:
                    gone.append(model.popitem(last=False)[1])
            assert [(run.past.last_use, run.size) for run in lost] == gone
        for name in range(0, scale * 40, scale):
            tick_and_size = model.get(name)
            found = history.past_of(name)
            assert (found and found.last_use) == (tick_and_size and tick_and_size[0])
            assert history.size_of(name) == (tick_and_size[1] if tick_and_size else 0)
            if found is not None:
                assert (found.uses, found.kind) == (found.last_use % 7, found.last_use % 96)
        assert [(run.past.last_use, run.size) for run in history.runs()] == list(model.values())
        if tick % 50 == 0:
            history.check_invariants()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 40])
def test_memory_is_bounded_by_positions(size: int) -> None:
    """And the collector sees none of it."""
    limit = 1 << 12
    gc.collect()
    num_before = len(gc.get_objects())
    tracemalloc.start()
    try:
        history = History(limit)
        for start in range(0, 3 * limit, size):
            history.add(Run.of(range(start, start + size), 0, size, Past(start, 0, 0)))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.size > limit - size
    assert num_bytes < 90 * limit + 10_000
    gc.collect()
    assert len(gc.get_objects()) < num_before + 100
