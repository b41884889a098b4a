"""What a position earns: the index, and what a copy of it brings beyond what its slot costs."""

import math
from bisect import bisect_left

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from allocator.node import Node
from evictor import HazardPolicy, HintedPolicy, KeepHints, LruPolicy, Worth
from evictor.ages import NUM_AGES, NUM_STEPS, Ages
from evictor.gittins import ROOM_HITS, GoingRate, Lives
from evictor.kinds import FIRST_RUNNING, books_of, with_turn
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


@pytest.mark.parametrize(
    ("since", "until"), [((0, 0.0), (5, 1.0)), ((1, 0.5), (3, 0.25)), ((2, 0.0), (2, 1.0))]
)
def test_what_lives_on_is_held_as_long(
    hazards: tuple[np.ndarray, np.ndarray], since: tuple[int, float], until: tuple[int, float]
) -> None:
    """As many die in every part of an age."""
    lives = Lives(*hazards)
    for kind, (hazard, widths) in enumerate(zip(*hazards, strict=True)):
        first, last = (born_by(hazard, widths, *place) for place in (since, until))
        expected = last[0] / first[0], (last[1] - first[1]) / first[0]
        assert lives.outlook(kind, since, until) == pytest.approx(expected, abs=1e-9)


def born_by(hazard: np.ndarray, widths: np.ndarray, age: int, part: float) -> tuple[float, float]:
    """How many of those that are born are alive then, and for how long one was held."""
    alive, held = 1.0, 0.0
    parts = np.append(np.ones(age), part)
    for chance, width, lived in zip(hazard[: age + 1], widths[: age + 1], parts, strict=True):
        held += alive * (1 - chance * lived / 2) * width * lived
        alive *= 1 - chance * lived
    return alive, held


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("part", [0.5, 0.9, 0.99, 0.9999])
def test_nobody_is_held_for_longer_than_there_is(chance: float, part: float) -> None:
    lives = Lives(np.array([[chance, 0.5]]), np.array([[8.0, 16.0]]))
    alive, held = lives.outlook(0, (0, part), (0, 1.0))
    assert 0 <= alive <= 1 and 4 * (1 - part) - 1e-9 <= held <= 8 * (1 - part) + 1e-9


def test_who_is_alive_at_no_age_is_held_no_longer() -> None:
    lives = Lives(np.array([[1.0, 0.5]]), np.ones((1, 2)))
    assert lives.outlook(0, (1, 0.0), (1, 1.0)) == (0, 0)


def test_who_is_one_of_few_that_are_left_is_held_as_long_as_others() -> None:
    lives = Lives(np.array([[0.5, 0.0, 0.0]]), np.array([[1.0, 4.0, 8.0]]))
    assert lives.outlook(0, (1, 0.0), (1, 1.0)) == (1, 4) and lives.outlook(0, (1, 0.5), (2, 0.5)) == (1, 6)


def test_places_of_ages() -> None:
    ages = Ages(4.0)
    assert [ages.place_of(each) for each in (0, 3, 4, 6, 12)] == [
        (0, 0),
        (0, 0.75),
        (1, 0),
        (1, 0.5),
        (2, 0.5),
    ]
    assert ages.place_of(1e12) == (NUM_AGES - 1, 1)


def soon_or_never(*, is_by_turn: bool) -> tuple[ReuseStatistics, list[int]]:
    """Ten positions a second. What is of the first book is always asked for after one, of the other never."""
    reuse = ReuseStatistics(80, 0.0)
    soon, never = kinds = (reuse.kinds(10, 0)[0], reuse.kinds(10, 0)[-1])
    if is_by_turn:
        soon, never = kinds = (with_turn(soon, 1, 1), with_turn(soon, 2, 1))
    for second in range(1, 500):
        reuse.begin(soon, 10)
        reuse.begin(never, 10)
        began = reuse.tick
        reuse.request(10, float(second))
        reuse.hit(soon, began, 10)
        if reuse.is_due():
            reuse.learn()
    books = [books_of(kind)[-1] for kind in kinds]
    assert [book >= FIRST_RUNNING for book in books] == [is_by_turn] * 2
    return reuse, books


@pytest.mark.parametrize("is_by_turn", [False, True])
@pytest.mark.parametrize("num_ticks", [40, 200])
def test_what_is_asked_for_in_time_is_not_copied_again(is_by_turn: bool, num_ticks: int) -> None:
    reuse, [soon, never] = soon_or_never(is_by_turn=is_by_turn)
    alive, held = reuse.outlook(soon, reuse.tick, num_ticks)
    assert alive < 0.01 and 10 < held < 20
    alive, held = reuse.outlook(never, reuse.tick, num_ticks)
    assert alive > 0.99 and 0.99 * num_ticks < held <= num_ticks
    assert reuse.outlook(soon, reuse.tick - 400, num_ticks) == (1, 0), "nobody has it any more"


@pytest.mark.parametrize("is_by_turn", [False, True])
@pytest.mark.parametrize(("num_asked", "seconds"), [(1, 3600.0), (100, 0.01), (399, 3600.0), (4399, 0.1)])
def test_how_long_the_gpu_has_something_depends_on_what_is_asked_for(
    is_by_turn: bool, num_asked: int, seconds: float
) -> None:
    """And not on the time that passes: after a pause, or a burst."""
    reuse, [_, never] = soon_or_never(is_by_turn=is_by_turn)
    last_use = reuse.tick
    reuse.request(num_asked, 500.0 + seconds)
    _, held = reuse.outlook(never, last_use, 400)
    assert held == pytest.approx(max(0, 400 - num_asked), rel=0.05)


