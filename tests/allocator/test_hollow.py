"""Positions that only the GPU has: they have no slot, and nothing is ever read for them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allocator import ChainError, CpuOffloadingBlockAllocator, Pin, StalePlanError, StorePlan, serve
from allocator.node import Place
from allocator.plans import Evicted, Stored
from evictor import HazardPolicy, HintedPolicy, KeepHints, Worth, make_policy
from tests.evictor.test_gittins import LONG, SHORT, learned
from tests.strategies import chain_of, thorough

CHAIN = [bytes([number]) * 16 for number in range(10)]
BRANCH = [*CHAIN[:4], *(bytes([number]) * 16 for number in range(100, 106))]
OTHER = [bytes([number]) * 16 for number in range(200, 210)]


def allocator_of(num_slots: int = 20, **options: Any) -> CpuOffloadingBlockAllocator:
    policy = HintedPolicy(make_policy("hazard", 2 * num_slots), num_slots // 2, lambda: 0.0)
    return CpuOffloadingBlockAllocator(num_slots, policy=policy, **options)


def fill(allocator: CpuOffloadingBlockAllocator, chain: list[bytes], start: int, stop: int) -> None:
    plan = allocator.hollow.plan(chain, start, stop, stop - start)
    assert plan is not None and plan.start == start and plan.stop == stop
    assert allocator.commit(plan)


def test_what_is_claimed_is_known_and_takes_no_slots() -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    assert allocator.known_depth(CHAIN, 10) == 10
    assert allocator.resident_depth(CHAIN) == allocator.usable_depth(CHAIN, 10, 4) == 0
    assert allocator.num_free == 20 and allocator.hollow.lacking(CHAIN, 2, 10).all()
    with pytest.raises(ChainError, match="cannot pin"):
        allocator.pin(CHAIN, 0, 10)
    allocator.check_invariants()
    assert claim is not None
    allocator.hollow.end(claim)
    assert allocator.known_depth(CHAIN, 10) == allocator.num_evicted == 0
    with pytest.raises(StalePlanError, match="was ended before"):
        allocator.hollow.end(claim)


@pytest.mark.parametrize("num_claimed", [0, 4])
def test_what_was_cut_off_and_is_known_anew_keeps_its_slots(num_claimed: int) -> None:
    """Whoever had claimed it may ask for them all the same. Others may have claimed its beginning since."""
    allocator = allocator_of()
    assert allocator.hollow.claim(CHAIN, 10) is not None
    fill(allocator, CHAIN, 0, 10)
    allocator.drop(CHAIN, 0)
    plan = allocator.plan_store(CHAIN, 10)
    assert plan is not None and allocator.commit(plan)
    allocator.hollow.claim(CHAIN, num_claimed)
    assert allocator.hollow.empty(CHAIN, 0, 10, 10) == num_claimed
    allocator.check_invariants()
    assert allocator.usable_depth(CHAIN, 10, num_claimed) == 10


def test_whether_the_pool_has_any_of_a_claim() -> None:
    allocator = allocator_of()
    claim, branch = allocator.hollow.claim(CHAIN, 10), allocator.hollow.claim(BRANCH, 10)
    assert claim is not None and branch is not None
    assert not allocator.hollow.has_slots(claim) and not allocator.hollow.has_slots(branch)
    fill(allocator, CHAIN, 4, 6)
    shorter = allocator.hollow.claim(CHAIN, 4)
    assert shorter is not None
    assert allocator.hollow.has_slots(claim)
    assert not allocator.hollow.has_slots(branch) and not allocator.hollow.has_slots(shorter)
    fill(allocator, CHAIN, 0, 1)
    assert allocator.hollow.has_slots(branch) and allocator.hollow.has_slots(shorter)
    allocator.check_invariants()


def test_a_tail_is_found_behind_what_the_gpu_has() -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    fill(allocator, CHAIN, 6, 10)
    assert [allocator.usable_depth(CHAIN, 10, beyond) for beyond in range(10)] == [0] * 6 + [10] * 4
    assert allocator.resident_depth(CHAIN) == 0
    assert len(allocator.pin(CHAIN, 6, 10).slots) == 4
    with pytest.raises(ChainError, match="cannot pin"):
        allocator.pin(CHAIN, 5, 10)
    shorter = allocator.hollow.claim(CHAIN, 6)
    assert claim is not None and shorter is not None
    allocator.hollow.end(claim)
    assert allocator.known_depth(CHAIN, 10) == 10
    allocator.check_invariants()


def test_what_the_gpu_lost_without_a_copy_goes_with_all_behind_it() -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    fill(allocator, CHAIN, 0, 3)
    fill(allocator, CHAIN, 6, 10)
    shorter = allocator.hollow.claim(CHAIN, 5)
    assert claim is not None and shorter is not None
    allocator.hollow.end(claim)
    allocator.tidy()
    assert allocator.known_depth(CHAIN, 10) == 5 and allocator.num_free == 17
    allocator.hollow.end(shorter)
    assert allocator.known_depth(CHAIN, 10) == allocator.resident_depth(CHAIN) == 3
    assert allocator.num_evicted == 4
    allocator.check_invariants()


def test_a_gap_that_another_claims_stays() -> None:
    allocator = allocator_of()
    first, second = allocator.hollow.claim(CHAIN, 10), allocator.hollow.claim(BRANCH, 10)
    fill(allocator, CHAIN, 6, 10)
    assert first is not None and second is not None
    allocator.hollow.end(first)
    assert allocator.known_depth(CHAIN, 10) == 4
    assert allocator.known_depth(BRANCH, 10) == 10
    allocator.check_invariants()


def test_what_is_claimed_loses_its_slots_from_its_beginning_on() -> None:
    allocator = allocator_of(record_events=True)
    serve(allocator, CHAIN)
    claim = allocator.hollow.claim(CHAIN, 8)
    assert claim is not None
    pin = allocator.pin(CHAIN, 2, 4)
    allocator.take_events()
    assert allocator.hollow.empty(CHAIN, 0, 8, 4) == 4
    assert allocator.take_events() == [Evicted([CHAIN[at] for at in (0, 1, 4, 5)])]
    assert allocator.num_free == 14
    assert allocator.hollow.lacking(CHAIN, 0, 10).tolist() == [at in (0, 1, 4, 5) for at in range(10)]
    allocator.check_invariants()
    allocator.unpin(pin)
    assert allocator.hollow.empty(CHAIN, 0, 8, 99) == 4
    assert allocator.usable_depth(CHAIN, 10, 8) == 10
    allocator.check_invariants()


def test_who_is_worth_least_gets_no_slots() -> None:
    allocator = allocator_of(10)
    for _ in range(3):
        allocator.touch(CHAIN)
        serve(allocator, CHAIN)
    claim = allocator.hollow.claim(OTHER, 10)
    assert allocator.hollow.plan(OTHER, 4, 10, 6) is None
    assert allocator.resident_depth(CHAIN) == 10
    longer = allocator.hollow.claim([*OTHER, b"z" * 16], 11)
    assert claim is not None and longer is not None
    fill(allocator, OTHER, 4, 10)  # others go on behind it, and could not without it
    assert allocator.resident_depth(CHAIN) == 4
    allocator.check_invariants()


def test_what_is_claimed_is_kept_as_who_uses_it_asks() -> None:
    allocator = allocator_of()
    claims = [allocator.hollow.claim(chain, 10) for chain in (CHAIN, OTHER)]
    fill(allocator, CHAIN, 0, 10)
    fill(allocator, OTHER, 0, 10)
    for claim in claims:
        assert claim is not None
        allocator.hollow.heed(claim, KeepHints(Worth.HIGH if claim is claims[0] else Worth.NORMAL))
        allocator.hollow.end(claim)
    allocator.evict(10)
    assert [allocator.resident_depth(chain) for chain in (CHAIN, OTHER)] == [10, 0]


def test_what_has_no_slot_is_not_counted_as_pinned() -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    assert claim is not None and allocator.resizing.num_pinned == 0
    allocator.hollow.heed(claim, KeepHints(pinned_until=5.0))
    assert allocator.resizing.num_pinned == 0
    fill(allocator, CHAIN, 2, 8)
    assert allocator.resizing.num_pinned == 6
    assert allocator.hollow.empty(CHAIN, 0, 10, 2) == 2
    assert allocator.resizing.num_pinned == 4
    allocator.check_invariants()


def test_slots_behind_a_position_are_known() -> None:
    allocator = allocator_of()
    hollow = allocator.hollow
    claims = [hollow.claim(chain, 10) for chain in (CHAIN, BRANCH, OTHER)]
    assert not any(hollow.leads_on(CHAIN, stop) for stop in range(1, 11))
    fill(allocator, CHAIN, 6, 8)
    assert [hollow.leads_on(CHAIN, stop) for stop in range(1, 11)] == [True] * 7 + [False] * 3
    assert not hollow.leads_on(OTHER, 1) and not hollow.leads_on(OTHER[::-1], 1)
    assert hollow.empty(CHAIN, 0, 10, 10) == 2
    assert not hollow.leads_on(CHAIN, 1)
    for claim in claims:
        assert claim is not None
        hollow.end(claim)
    assert not hollow.leads_on(CHAIN, 1), "it is cut off"


def test_slots_of_others_are_behind_what_they_share() -> None:
    allocator = allocator_of()
    claims = [allocator.hollow.claim(chain, 10) for chain in (CHAIN, BRANCH)]
    fill(allocator, CHAIN, 5, 6)
    assert [allocator.hollow.leads_on(BRANCH, stop) for stop in (3, 4, 5)] == [True, True, False]
    assert [allocator.hollow.leads_on(CHAIN, stop) for stop in (5, 6)] == [True, False]
    assert all(claims)


@pytest.mark.parametrize("num_cut", [0, 1, 16])
def test_slots_are_behind_one_of_many_branches(num_cut: int) -> None:
    """Some of which were cut off, and are not taken away yet."""
    allocator = allocator_of(60)
    trunk = CHAIN[:4]
    tips = [[*trunk, bytes([100 + number]) * 16] for number in range(17)]
    assert all(allocator.hollow.claim(tip, 5) for tip in tips)
    fill(allocator, tips[0], 4, 5)
    [node] = [node for node in allocator._tree.nodes() if node.end == 4]
    others = [child for child in allocator._tree.children(node) if child.slots[0, 0] < 0]
    for child in others[:num_cut]:
        allocator._ranking.cut(Place(child, 4))
    assert allocator.hollow.leads_on(tips[0], 4)


def test_slots_of_what_was_cut_off_are_behind_nothing() -> None:
    """Though they are yet to be given back."""
    allocator = allocator_of()
    assert allocator.hollow.claim(CHAIN, 10) is not None
    fill(allocator, CHAIN, 4, 10)
    assert allocator.hollow.claim(CHAIN, 4) is not None
    assert allocator.hollow.leads_on(CHAIN, 4)
    [node] = [node for node in allocator._tree.nodes() if node.start == 4]
    allocator._ranking.cut(Place(node, 4))
    assert not allocator.hollow.leads_on(CHAIN, 4)


def test_what_fits_pays() -> None:
    allocator = learned(HazardPolicy(120))
    allocator.evict(30)
    chain = [bytes([number]) * 16 for number in range(31)]
    claim = allocator.hollow.claim(chain, 31)
    assert claim is not None and allocator.num_free == 30
    assert allocator.hollow.paying(chain, 1, 31) == 31 and allocator.hollow.paying(chain, 0, 31) == 0


def test_what_fits_pays_though_it_never_comes_back() -> None:
    allocator = learned(HazardPolicy(120))
    allocator.evict(5)
    depth = allocator.known_depth(LONG, 20)
    assert allocator.num_free == 5
    assert [allocator.hollow.paying(LONG, depth - size, depth) for size in (5, 6)] == [depth, depth - 6]


def test_slots_pay_where_the_policy_says_so() -> None:
    allocator = learned(HazardPolicy(120))
    assert allocator.num_free == 0
    assert allocator.hollow.paying(LONG, 4, 20) == 4 and allocator.hollow.paying(SHORT, 1, 3) == 3
    assert allocator.hollow.paying(LONG, 4, 21) == 21, "nobody knows it as a whole"


def test_slots_are_given_up_where_the_policy_says_so() -> None:
    allocator = learned(HazardPolicy(120))
    claim = allocator.hollow.claim(LONG, allocator.known_depth(LONG, 20))
    assert claim is not None
    earns = allocator.hollow.earns_emptying
    assert earns(claim, 1 << 30) and not earns(claim, 1)
    allocator.reset()
    assert not earns(claim, 1 << 30), "nothing is left of it"


def test_slots_pay_for_a_part_of_what_many_ask_for() -> None:
    allocator = learned(HazardPolicy(120))
    chain = [*SHORT[:2], *chain_of(7000, *range(9))]
    allocator.touch(chain)
    claim = allocator.hollow.claim(chain, len(chain))
    assert claim is not None and allocator.hollow.paying(chain, 0, len(chain)) == 2


def test_slots_pay_up_to_the_last_position_of_which_the_policy_says_so() -> None:
    """A prompt begins with what many ask for, and goes on with what never comes back."""
    allocator = learned(HazardPolicy(120))
    chain = [*SHORT, *chain_of(6000, *range(16))]
    allocator.touch(chain)
    claim = allocator.hollow.claim(chain, len(chain))
    assert claim is not None and allocator.num_free == 0
    paying = allocator.hollow.paying
    assert [paying(chain, start, len(chain)) for start in (0, 2, 3, 4)] == [3, 3, 3, 4]
    assert paying(chain, 0, 2) == 2


def test_a_store_of_what_is_gone_ends_without_a_trace() -> None:
    allocator = allocator_of(record_events=True)
    claim = allocator.hollow.claim(CHAIN, 10)
    plans = [allocator.hollow.plan(CHAIN, start, start + 2, 2) for start in (0, 4, 8)]
    assert claim is not None and None not in plans
    allocator.hollow.end(claim)
    assert allocator.known_depth(CHAIN, 10) == 10  # the stores claim it, too
    first, middle, last = (plan for plan in plans if plan is not None)
    assert allocator.commit(middle)
    allocator.drop(CHAIN, 4)
    assert not allocator.commit(last)
    allocator.abort(first)
    allocator.tidy()
    assert allocator.num_free == 20 and allocator.known_depth(CHAIN, 10) == 0 and not len(allocator.hollow)
    stored, evicted = allocator.take_events()
    assert isinstance(stored, Stored) and isinstance(evicted, Evicted)
    assert stored.hashes == list(evicted.hashes) == CHAIN[4:6]
    allocator.check_invariants()


def test_two_stores_of_one_position_give_it_one_slot() -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    one, other = allocator.hollow.plan(CHAIN, 5, 10, 5), allocator.hollow.plan(CHAIN, 3, 10, 7)
    assert claim is not None and one is not None and other is not None
    assert allocator.commit(one) and allocator.commit(other)
    assert allocator.num_free == 13
    pin = allocator.pin(CHAIN, 3, 10)
    assert pin.slots[:, 0].tolist() == [*other.slots[:2, 0].tolist(), *one.slots[:, 0].tolist()]
    allocator.check_invariants()


@pytest.mark.parametrize("is_longer_first", [False, True])
def test_the_later_of_two_stores_gives_back_what_it_does_not_fill(is_longer_first: bool) -> None:
    allocator = allocator_of()
    claim = allocator.hollow.claim(CHAIN, 10)
    short, long = allocator.hollow.plan(CHAIN, 4, 6, 2), allocator.hollow.plan(CHAIN, 2, 8, 6)
    assert claim is not None and short is not None and long is not None
    first, second = (long, short) if is_longer_first else (short, long)
    assert allocator.commit(first) and allocator.commit(second) is not is_longer_first
    assert allocator.num_resident == 6 and allocator.num_free == 14
    assert len(np.unique(allocator.pin(CHAIN, 2, 8).slots)) == 6
    allocator.check_invariants()


@pytest.mark.parametrize("is_on", [True, False])
def test_no_position_is_told_twice(is_on: bool) -> None:
    """Of a store that finds some of its positions filled the others are told, each stretch with its note."""
    allocator = allocator_of(record_events=is_on)
    claim = allocator.hollow.claim(CHAIN, 10)
    short = allocator.hollow.plan(CHAIN, 4, 6, 2)
    long = allocator.hollow.plan(CHAIN, 2, 9, 7, lambda start, stop: (start, stop))
    assert claim is not None and short is not None and long is not None
    assert allocator.commit(short) and allocator.commit(long)
    told = [
        Stored(CHAIN[4:6], CHAIN[3]),
        Stored(CHAIN[2:4], CHAIN[1], (2, 9), 5),
        Stored(CHAIN[6:9], CHAIN[5], (2, 9)),
    ]
    assert allocator.take_events() == (told if is_on else [])


def test_slots_that_are_closed_are_given_up_by_what_is_claimed() -> None:
    allocator = allocator_of(record_events=True)
    serve(allocator, CHAIN)
    assert allocator.hollow.claim(CHAIN, 10) is not None
    allocator.resizing.close(np.arange(4, 20))
    assert allocator.resizing.empty(99) and allocator.resizing.num_withdrawn == 16
    assert allocator.num_resident == 4 and allocator.lookup(CHAIN).depth == 4
    assert allocator.take_events()[1:] == [Evicted(CHAIN[4:])]
    allocator.check_invariants()


def test_a_store_that_fails_cuts_off_nothing_behind_it() -> None:
    allocator = allocator_of()
    serve(allocator, CHAIN)
    assert allocator.hollow.claim(CHAIN, 10) is not None
    assert allocator.hollow.empty(CHAIN, 2, 6, 4) == 4
    plan = allocator.hollow.plan(CHAIN, 2, 6, 4)
    assert plan is not None
    allocator.abandon(plan)
    assert allocator.usable_depth(CHAIN, 10, 6) == 10
    allocator.abort(plan)
    assert allocator.usable_depth(CHAIN, 10, 6) == 10 and allocator.lookup(CHAIN).depth == 2
    allocator.check_invariants()


def test_a_pool_that_shrinks_empties_what_is_claimed() -> None:
    allocator = allocator_of(record_events=True)
    serve(allocator, CHAIN)
    assert allocator.hollow.claim(CHAIN, 10) is not None
    allocator.resizing.close(allocator.pin(CHAIN, 0, 1).slots[:, 0])
    allocator.resizing.close(np.arange(5, 20))
    assert not allocator.resizing.empty(99)  # a load reads one of them
    assert allocator.hollow.lacking(CHAIN, 0, 10).tolist() == [False] * 5 + [True] * 5
    assert allocator.known_depth(CHAIN, 10) == 10
    assert allocator.take_events()[1:] == [Evicted(CHAIN[5:])]
    allocator.check_invariants()


def test_what_was_on_its_way_before_a_reset_is_nobodys() -> None:
    allocator = allocator_of()
    assert allocator.hollow.claim(CHAIN, 10) is not None
    plan = allocator.hollow.plan(CHAIN, 2, 8, 6)
    allocator.reset()
    assert allocator.hollow.claim(CHAIN, 10) is not None
    assert plan is not None and not allocator.commit(plan)
    assert allocator.hollow.lacking(CHAIN, 0, 10).all() and allocator.num_free == 20
    allocator.check_invariants()


def test_a_store_that_is_abandoned_cuts_nothing_off() -> None:
    allocator = allocator_of()
    assert allocator.hollow.claim(CHAIN, 10) is not None
    plan = allocator.hollow.plan(CHAIN, 2, 8, 6)
    assert plan is not None
    allocator.abandon(plan)
    assert allocator.known_depth(CHAIN, 10) == 10 and allocator.num_free == 14
    allocator.abort(plan)
    assert allocator.known_depth(CHAIN, 10) == 10 and allocator.num_free == 20
    allocator.check_invariants()


@pytest.mark.parametrize("position", [3, 4, 5])
def test_a_store_of_which_the_end_was_cut_off_is_nobodys(position: int) -> None:
    allocator = allocator_of()
    serve(allocator, CHAIN)
    claim = allocator.hollow.claim(CHAIN, 10)
    assert claim is not None and allocator.hollow.empty(CHAIN, 2, 6, 4) == 4
    plan = allocator.hollow.plan(CHAIN, 2, 6, 4)
    allocator.drop(CHAIN, position)
    assert plan is not None and not allocator.commit(plan)
    assert allocator.hollow.lacking(CHAIN, 0, 10).tolist() == [False] * 2 + [True] * 8
    allocator.check_invariants()


def test_nor_is_it_once_the_end_is_known_again() -> None:
    """What was cut off may have been wrong, or of other weights."""
    allocator = allocator_of()
    serve(allocator, CHAIN)
    assert allocator.hollow.claim(CHAIN, 10) is not None and allocator.hollow.empty(CHAIN, 2, 6, 4) == 4
    plan = allocator.hollow.plan(CHAIN, 2, 6, 4)
    allocator.drop(CHAIN, 4)
    assert allocator.hollow.claim(CHAIN, 10) is not None
    assert plan is not None and not allocator.commit(plan)
    assert allocator.hollow.lacking(CHAIN, 0, 10).tolist() == [False] * 2 + [True] * 8
    allocator.check_invariants()


def test_nothing_is_hollow_behind_what_is_filling() -> None:
    allocator = allocator_of()
    plan = allocator.plan_store(CHAIN, 4)
    assert plan is not None and allocator.hollow.claim(CHAIN, 10) is not None
    assert allocator.known_depth(CHAIN, 10) == 4 and allocator.hollow.lacking(CHAIN, 0, 10).sum() == 6
    assert allocator.commit(plan)
    assert allocator.hollow.claim(CHAIN, 10) is not None
    assert allocator.known_depth(CHAIN, 10) == 10
    assert allocator.resident_depth(CHAIN) == allocator.lookup(CHAIN).depth == 4
    allocator.check_invariants()


@pytest.mark.parametrize("stop", range(1, 10))
def test_a_gap_may_begin_where_a_segment_does(stop: int) -> None:
    allocator = allocator_of()
    serve(allocator, CHAIN)
    assert allocator.hollow.claim(CHAIN[:stop], stop) is not None  # a segment ends there now
    assert allocator.hollow.claim(CHAIN, 10) is not None
    assert allocator.hollow.empty(CHAIN, stop, 10, 1) == 1
    assert allocator.usable_depth(CHAIN, 10) == allocator.lookup(CHAIN).depth == stop
    pin = allocator.pin(CHAIN, 0, stop)
    assert len(pin.slots) == stop and pin.node is not None and pin.node.end == stop
    allocator.check_invariants()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_claim_may_end_before_what_was_cut_off_is_taken_away(is_reset: bool) -> None:
    allocator = allocator_of()
    allocator._step_work = allocator._work_left = 0
    claim = allocator.hollow.claim(CHAIN, 10)
    fill(allocator, CHAIN, 6, 8)
    allocator.drop(CHAIN, 6)
    if is_reset:
        allocator.reset()
    assert claim is not None
    allocator.hollow.end(claim)
    assert allocator.known_depth(CHAIN, 10) == 0
    allocator.check_invariants()


@pytest.mark.parametrize("num_uses", [1, 3])
def test_who_would_go_next_gets_no_slots_of_others(num_uses: int) -> None:
    allocator = CpuOffloadingBlockAllocator(10, policy=make_policy("lru", 20))
    assert allocator.hollow.claim(OTHER, 10) is not None
    for _ in range(num_uses):
        allocator.touch(CHAIN)
        serve(allocator, CHAIN)
    assert allocator.hollow.plan(OTHER, 0, 10, 10) is None
    allocator.touch(OTHER)
    fill(allocator, OTHER, 0, 10)


class HollowMachine(RuleBasedStateMachine):
    """Any history of claims, stores, loads, cuts and sizes. Slots hold what was stored in them last."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = allocator_of(16, record_events=True)
        self.claims: list[Pin] = []
        self.plans: list[StorePlan] = []
        self.pins: list[tuple[Pin, list[bytes]]] = []
        self.content: dict[int, tuple[bytes, int]] = {}
        self.resets: dict[int, int] = {}  # by plan: how many there were before it began
        self.num_resets = 0
        self.told: set[bytes] = set()
        self.closed: list[int] = []

    chains = st.sampled_from([CHAIN, BRANCH, OTHER])
    places = st.integers(0, 10)
    seldom = st.sampled_from([False, False, False, False, True])

    @rule(chain=chains)
    def use(self, chain: list[bytes]) -> None:
        self.allocator.touch(chain)

    @rule(chain=chains, stop=places)
    def claim(self, chain: list[bytes], stop: int) -> None:
        claim = self.allocator.hollow.claim(chain, stop)
        if claim is not None:
            self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def end_claim(self, data: st.DataObject) -> None:
        self.allocator.hollow.end(self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1))))

    @rule(chain=chains, stop=places, limit=st.integers(1, 10), must=st.booleans())
    def store(self, chain: list[bytes], stop: int, limit: int, must: bool) -> None:
        self._began(self.allocator.plan_store(chain, stop, limit, must=must))

    @rule(chain=chains, start=places, length=places, limit=st.integers(1, 10))
    def store_hollow(self, chain: list[bytes], start: int, length: int, limit: int) -> None:
        known = self.allocator.known_depth(chain, 10)
        at = np.flatnonzero(self.allocator.hollow.lacking(chain, 0, known))
        if len(at):
            start = int(at[start % len(at)])
            self._began(self.allocator.hollow.plan(chain, start, min(start + length + 1, known), limit))

    @rule(chain=chains)
    def have_some(self, chain: list[bytes]) -> None:
        claim = self.allocator.hollow.claim(chain, 10)
        if claim is not None:
            self.claims.append(claim)
            for start in (1, 7):
                if self.allocator.hollow.lacking(chain, start, 10)[0]:
                    self._began(self.allocator.hollow.plan(chain, start, 10, 2))

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), end=st.sampled_from(["commit", "abort", "abandon"]))
    def end_store(self, data: st.DataObject, end: str) -> None:
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        if end == "commit":
            told = [(each, self.resets[plan.plan_id]) for each in plan.hashes]
            self.content.update(zip(plan.slots[:, 0].tolist(), told, strict=True))
            self.allocator.commit(plan)
            return
        if end == "abandon":
            self.allocator.abandon(plan)
        self.allocator.abort(plan)

    @rule(chain=chains, start=places, stop=places, most=st.integers(0, 10))
    def empty(self, chain: list[bytes], start: int, stop: int, most: int) -> None:
        claimed = max((self._claimed(claim, chain) for claim in self.claims), default=0)
        stop = min(stop, claimed)
        if start < stop:
            self.allocator.hollow.empty(chain, start, stop, most)

    @rule(chain=chains, start=places)
    def load(self, chain: list[bytes], start: int) -> None:
        depth = self.allocator.usable_depth(chain, 10, start)
        if depth:
            self.pins.append((self.allocator.pin(chain, start, depth), chain[start:depth]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        self.allocator.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[0])

    @rule(chain=chains, position=st.integers(0, 9), is_meant=seldom)
    def drop(self, chain: list[bytes], position: int, is_meant: bool) -> None:
        if is_meant:
            self.allocator.drop(chain, position)

    @rule(num_slots=st.integers(1, 8), is_meant=seldom)
    def evict(self, num_slots: int, is_meant: bool) -> None:
        if is_meant:
            self.allocator.evict(num_slots)

    @rule(slots=st.sets(st.integers(0, 15), max_size=4))
    def shrink(self, slots: set[int]) -> None:
        more = sorted(slots - set(self.closed))
        self.closed += more
        self.allocator.resizing.close(np.array(more, dtype=np.int64))
        self.allocator.resizing.empty(99)

    @rule()
    def grow(self) -> None:
        self.allocator.resizing.open(np.array(self.closed, dtype=np.int64))
        self.closed = []

    @rule(is_meant=seldom)
    def reset(self, is_meant: bool) -> None:
        if is_meant:
            self.allocator.reset()
            self.num_resets += 1

    @rule(work=st.sampled_from([1 << 15, 1 << 15, 1, 0]))
    def step(self, work: int) -> None:
        self.allocator._step_work = work
        self.allocator.tidy()

    @invariant()
    def all_agree(self) -> None:
        self.allocator.check_invariants()

    @invariant()
    def slots_hold_what_the_tree_says(self) -> None:
        for node in self.allocator._tree.nodes():
            for prefix_hash, slot in zip(node.hashes, node.slots[: node.resident, 0].tolist(), strict=False):
                assert slot < 0 or self.content[slot] == (prefix_hash, self.num_resets)
        for pin, hashes in self.pins:
            assert [self.content[slot][0] for slot in pin.slots[:, 0].tolist()] == hashes

    @invariant()
    def events_tell_what_has_slots(self) -> None:
        for event in self.allocator.take_events():
            if isinstance(event, Stored):
                assert self.told.isdisjoint(event.hashes)
                self.told.update(event.hashes)
            elif isinstance(event, Evicted):
                assert self.told.issuperset(event.hashes)
                self.told.difference_update(event.hashes)
        if self.allocator.is_listing:
            return
        nodes = list(self.allocator._tree.nodes())
        held = {
            prefix_hash
            for node in nodes
            for prefix_hash, slot in zip(node.hashes, node.slots[: node.resident, 0].tolist(), strict=False)
            if slot >= 0
        }
        assert held == self.told

    def teardown(self) -> None:
        for pin, _ in self.pins:
            self.allocator.unpin(pin)
        for plan in self.plans:
            self.allocator.abort(plan)
        for claim in self.claims:
            self.allocator.hollow.end(claim)
        self.allocator._step_work = 1 << 15
        self.allocator.tidy()
        self.allocator.tidy()
        self.allocator.check_invariants()
        assert not len(self.allocator.hollow)
        assert not any((node.slots < 0).any() for node in self.allocator._tree.nodes())

    def _began(self, plan: StorePlan | None) -> None:
        if plan is not None:
            self.plans.append(plan)
            self.resets[plan.plan_id] = self.num_resets

    def _claimed(self, claim: Pin, chain: list[bytes]) -> int:
        """Leading positions of ``chain`` that it keeps."""
        node = claim.node
        hashes = [] if node is None else self.allocator._tree.hashes_before(Place(node, node.end), 10)
        return next((at for at, each in enumerate(hashes) if each != chain[at]), len(hashes))


TestHollowMachine = HollowMachine.TestCase
TestHollowMachine.settings = thorough(300, steps=40)
