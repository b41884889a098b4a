"""The hazard policy: what it has learned, what it does with that, and leaf-LRU while it knows nothing."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import HazardPolicy, LruPolicy, Newcomer
from evictor.ages import Ages
from evictor.history import History
from evictor.kinds import NUM_BASE, NUM_BOOKS, NUM_KINDS, NUM_USES, books_of, with_turn
from evictor.reuse import ReuseStatistics
from tests.evictor.driver import PolicyDriver
from tests.strategies import chain_of


def cycle(policy: HazardPolicy | LruPolicy, passes: int) -> Iterator[float]:
    """The share of 64 documents of 20 positions that a pool for 30 of them finds, pass by pass."""
    pool = CpuOffloadingBlockAllocator(600, policy=policy)
    for _ in range(passes):
        yield sum(serve(pool, chain_of(document, *range(19))).depth for document in range(64)) / (64 * 20)
        pool.check_invariants()


def test_documents_asked_for_in_turn_through_a_pool_that_is_too_small() -> None:
    best = 30 / 64  # kept for good
    assert list(cycle(LruPolicy(), 3)) == [0, 0, 0]
    first, second, *later = cycle(HazardPolicy(600), 8)
    assert first == 0
    assert second >= 0.6 * best
    assert min(later) >= 0.85 * best


def test_hits_it_did_not_foresee_are_learned_from_at_once() -> None:
    """Documents are asked for twice in close succession, then others in turn, which takes unlearning."""
    pool = CpuOffloadingBlockAllocator(600, policy=HazardPolicy(600))
    for document in [*range(100, 109)] * 2:
        serve(pool, chain_of(document, *range(19)))
    pool.reset()
    passes = [[serve(pool, chain_of(document, *range(19))).depth for document in range(64)] for _ in range(3)]
    assert sum(passes[1]) >= 0.65 * 600
    assert sum(passes[2]) >= 0.95 * 600


def test_with_nothing_learned_it_is_leaf_lru() -> None:
    rng = random.Random(7)
    pools = [CpuOffloadingBlockAllocator(40, policy=policy) for policy in (HazardPolicy(40), LruPolicy())]
    hazard = pools[0]._policy
    assert isinstance(hazard, HazardPolicy)
    hazard._reuse.is_due = lambda: False  # type: ignore[method-assign]
    for _ in range(300):
        chain = chain_of(*(rng.choice([0, 0, 1]) for _ in range(rng.randrange(1, 14))))
        assert len({serve(pool, chain).depth for pool in pools}) == 1
        assert pools[0].num_evicted == pools[1].num_evicted


def test_what_is_not_asked_for_again_makes_room_for_what_is() -> None:
    """Long prompts never come back, short ones do, later than LRU could keep them."""
    pools = [CpuOffloadingBlockAllocator(120, policy=policy) for policy in (HazardPolicy(120), LruPolicy())]
    hits = [0, 0]
    for turn in range(1500):
        short = turn % 25
        for index, pool in enumerate(pools):
            hits[index] += serve(pool, chain_of(short, 1, 2)).depth
            serve(pool, chain_of(1000 + turn, *range(19)))
    assert hits[1] == 0
    assert hits[0] > 0.9 * 3 * (1500 - 25)
    assert pools[0].num_evicted < pools[1].num_evicted / 3, "what is not worth it is not stored either"


def test_each_of_those_who_store_in_one_step_is_worth_what_it_is() -> None:
    """They were asked for before; a long prompt, which never comes back, and a short one."""
    pool = CpuOffloadingBlockAllocator(120, policy=HazardPolicy(120))
    for turn in range(1500):
        serve(pool, chain_of(turn % 25, 1, 2))
        serve(pool, chain_of(1000 + turn, *range(19)))
    long, short = chain_of(5000, *range(19)), chain_of(600, 1, 2)
    for chain in (long, short):
        pool.touch(chain)
    stored = [pool.plan_store(chain, len(chain)) for chain in (long, short)]
    assert [plan and len(plan.slots) for plan in stored] == [None, 3]


def test_parts_of_a_prompt_with_different_pasts_are_different_segments() -> None:
    pool = CpuOffloadingBlockAllocator(100, policy=HazardPolicy(100))
    serve(pool, chain_of(1, 2, 3))
    serve(pool, chain_of(1, 2, 3, 4, 5))
    serve(pool, chain_of(1, 2, 3, 4, 5, 6))
    assert sorted(len(node) for node in pool._tree.nodes()) == [1, 2, 3]
    pool.evict(100)
    serve(pool, chain_of(1, 2, 3, 4, 5, 6, 7))
    assert sorted(len(node) for node in pool._tree.nodes()) == [1, 1, 2, 3], "they come back as they were"
    pool.check_invariants()


def test_a_prompt_that_is_stored_in_chunks_is_one_segment() -> None:
    pool = CpuOffloadingBlockAllocator(100, policy=HazardPolicy(100))
    chain = chain_of(*range(60))
    for _ in range(2):
        pool.touch(chain)
        for stop in (10, 30, 60):
            plan = pool.plan_store(chain, stop)
            assert plan is not None
            pool.commit(plan)
        assert [len(node) for node in pool._tree.nodes()] == [60]
        pool.check_invariants()
        pool.evict(100)


def test_no_episode_goes_on_for_what_is_gone() -> None:
    """A failed store, wrong bytes and a reset end the episodes of what they take from the pool."""
    policy: HazardPolicy = HazardPolicy(100)
    pool = CpuOffloadingBlockAllocator(100, policy=policy)
    for turn in range(60):
        chain = chain_of(turn % 7, *range(turn % 20 + 3))
        pool.touch(chain)
        plan = pool.plan_store(chain, len(chain))
        if plan is not None and turn % 3 == 0:
            pool.abort(plan)
        elif plan is not None:
            pool.commit(plan)
        if turn % 5 == 0:
            pool.drop(chain, len(chain) // 2)
        if turn % 13 == 0:
            pool.reset()
        pool.check_invariants()
    pool.reset()
    known = sum(run.size for run in policy._history.runs())
    assert policy._reuse.num_under_way().sum() == known


def test_a_long_conversation_is_little_news() -> None:
    policy: HazardPolicy = HazardPolicy(10_000)
    pool = CpuOffloadingBlockAllocator(10_000, policy=policy)
    for turn in range(1, 300):
        serve(pool, chain_of(*range(4 * turn)))
        assert len(policy._reuse._new_hits) < 12 * 65
    assert len(list(pool._tree.nodes())) <= NUM_USES + 1, "the turns of long ago are one segment"


def test_a_newcomer_that_continues_is_of_the_kind_of_what_it_continues() -> None:
    policy: HazardPolicy = HazardPolicy(64)
    driver = PolicyDriver(policy)
    keys = driver.new_keys(30)
    driver.policy.used([], keys, 0)
    node = driver.store(driver.root, keys[:10])
    continuing = policy._kind_of(Newcomer(node, keys[10], 20))
    assert continuing == node.rank.kind
    assert policy._kind_of(Newcomer(node, driver.new_keys(1)[0], 3)) == continuing, "an answer, so far"
    driver.touch(node)
    assert policy._kind_of(Newcomer(node, driver.new_keys(1)[0], 3)) != node.rank.kind


def test_a_newcomer_worth_as_much_as_the_least_leaf_is_stored() -> None:
    policy: HazardPolicy = HazardPolicy(64)
    driver = PolicyDriver(policy)
    leaf = driver.grow(driver.root, 10)
    newcomer = Newcomer(driver.root, *driver.new_keys(1), num_positions=10)
    assert policy._kind_of(newcomer) == leaf.rank.kind
    assert driver.choose(newcomer) is leaf


def test_answers_of_one_length_that_nobody_asked_for_replace_each_other() -> None:
    """No request comes between, so each is worth what the one before it is."""
    pool = CpuOffloadingBlockAllocator(8, policy=HazardPolicy(8))
    for answer in range(5):
        plan = pool.plan_store(chain_of(answer, 1, 2, 3), 4)
        assert plan is not None
        assert len(plan.slots) == 4
        pool.commit(plan)
    pool.check_invariants()
    assert [pool.resident_depth(chain_of(answer, 1, 2, 3)) for answer in range(5)] == [0, 0, 0, 4, 4]


# What is counted


class Episodes:
    """Every position on its own: the hazards that the statistics should find, without their priors."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.begun: dict[int, tuple[float, int]] = {}  # by position: tick, or second, and kind
        self.over: list[tuple[int, float, bool]] = []  # kind, age, hit

    def at_risk(self, kind: int, age: int, now: float) -> float:
        low, high = self.edges[age], self.edges[age + 1]
        total = 0.0
        for each, end, hit in self.over:
            if each == kind and end >= low:
                total += 1 if hit or end >= high else 0.5
        for begin, each in self.begun.values():
            if each == kind and now - begin >= low:
                total += 1 if now - begin >= high else 0.5
        return total