def test_what_nobody_asks_for_is_held_as_long_by_either_clock() -> None:
    held = []
    for is_by_turn in (False, True):
        reuse, [_, never] = soon_or_never(is_by_turn=is_by_turn)
        held.append([reuse.outlook(never, reuse.tick, num_ticks)[1] for num_ticks in (30, 100, 400)])
    assert held[0] == pytest.approx(held[1], rel=0.01)


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


def node_of(pool: CpuOffloadingBlockAllocator, chain: list[bytes]) -> Node:
    place = pool._tree.find(chain, len(chain))
    assert place.depth == len(chain)
    return place.node


def earns(pool: CpuOffloadingBlockAllocator, chain: list[bytes]) -> bool:
    return pool._policy.earns_copy(node_of(pool, chain))


def earns_room(pool: CpuOffloadingBlockAllocator, chain: list[bytes], num_asked: int) -> bool:
    return pool._policy.earns_room(node_of(pool, chain), num_asked)


def outlook(pool: CpuOffloadingBlockAllocator, chain: list[bytes], num_asked: int) -> tuple[float, float]:
    state, reuse = node_of(pool, chain).rank, pool._policy._reuse
    return reuse.outlook(reuse.book_of(state.kind), state.last_use, num_asked)


def test_a_copy_pays_for_what_is_asked_for_again() -> None:
    pool = learned(HazardPolicy(120))
    assert earns(pool, SHORT) and not earns(pool, LONG)


@pytest.fixture
def rate_of_slots() -> tuple[CpuOffloadingBlockAllocator, float]:
    """A pool that has learned, and what a slot of it earns."""
    policy = HazardPolicy(120)
    pool = learned(policy)
    first = policy._first()
    assert first is not None and first[0] > 0
    return pool, policy._rate.least(first[0])


def test_room_pays_while_much_is_asked_for(rate_of_slots: tuple[CpuOffloadingBlockAllocator, float]) -> None:
    """What never comes back has to be copied again, in return for what its slots earn meanwhile."""
    pool, rate = rate_of_slots
    after = ROOM_HITS / rate
    assert earns_room(pool, LONG, int(1.1 * after)) and not earns_room(pool, LONG, int(0.9 * after))


def test_room_pays_of_what_is_asked_for_before_it_has_to_be_copied_again(
    rate_of_slots: tuple[CpuOffloadingBlockAllocator, float],
) -> None:
    """All short prompts are, in 575 positions, as far as classes of ages tell."""
    pool, rate = rate_of_slots
    assert earns_room(pool, SHORT, 1000) and not earns_room(pool, LONG, 1000)
    assert not earns_room(pool, SHORT, 100)
    alive, held = outlook(pool, SHORT, 900)
    assert ROOM_HITS * alive**2 < rate * held < ROOM_HITS * alive
    assert earns_room(pool, SHORT, 900)


def test_from_when_on_room_pays(rate_of_slots: tuple[CpuOffloadingBlockAllocator, float]) -> None:
    """What is asked for in time counts twice: it stays on the GPU, and may be asked for once more."""
    pool, rate = rate_of_slots
    first = bisect_left(range(1000), True, key=lambda num: earns_room(pool, SHORT, num))
    for num_asked in (first - 1, first):
        alive, held = outlook(pool, SHORT, num_asked)
        assert (rate * held / ROOM_HITS >= alive * alive) is (num_asked == first)


def test_room_pays_nothing_where_slots_earned_nothing_of_late(
    rate_of_slots: tuple[CpuOffloadingBlockAllocator, float],
) -> None:
    pool, _ = rate_of_slots
    assert earns_room(pool, LONG, 1 << 30)
    for _ in range(256):
        pool._policy._rate.after(0.0)
    assert not earns_room(pool, LONG, 1 << 30)


def test_room_is_worth_what_it_earns_now_or_earned_of_late_whichever_is_less() -> None:
    """Asking that changes nothing."""
    rate = GoingRate()
    assert rate.least(3.0) == 3
    assert rate.after(2.0) == 2 and [rate.least(3.0), rate.least(1.0)] == [2.5, 1]
    assert rate.after(4.0) == 3
    rate.learned(1.0)
    assert rate.least(5.0) == 5, "nothing of before counts"


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
    assert earns(pool, LONG) and earns_room(pool, LONG, 1)
    for pin in pins:
        pool.unpin(pin)


def test_policies_that_learn_nothing_have_all_copied() -> None:
    pool = learned(LruPolicy())
    assert earns(pool, LONG) and earns(pool, SHORT) and earns_room(pool, LONG, 1)


@pytest.mark.parametrize("worth", [Worth.LOW, Worth.HIGH])
def test_what_requests_ask_for_goes_before_what_is_learned(worth: Worth) -> None:
    pool = learned(HintedPolicy(HazardPolicy(120), 60, lambda: 0.0))
    assert not earns(pool, LONG) and earns_room(pool, LONG, 1 << 30)
    chain, hints = chain_of(7000, *range(19)), KeepHints(worth=worth)
    pool.touch(chain, hints)
    plan = pool.plan_store(chain, 20, hints=hints, must=True)
    assert plan is not None and pool.commit(plan)
    assert earns(pool, chain)
    assert earns_room(pool, LONG, 1 << 30) is (worth is Worth.HIGH), "it would go first, and is worth nothing"
