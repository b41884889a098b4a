"""What the hazard policy makes of turns: how answers end, and how long it is from one to the next."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import HazardPolicy, HintedPolicy, make_policy
from evictor.kinds import (
    FIRST_ENDED,
    FIRST_RUNNING,
    NUM_BASE,
    NUM_BOOKS,
    NUM_ENDINGS,
    NUM_GAPS,
    NUM_KINDS,
    all_books,
    base_of,
    books_of,
    ending_of,
    gap_of,
    with_ending,
    with_turn,
)
from evictor.moments import Moments
from tests.strategies import chain_of

TOOL, TURN = 1, 2


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# Kinds and books


@given(
    st.integers(0, NUM_BASE - 1),
    st.integers(1, NUM_ENDINGS - 1),
    st.integers(1, NUM_GAPS - 1),
    st.integers(1, NUM_ENDINGS - 1),
)
def test_parts_of_a_kind_are_found_again(base: int, before: int, gap: int, ending: int) -> None:
    kind = with_turn(base, before, gap)
    assert base_of(kind) == base
    assert ending_of(kind) == 0
    ended = with_ending(kind, ending)
    assert ended < NUM_KINDS
    assert (base_of(ended), ending_of(ended)) == (base, ending)
    assert with_ending(ended, before) == with_ending(kind, before), "the last word counts"
    first, running, at_end = books_of(ended)
    assert books_of(kind) == [first, running]
    assert books_of(base) == books_of(with_ending(base, ending)) == [first]
    assert first < FIRST_RUNNING <= running < FIRST_ENDED <= at_end < NUM_BOOKS


@given(st.lists(st.integers(0, NUM_KINDS - 1), max_size=20))
def test_books_of_many_kinds_are_those_of_each(kinds: list[int]) -> None:
    places, books = all_books(np.array(kinds, dtype=np.int64))
    found: list[list[int]] = [[] for _ in kinds]
    for place, book in zip(places.tolist(), books.tolist(), strict=True):
        found[place].append(book)
    assert found == [books_of(kind) for kind in kinds]


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_longer_gaps_have_higher_classes(one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert 1 <= gap_of(short) <= gap_of(long) < NUM_GAPS
    assert gap_of(1) < gap_of(10) < gap_of(60) < gap_of(600)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 9)), min_size=1, max_size=60))
def test_moments_of_late_are_exact(steps: list[tuple[int, float]]) -> None:
    moments, tick, seconds = Moments(), 0, 0.0
    known = []
    for more, passed in steps:
        tick, seconds = tick + more, seconds + passed
        moments.add(tick, seconds)
        known.append((tick, seconds))
    moments.check_invariants()
    assert [moments.at(each) for each, _ in known] == [when for _, when in known]
    assert moments.at(known[0][0] - 1) == -math.inf


def test_moments_of_long_ago_are_forgotten() -> None:
    moments = Moments()
    for tick in range(100_000):
        moments.add(tick, float(tick))
    moments.check_invariants()
    assert all(moments.at(tick) == tick for tick in range(100_000 - 8192, 100_000))
    assert moments.at(0) == -math.inf
    assert gap_of(5.0 - moments.at(0)) == NUM_GAPS - 1


# Pools


def agents(
    pool: CpuOffloadingBlockAllocator, clock: Clock, seed: int, num_turns: int, *, tells: bool
) -> dict[int, int]:
    """Sessions take turns. After ``TOOL`` the next turn comes soon, after ``TURN`` it comes late.

    Returns the blocks found in each class of what the answer before had ended with.
    """
    rng = random.Random(seed)
    waiting: list[tuple[float, int, int, int]] = []  # when, session, turns so far, ending
    found = {0: 0, TOOL: 0, TURN: 0}
    for session in range(60):
        waiting.append((rng.random() * 300, session, 0, 0))
    number = 60
    for _ in range(num_turns):
        waiting.sort()
        when, session, turns, before = waiting.pop(0)
        clock.now = max(clock.now, when)
        chain = chain_of(session, *range(12 + turns))
        found[before] += pool.resident_depth(chain)
        turn = pool.touch(chain)
        if (plan := pool.plan_store(chain, len(chain))) is not None:
            pool.commit(plan)
        ending = TOOL if rng.random() < 0.5 else TURN
        if tells:
            pool.ended(chain, turn, ending)
        wait = rng.expovariate(1 / 20) if ending == TOOL else 100 + rng.expovariate(1 / 400)
        waiting.append((clock.now + wait, session, turns + 1, ending))
        if turns == 20:
            waiting[-1] = (clock.now + 50, number, 0, 0)
            number += 1
    pool.check_invariants()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_chains_that_come_back_soon_are_kept(seed: int) -> None:
    found = []
    for tells in (False, True):
        clock = Clock()
        pool = CpuOffloadingBlockAllocator(60, policy=make_policy("hazard", 60, clock))
        agents(pool, clock, seed, 1200, tells=tells)
        found.append(agents(pool, clock, seed + 100, 1200, tells=tells))
    without, with_endings = found
    assert sum(with_endings.values()) > 1.4 * sum(without.values())
    assert with_endings[TOOL] > 1.4 * without[TOOL]


def test_endings_that_say_nothing_change_nothing() -> None:
    """All answers end alike: what is found is what is found without endings."""
    found = []
    for ending in (0, TOOL):
        rng = random.Random(5)
        pool = CpuOffloadingBlockAllocator(100, policy=HazardPolicy(100, Clock()))
        hits = []
        for _ in range(1500):
            chain = chain_of(int(rng.paretovariate(0.6)) % 60, *range(rng.randrange(2, 20)))
            hits.append(pool.resident_depth(chain))
            turn = pool.touch(chain)
            if (plan := pool.plan_store(chain, len(chain))) is not None:
                pool.commit(plan)
            if ending:
                pool.ended(chain, turn, ending)
        found.append(hits)
    assert found[0] == found[1]


def test_an_ending_is_of_what_nobody_else_has_asked_for_since() -> None:
    policy: HazardPolicy[Any] = HazardPolicy(100, Clock())
    pool = CpuOffloadingBlockAllocator(100, policy=policy)
    chain = chain_of(1, 2, 3, 4)
    turn = pool.touch(chain)
    pool.commit(pool.plan_store(chain, len(chain)))  # type: ignore[arg-type]
    serve(pool, chain_of(1, 2))
    pool.ended(chain, turn, TOOL)
    endings = {node.start: ending_of(node.rank.kind) for node in pool._tree.nodes()}
    assert endings == {0: 0, 2: TOOL}
    pool.check_invariants()


def test_what_an_answer_stores_after_its_end_is_of_its_kind() -> None:
    policy: HazardPolicy[Any] = HazardPolicy(100, Clock())
    pool = CpuOffloadingBlockAllocator(100, policy=policy)
    chain = chain_of(1, 2, 3, 4, 5, 6)
    turn = pool.touch(chain[:4])
    pool.commit(pool.plan_store(chain, 4))  # type: ignore[arg-type]
    pool.ended(chain, turn, TOOL)
    pool.commit(pool.plan_store(chain, len(chain)))  # type: ignore[arg-type]
    [node] = pool._tree.nodes()
    assert ending_of(node.rank.kind) == TOOL
    pool.check_invariants()


def test_what_was_not_stored_learns_its_ending_too() -> None:
    policy: HazardPolicy[Any] = HazardPolicy(4, Clock())
    pool = CpuOffloadingBlockAllocator(4, policy=policy)
    chain = chain_of(*range(9))
    turn = pool.touch(chain)
    pool.commit(pool.plan_store(chain, len(chain)))  # type: ignore[arg-type]
    pool.ended(chain, turn, TURN)
    assert {ending_of(run.past.kind) for run in policy._history.runs()} == {TURN}
    pool.check_invariants()
    serve(pool, chain)
    assert {turn_before(run.past.kind) for run in policy._history.runs()} == {TURN}
    pool.check_invariants()


def turn_before(kind: int) -> int:
    """How the answer before had ended, of a kind that is not ended."""
    return ((kind // NUM_BASE) - 1) // NUM_GAPS


_STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 10.0, 300.0]),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(1, NUM_ENDINGS - 1))),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
"""Seconds that pass, a chain that is asked for, which of those asked for ends and how, whether it learns."""


@pytest.mark.parametrize("hinted", [False, True])
@settings(max_examples=25)
@given(steps=_STEPS)
def test_episodes_are_counted_whatever_ends(
    hinted: bool, steps: list[tuple[float, list[int], tuple[int, int] | None, bool]]
) -> None:
    inner: HazardPolicy[Any] = HazardPolicy(12, clock := Clock())
    policy = HintedPolicy(inner, 3, clock) if hinted else inner
    pool = CpuOffloadingBlockAllocator(12, policy=policy)
    asked: list[tuple[list[bytes], int]] = []
    for passed, names, end, learns in steps:
        clock.now += passed
        chain = chain_of(*names)
        asked.append((chain, pool.touch(chain)))
        if (plan := pool.plan_store(chain, len(chain))) is not None:
            pool.commit(plan)
        if end is not None:
            pool.ended(*asked[-1 - end[0] % len(asked)], end[1])
        if learns:
            inner._reuse.learn()
    pool.check_invariants()