def test_episodes_at_risk_are_counted_as_if_one_by_one() -> None:
    check_episodes([0, 1, 2], 1.0)


def test_episodes_of_turns_are_counted_as_if_one_by_one_in_seconds() -> None:
    check_episodes([with_turn(0, ending, 1) for ending in (1, 2, 3)], 7.0)


def check_episodes(kinds: Sequence[int], seconds: float) -> None:
    """A tick has so many seconds. Each kind is counted in a book of its own, the last of its books."""
    rng = random.Random(3)
    reuse = ReuseStatistics(1 << 30)
    reuse._ticks = reuse._seconds = Ages(16.0)
    edges = [0.0, *(2.0**octave for octave in range(4, 18))]
    naive = Episodes(edges)
    hits: dict[tuple[int, int], int] = defaultdict(int)
    for step in range(4000):
        ticks = rng.randrange(1, 9)
        now = seconds * (reuse.tick + ticks)
        reuse.request(ticks, now)
        position = int(rng.paretovariate(0.4)) % 500
        if position in naive.begun:
            begin, kind = naive.begun.pop(position)
            with_hit = rng.random() < 0.8
            (reuse.hit if with_hit else reuse.forgotten)(kind, round(begin / seconds), 1)
            naive.over.append((kind, now - begin, with_hit))
            if with_hit:
                age = max(index for index, edge in enumerate(edges) if edge <= now - begin)
                hits[kind, age] += 1
        kind = rng.choice(kinds)
        naive.begun[position] = now, kind
        reuse.begin(kind, 1)
        if step % 10 == 0:
            reuse._take_in_news()  # snapshots are coarse: more of them than usual
    reuse._take_in_news()
    at_risk = reuse._at_risk(reuse.tick)
    for kind in kinds:
        book = books_of(kind)[-1]
        for age in range(14):
            assert reuse._hits[book, age] == pytest.approx(hits[kind, age], rel=1e-3)
            expected = naive.at_risk(kind, age, now)
            assert at_risk[book, age] == pytest.approx(expected, rel=0.05, abs=8), (kind, age)


