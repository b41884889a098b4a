"""What bounds that requests protect by hints."""

import logging
import math
import random
from typing import Any

import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import HintedPolicy, KeepHints, LruPolicy, Worth, make_policy
from tests.evictor.hinted_driver import HIGH, LOW, UNWANTED, HintedDriver, pinned
from tests.strategies import chain_of


def test_pins_and_high_priorities_are_bounded_together(caplog: pytest.LogCaptureFixture) -> None:
    driver = HintedDriver(10)
    driver.grown(4, pinned(100))
    driver.grown(6, HIGH)
    assert not caplog.records
    states = [driver.policy_state(node) for node in driver.nodes]
    assert states == [None, Worth.HIGH]
    newer = driver.grown(5, HIGH)  # the older one is normal from now on
    assert [driver.policy_state(node) for node in driver.nodes] == [None, Worth.NORMAL, Worth.HIGH]
    driver.use(newer)
    pin = driver.grown(6, pinned(50))
    assert [driver.policy_state(node) for node in driver.nodes] == [None, Worth.NORMAL, Worth.NORMAL, None]
    assert not caplog.records
    for _ in range(3):
        late = driver.grown(1, pinned(100))
        assert driver.policy_state(late) is Worth.NORMAL
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "more than the 10 slots" in record.getMessage()
    driver.now = 50
    assert driver.choose() is not None
    driver.use(late, HIGH)
    assert driver.policy_state(late) is Worth.HIGH, "there is room again"
    assert driver.policy_state(pin) is Worth.NORMAL


@pytest.mark.parametrize("hints", [pinned(50), HIGH], ids=["pinned", "high"])
def test_pins_that_are_over_leave_their_room_to_the_next_request(hints: KeepHints) -> None:
    """Nothing is chosen in between: room is needed for what is to be protected only."""
    driver = HintedDriver(10)
    driver.grown(10, pinned(5))
    driver.now = 5
    assert driver.policy_state(driver.grown(10, hints)) in (None, Worth.HIGH)


def test_high_worth_that_is_over_is_not_counted_against_what_is_not() -> None:
    driver = HintedDriver(10)
    lasting = driver.grown(5, HIGH)
    brief = driver.grown(5, KeepHints(Worth.HIGH, ttl=3))
    driver.now = 3
    newer = driver.grown(5, HIGH)
    states = [driver.policy_state(node) for node in (lasting, brief, newer)]
    assert states == [Worth.HIGH, Worth.UNWANTED, Worth.HIGH]


