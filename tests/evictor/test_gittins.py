"""What a position earns: the index, and what a copy of it brings beyond what its slot costs."""

import math

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from allocator.node import Place
from evictor import HazardPolicy, HintedPolicy, KeepHints, LruPolicy, Worth
from evictor.ages import NUM_STEPS
from evictor.gittins import COPY_HITS, GoingRate, Lives
from evictor.reuse import ReuseStatistics
from tests.strategies import chain_of

LONG, SHORT = chain_of(5000, *range(19)), chain_of(3, 1, 2)


@pytest.fixture(params=range(5))
def hazards(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """Of three kinds and six ages, with the widths of these."""
    rng = np.random.default_rng(request.param)
    return rng.uniform(0, 0.9, (3, 6)), rng.uniform(1, 50, (3, 6))


def walk(hazard: np.ndarray, widths: np.ndarray, rate: float) -> float:
    """The most that one earns beyond ``rate``, one age after the other; the walk may stop at any of them."""
    alive, hits, held, best = 1.0, 0.0, 0.0, 0.0
    for chance, width in zip(hazard, widths, strict=True):
        held += (alive + alive * (1 - chance)) / 2 * width
        hits += alive * chance
        alive *= 1 - chance
        best = max(best, hits - rate * held)
    return best


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.02, 1.0])
def test_gain_is_that_of_the_best_time_to_stop(hazards: tuple[np.ndarray, np.ndarray], rate: float) -> None:
    lives = Lives(*hazards)
    for kind, (hazard, widths) in enumerate(zip(*hazards, strict=True)):
        for age in range(6):
            expected = walk(hazard[age:], widths[age:], rate)
            assert math.isclose(lives.gain(kind, age, rate), expected, abs_tol=1e-9)


def test_the_index_is_the_rate_at_which_nothing_is_gained(hazards: tuple[np.ndarray, np.ndarray]) -> None:
    lives = Lives(*hazards)
    for kind, row in enumerate(lives.index()[:, :-1:NUM_STEPS]):
        for age, index in enumerate(row):
            assert lives.gain(kind, age, index) == pytest.approx(0, abs=1e-9)
            assert lives.gain(kind, age, 0.9 * index) > 0


def test_within_an_age_the_index_goes_towards_the_next_one_unless_all_are_asked_for() -> None:
    """Nobody asks for what is in the last age. Half of what reaches the one before is asked for, or all."""
    half, every = Lives(np.array([[0.5, 0.0], [1.0, 0.0]]), np.ones((2, 2))).index()
    assert half.tolist() == [half[0] * (1 - 0.75 * part / NUM_STEPS) for part in range(NUM_STEPS)] + [0.0] * 5
    assert every.tolist() == [every[0]] * NUM_STEPS + [0.0] * 5


@pytest.mark.parametrize("num_documents", range(18, 90, 3))
def test_a_cycle_of_any_length_finds_what_fits(num_documents: int) -> None:
    """All are asked for at one age, wherever in its class that is. The optimum keeps all but a document."""
    pool, size = CpuOffloadingBlockAllocator(80, policy=HazardPolicy(80)), 4
    documents = [chain_of(number, *range(1, size)) for number in range(num_documents)]
    found = [[serve(pool, document).depth for document in documents] for _ in range(12)]
    assert sum(found[-1]) >= min(80 - size, num_documents * size)


def test_who_is_never_asked_for_gains_nothing() -> None:
    lives = Lives(np.array([[1.0, 0.5], [0.0, 0.0]]), np.ones((2, 2)))
    assert lives.gain(0, 0, 0.0) == 1 and lives.gain(0, 1, 0.0) == 0 == lives.gain(1, 0, 0.0)


# Policies


def learned(policy: HazardPolicy | HintedPolicy | LruPolicy) -> CpuOffloadingBlockAllocator:
    """A pool that is full: short prompts come back, long ones do not. Two of them are in it."""
    pool = CpuOffloadingBlockAllocator(120, policy=policy)
    for turn in range(1500):
        serve(pool, chain_of(turn % 25, 1, 2))
        serve(pool, chain_of(1000 + turn, *range(19)))
    pool.touch(LONG)
    plan = pool.plan_store(LONG, len(LONG), must=True)
    assert plan is not None and pool.commit(plan)
    serve(pool, SHORT)
    return pool


def earns(pool: CpuOffloadingBlockAllocator, chain: list[bytes]) -> bool:
    place: Place = pool._tree.find(chain, len(chain))
    assert place.depth == len(chain)
    return pool._policy.earns_copy(place.node)