def test_kinds_do_not_depend_on_the_size_of_blocks() -> None:
    kinds = []
    for block in (1, 32):
        reuse = ReuseStatistics(1000 * block)
        for _ in range(10):
            reuse.request(20 * block, 0.0)
        kinds.append([reuse.kinds(new * block, known * block)[2] for new in range(99) for known in range(9)])
    assert kinds[0] == kinds[1]
    assert len(set(kinds[0])) == 3 * 8
    reuse = ReuseStatistics(10)
    every = [kind for new in range(99) for known in (0, 1, 9) for kind in reuse.kinds(new, known)]
    assert set(every) <= set(range(NUM_BASE))


# What is remembered, beside tests of the history itself


def test_history_of_the_policy_does_not_grow() -> None:
    policy: HazardPolicy = HazardPolicy(16)
    policy._history = History(200)
    pool = CpuOffloadingBlockAllocator(16, policy=policy)
    for document in range(300):
        serve(pool, chain_of(document, *range(9)))
        assert policy._history.size <= 200
    pool.check_invariants()


@pytest.mark.parametrize("capacity", [1, 1000, 1_000_000])
def test_values_are_finite_for_pools_of_any_size(capacity: int) -> None:
    reuse = ReuseStatistics(capacity)
    for turn in range(1, 30):
        reuse.request(50, float(turn))
        reuse.begin(turn % NUM_KINDS, 50)
        end = reuse.hit if turn % 2 == 0 else reuse.forgotten
        end(turn % NUM_KINDS, max(0, reuse.tick - turn * capacity // 7), 50)
        reuse.learn()
        reuse.check_invariants()
        for book in range(NUM_BOOKS):
            if reuse._index[book] is not None:
                value, change = reuse.value(book, reuse.tick - 10**12)
                assert value >= 0
                assert change > reuse.tick