@pytest.mark.parametrize("new_head", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_no_tail_stays_protected_without_its_head(size: int, new_head: bool) -> None:
    driver = HintedDriver(5)
    node = driver.grown(4, HIGH)
    driver.grown(1)  # the last request before the split is another one
    driver.split(node, size, new_head=new_head)
    driver.grown(2, HIGH)
    states = [driver.policy_state(each) for each in driver.nodes]
    assert states == [Worth.NORMAL, Worth.NORMAL, Worth.NORMAL, Worth.HIGH]


def test_what_never_fits_takes_nothing_from_others() -> None:
    driver = HintedDriver(10)
    small = driver.grown(5, HIGH)
    large = driver.grown(11, HIGH)
    driver.use(large, pinned(50))
    assert driver.policy_state(large) is Worth.NORMAL
    assert driver.policy_state(small) is Worth.HIGH


def test_what_is_before_a_held_position_counts() -> None:
    """Or else a pin of one position would hold a chain of any length."""
    driver = HintedDriver(10)
    trunk = driver.grown(11)
    twig = driver.grown(1, pinned(50), parent=trunk)
    assert driver.policy_state(twig) is Worth.NORMAL
    head = driver.grown(8)
    tail = driver.grown(8, HIGH, parent=head)
    assert (driver.policy_state(head), driver.policy_state(tail)) == (Worth.HIGH, Worth.NORMAL)


def hits(policy: HintedPolicy[Any], capacity: int, greedy: KeepHints | None, rounds: int = 30) -> int:
    """Positions found by a client that asks for 10 documents of 8 in turn, the last one twice as often.

    Beside another one that never asks twice, and gives ``greedy`` hints; None: there is none.
    """
    allocator = CpuOffloadingBlockAllocator(capacity, policy=policy)
    found = 0

    for step in range(rounds * 10):
        if greedy is not None and step % 3 == 0:
            serve(allocator, chain_of(1, *[step] * 5), greedy)
        found += serve(allocator, chain_of(2, *[step % 10 if step % 2 else 9] * 7)).depth
        allocator.check_invariants()
    return found


@pytest.mark.parametrize("greedy", [HIGH, pinned(math.inf)], ids=["high", "pinned"])
def test_a_client_that_wants_everything_held_gets_its_share_only(greedy: KeepHints) -> None:
    capacity, share = 64, 16
    policy: HintedPolicy[Any] = HintedPolicy(LruPolicy(), share, lambda: 0.0)
    found = hits(policy, capacity, greedy)
    assert 0 < policy._num_high + policy._num_pinned <= share
    rest: HintedPolicy[Any] = HintedPolicy(LruPolicy(), 0, lambda: 0.0)
    assert found >= hits(rest, capacity - share, KeepHints()) > 0


@pytest.mark.parametrize("late", [None, HIGH, KeepHints(Worth.HIGH, ttl=5), pinned(1000)], ids=str)
def test_what_outlived_its_time_is_not_protected_beyond_the_share(late: KeepHints | None) -> None:
    """Waves of high worth with a short time to live fill the pool; then somebody uses them all."""
    driver = HintedDriver(25)
    waves = []
    for wave in range(4):
        waves.append(driver.grown(25, KeepHints(Worth.HIGH, ttl=5)))
        driver.now = 10.0 * (wave + 1)
    for node in waves:
        driver.use(node, late)
        driver.check()
    states = [driver.policy_state(node) for node in waves]
    kept = {None: [], pinned(1000): [0]}.get(late, [3])  # of high worth the last, of pins the first
    assert [wave for wave, state in enumerate(states) if state is not Worth.NORMAL] == kept
    assert driver.choose() is not None


@pytest.mark.parametrize("is_moving", [False, True], ids=["clock stands", "clock moves"])
@pytest.mark.parametrize("inner", ["lru", "hazard", "arc", "s3fifo", "lfu"])
def test_the_share_holds_in_random_histories_of_a_pool(inner: str, is_moving: bool) -> None:
    """The clock may move between any two calls, and within one."""
    for seed in range(12):
        rng = random.Random(f"{inner} {seed}")
        history = PoolHistory(rng, inner, is_moving)
        for _ in range(80):
            history.step()


class PoolHistory:
    """A pool under requests with hints of every kind, failing stores, pins of loads, drops and resets."""

    def __init__(self, rng: random.Random, inner: str, is_moving: bool) -> None:
        self.rng = rng
        self.now = 0.0
        self.is_moving = is_moving
        self.capacity = rng.choice([8, 20, 60])
        self.share = rng.choice([0, self.capacity // 4, self.capacity])
        self.policy = HintedPolicy(make_policy(inner, self.capacity), self.share, self.clock)
        self.pool = CpuOffloadingBlockAllocator(self.capacity, policy=self.policy)
        self.pins: list[Any] = []
        self.plans: list[Any] = []

    def clock(self) -> float:
        if self.is_moving:
            self.now += self.rng.choice([0, 0, 0.3])
        return self.now

    def step(self) -> None:
        rng, pool = self.rng, self.pool
        self.now += rng.choice([0, 0, 0.5, 1, 4])
        chain, hints = self.draw_chain(), self.draw_hints()
        match rng.choices(["touch", "store", "pin", "unpin", "drop", "reset"], [70, 80, 10, 10, 6, 1])[0]:
            case "touch":
                pool.touch(chain, hints)
            case "store":
                plan = pool.plan_store(chain, len(chain), rng.choice([None, 2]), hints)
                self.plans += [] if plan is None else [plan]
            case "pin" if depth := pool.resident_depth(chain):
                self.pins.append(pool.pin(chain, rng.randrange(depth), depth))
            case "unpin" if self.pins:
                pool.unpin(self.pins.pop(rng.randrange(len(self.pins))))
            case "drop":
                pool.drop(chain, rng.randrange(len(chain)))
            case "reset":
                pool.reset()
        while self.plans and rng.random() < 0.6:
            plan = self.plans.pop(rng.randrange(len(self.plans)))
            rng.choice([pool.commit, pool.commit, pool.commit, pool.abort])(plan)
        pool.check_invariants()
        assert self.policy._num_high + self.policy._num_pinned <= self.share

    def draw_chain(self) -> list[bytes]:
        base, length = self.rng.randrange(4), self.rng.randint(1, 12)
        own, branch = self.rng.randint(0, length), self.rng.randrange(3)
        return chain_of(*(base * 100 + at if at < own else 1000 * branch + at for at in range(length)))

    def draw_hints(self) -> KeepHints | None:
        if self.rng.random() < 2 / 3:
            return None
        ends = self.rng.choice([-math.inf, -math.inf, self.now + 2, self.now + 9])
        return KeepHints(self.rng.choice(list(Worth)), self.rng.choice([1, 3, math.inf]), ends)


def test_what_was_pinned_is_bounded_when_its_pin_is_over() -> None:
    """The pool has become smaller meanwhile, and pins are never taken back."""
    driver = HintedDriver(10)
    first = driver.grown(4, KeepHints(Worth.HIGH, pinned_until=20))
    second = driver.grown(6, pinned(40))
    driver.policy.allow(8)
    assert [driver.policy_state(node) for node in (first, second)] == [None, None]
    driver.now = 30
    assert driver.choose() is first
    assert [driver.policy_state(node) for node in (first, second)] == [Worth.NORMAL, None]
    driver.policy.check_invariants(driver.nodes)


def test_requests_that_want_nothing_kept_leave_the_others_all_the_pool() -> None:
    def found(greedy: KeepHints | None) -> int:
        return hits(HintedPolicy(LruPolicy(), 0, lambda: 0.0), 56, greedy)

    assert found(UNWANTED) == found(None) > found(KeepHints())
    assert found(LOW) == found(None)


def test_without_hints_it_is_the_inner_policy_and_keeps_nothing() -> None:
    reads: list[float] = []
    policy: HintedPolicy[Any] = HintedPolicy(LruPolicy(), 16, lambda: reads.append(0.0) or 0.0)
    hits(policy, 32, KeepHints())
    assert not policy._num_marks
    assert not reads, "nobody asked what time it is"