def test_a_copy_pays_for_what_is_asked_for_again() -> None:
    pool = learned(HazardPolicy(120))
    assert earns(pool, SHORT) and not earns(pool, LONG)


def test_room_pays_while_much_is_asked_for() -> None:
    """The next candidate is worth a copy after so many positions, and not before."""
    policy = HazardPolicy(120)
    pool = learned(policy)
    pool.evict(60)
    first = policy._first()
    assert first is not None and first[0] > 0
    after = math.ceil(COPY_HITS / first[0])
    assert policy.earns_room(after + 1) and not policy.earns_room(after - 1)


def test_what_slots_earn_is_a_mean_from_the_first_on() -> None:
    rate = GoingRate()
    assert [rate.after(each) for each in (4.0, 5.0, 3.0)] == [4.0, 4.5, 4.0]


def test_what_slots_earned_long_ago_is_forgotten() -> None:
    rate = GoingRate()
    for _ in range(3000):
        last = rate.after(6.0)
    assert last == pytest.approx(6.0, rel=1e-3) and 5.9 < rate.after(4.0) < 6
    for _ in range(3000):
        last = rate.after(4.0)
    assert last == pytest.approx(4.0, rel=1e-3)


def test_what_slots_earned_before_much_was_learned_counts_little() -> None:
    """As much less as was learned; and with nothing new as much as before."""
    after = {}
    for part in (0.0, 0.5, 1.0):
        rate = GoingRate()
        for _ in range(256):
            rate.after(6.0)
        rate.learned(part)
        after[part] = rate.after(0.0)
    assert after == {0.0: pytest.approx(6 * 255 / 256), 0.5: pytest.approx(6 * 128 / 129), 1.0: 0.0}


def test_slots_earn_what_they_do_since_most_hits_were_learned() -> None:
    """Nobody asks again for long, and then for three prompts all the time."""
    policy = HazardPolicy(120)
    pool = CpuOffloadingBlockAllocator(120, policy=policy)
    for turn in range(300):
        serve(pool, chain_of(1000 + turn, *range(19)))
    before = [policy._going_rate() for _ in range(300)][-1]
    for turn in range(300):
        serve(pool, chain_of(turn % 3, *range(19)))
        serve(pool, chain_of(2000 + turn, *range(19)))
    rate = [policy._going_rate() for _ in range(25)][-1]
    now = policy._order[0][0]
    assert rate is not None and before is not None
    assert abs(rate - now) < 0.3 * abs(before - now), (before, rate, now)


def test_part_of_all_hits_that_is_new() -> None:
    """The pool is large: nothing is forgotten meanwhile."""
    reuse, parts = ReuseStatistics(10**9, 0.0), []
    for num_hits in (0, 1, 1, 2, 0):
        for _ in range(num_hits):
            [kind, *_], began = reuse.kinds(10, 0), reuse.tick
            reuse.begin(kind, 10)
            reuse.request(10, 0.0)
            reuse.hit(kind, began, 10)
        parts.append(reuse.learn())
    assert parts == pytest.approx([0, 1, 1 / 2, 1 / 2, 0], abs=1e-6)


def test_where_nobody_would_leave_all_pays() -> None:
    policy = HazardPolicy(120)
    pool = learned(policy)
    pins = [pool.pin(chain, 0, len(chain)) for chain in (LONG, SHORT)]
    pool.evict(120)
    assert earns(pool, LONG) and policy.earns_room(1)
    for pin in pins:
        pool.unpin(pin)


def test_policies_that_learn_nothing_have_all_copied() -> None:
    pool = learned(LruPolicy())
    assert earns(pool, LONG) and earns(pool, SHORT) and pool._policy.earns_room(1)


@pytest.mark.parametrize("worth", [Worth.LOW, Worth.HIGH])
def test_what_requests_ask_for_goes_before_what_is_learned(worth: Worth) -> None:
    pool = learned(HintedPolicy(HazardPolicy(120), 60, lambda: 0.0))
    assert not earns(pool, LONG) and pool._policy.earns_room(1 << 40)
    chain, hints = chain_of(7000, *range(19)), KeepHints(worth=worth)
    pool.touch(chain, hints)
    plan = pool.plan_store(chain, 20, hints=hints, must=True)
    assert plan is not None and pool.commit(plan)
    assert earns(pool, chain)
    assert pool._policy.earns_room(1 << 40) is (worth is Worth.HIGH), (
        "it would go first, and is worth nothing"
    )
