"""How large a pool is to be, who may say so, and how it gets there."""

import random
from pathlib import Path

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator, Pin, Stored, hash_chain, serve
from evictor import HintedPolicy, KeepHints, LruPolicy
from offload.errors import HostMemoryError, OperatorError
from offload.messages import Fingerprint, Resize, Resized, WorkerFacts
from offload.scheduler import resizing
from offload.scheduler.pool_target import PoolBounds, PoolTarget
from offload.scheduler.resizing import PoolResizing
from offload.vllm.pool_size import PoolSize
from offload.worker.pool.pressure import PressureWatch, read_pressure
from tests.offload.worker.pool.test_pressure import group


def no_room(num_bytes: int) -> None:
    raise HostMemoryError("cannot take 2.00 GiB: of 8.00 GiB 1.00 are free; ask for less")


class Pool:
    """An allocator that is resized, and ranks that do as they are told."""

    def __init__(self, unit_slots: int = 1, num_ranks: int = 2, num_slots: int = 64, most: int = 128) -> None:
        self.now = 0.0
        policy = HintedPolicy(LruPolicy(), num_slots // 2, lambda: self.now)
        self.allocator = CpuOffloadingBlockAllocator(most, policy=policy, record_events=True)
        self.mirror: set[bytes] = set()
        """What somebody who follows its events thinks that it has."""
        self.target = PoolTarget(lambda num_bytes: None, clock=lambda: self.now)
        self.bounds = PoolBounds(1.0, most / num_slots, num_slots, most, unit_slots, 1, 1 << 20)
        self.num_resized = 0
        self.resizing = PoolResizing(
            self.allocator, self.target, self.bounds, num_ranks, self._resized, lambda: self.now
        )
        self.num_ranks = num_ranks
        self.stuck: list[Resize] | None = None
        """What ranks have not carried out as they hang; None: they do not."""
        num_whole = num_slots if num_slots == most else num_slots // unit_slots * unit_slots
        self.has_memory = np.arange(most) < num_whole
        self.refuses = False

    def _resized(self) -> None:
        self.num_resized += 1

    def step(self) -> list[Resize]:
        orders = self.resizing.step()
        for order in orders:
            runs = zip(order.starts.tolist(), order.stops.tolist(), strict=True)
            slots = np.concatenate([np.arange(*run) for run in runs])
            pool = self.allocator._pool
            assert pool._is_withdrawn[slots].all(), "memory of what is in use is touched"
            error = "no room" if order.takes and self.refuses else ""
            self.has_memory[slots] = order.takes and not error
            if self.stuck is not None:
                self.stuck.append(order)
                continue
            for rank in range(self.num_ranks):
                assert self.allocator.capacity + self.allocator.num_free, "opened too early"
                before = self.allocator.capacity
                self.resizing.hear({order.number: Resized(1, error if rank else "")})
                assert rank == self.num_ranks - 1 or self.allocator.capacity == before
        self.allocator.check_invariants()
        self.resizing.check_invariants()
        self.target.check_invariants()
        self._follow()
        assert self.target.told["gib"] == pytest.approx(self.bounds.gib_of(self.allocator.capacity), abs=1e-6)
        free = self.allocator._pool.free()
        assert self.has_memory[free].all(), "a free slot has no memory"
        return orders

    def _follow(self) -> None:
        for event in self.allocator.take_events():
            (self.mirror.update if isinstance(event, Stored) else self.mirror.difference_update)(event.hashes)
        if not self.allocator.is_listing:
            nodes = list(self.allocator._tree.nodes())
            resident = [(node.hashes, node.slots[: node.resident, 0].tolist()) for node in nodes]
            pairs = [pair for each in resident for pair in zip(*each, strict=False)]
            assert self.mirror == {prefix_hash for prefix_hash, slot in pairs if slot >= 0}

    def settle(self) -> None:
        for _ in range(400):
            self.step()
            self.allocator.tidy()
            if not self.resizing.is_moving and self.resizing._num_steps % 16 == 0:
                return

    def fill(self, seed: int = 0) -> list[list[bytes]]:
        rng = random.Random(seed)
        chains = [hash_chain([number, *range(rng.randrange(1, 12))], 1) for number in range(40)]
        for chain in chains:
            serve(self.allocator, chain)
        return chains


def serve_and_pin(pool: Pool, tokens: list[int]) -> Pin:
    """They are in the pool, and a load reads them."""
    chain = hash_chain(tokens, 1)
    serve(pool.allocator, chain)
    return pool.allocator.pin(chain, 0, len(chain))


@pytest.mark.parametrize("unit_slots", [1, 4, 7])
def test_it_gets_smaller_and_larger_and_memory_goes_with_it(unit_slots: int) -> None:
    pool = Pool(unit_slots)
    assert pool.allocator.capacity == 64 // unit_slots * unit_slots
    chains = pool.fill()
    pool.target.ask(0.25)
    pool.settle()
    assert pool.allocator.capacity == 16 // unit_slots * unit_slots
    assert pool.has_memory.sum() == pool.allocator.capacity
    pool.target.ask(2.0)
    pool.settle()
    assert pool.allocator.capacity == 128
    assert pool.has_memory.sum() == pool.allocator.capacity
    for chain in chains:
        serve(pool.allocator, chain)
    pool.allocator.check_invariants()
    assert pool.num_resized >= 2
    assert pool.target.told["gib"] == pytest.approx(pool.allocator.capacity / 64, abs=1e-3)


@pytest.mark.parametrize("is_full", [False, True])
def test_it_is_there_though_a_unit_is_not_whole(is_full: bool) -> None:
    """The last unit has two slots of four, and goes first."""
    pool = Pool(4, num_slots=66, most=66)
    if is_full:
        pool.fill()
    for gib in (0.5, 1.0, 0.25):
        pool.target.ask(gib)
        pool.settle()
        told = pool.target.told
        assert told["gib"] == told["target_gib"] == pytest.approx(gib, abs=0.04)
        assert not pool.resizing.is_moving


def test_a_unit_that_is_not_whole_is_never_all_that_is_left() -> None:
    """The smallest store may take more slots than it has."""
    pool = Pool(8, num_slots=26, most=26)
    plans = [pool.allocator.plan_store(hash_chain([number], 1), 1) for number in range(26)]
    for plan in plans:
        assert plan is not None
        is_last = int(plan.all_slots.item()) >= 24
        (pool.allocator.commit if is_last else pool.allocator.abort)(plan)
    assert pool.allocator.resizing.num_used_in(np.arange(0, 26, 8)).tolist() == [0, 0, 0, 2]
    pool.target.ask(pool.bounds.gib_of(pool.bounds.least))
    pool.settle()
    assert pool.allocator.capacity == pool.has_memory.sum() == 8


def test_what_is_worth_least_leaves_and_nothing_else() -> None:
    pool = Pool()
    chains = [hash_chain([number, *range(7)], 1) for number in range(8)]
    for chain in chains:
        serve(pool.allocator, chain)
    assert pool.allocator.num_free == 0
    pool.target.ask(0.5)
    pool.settle()
    depths = [pool.allocator.resident_depth(chain) for chain in chains]
    assert depths == [0, 0, 0, 0, 8, 8, 8, 8]
    assert pool.num_resized == 1


def test_what_jobs_have_is_waited_for() -> None:
    pool = Pool()
    chain = hash_chain(list(range(40)), 1)
    serve(pool.allocator, chain)
    pin = pool.allocator.pin(chain, 0, 40)
    other = hash_chain([99, *range(20)], 1)
    plan = pool.allocator.plan_store(other, 20)
    assert plan is not None
    pool.target.ask(0.25)
    pool.settle()
    assert pool.allocator.resident_depth(chain) == 40
    assert not pool.resizing.is_moving, "the engine may come to rest"
    assert pool.allocator.capacity == 60, "what was free is gone"
    pool.allocator.unpin(pin)
    pool.allocator.commit(plan)
    assert pool.resizing.is_moving, "the engine may not, before it has looked again"
    pool.settle()
    assert pool.allocator.capacity == 16
    assert pool.has_memory.sum() == 16


def test_a_rank_without_memory_leaves_the_pool_as_it_was() -> None:
    pool = Pool()
    pool.refuses = True
    pool.target.ask(2.0)
    pool.settle()
    assert pool.allocator.capacity == 64
    assert pool.target.told["error"] == "no room"
    assert pool.target.told["target_gib"] == 1.0
    assert pool.has_memory.sum() == 64


def test_a_rank_that_runs_out_of_memory_ends_the_growth_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_STEP_SLOTS", 16)
    pool = Pool()
    pool.target.ask(2.0)
    pool.step()
    assert pool.allocator.capacity == 80
    pool.refuses = True
    pool.settle()
    assert pool.allocator.capacity == 80
    assert pool.target.told["error"] == "no room"
    assert pool.target.told["target_gib"] == pool.target.told["gib"] == 1.25
    assert pool.has_memory.sum() == 80
    pool.refuses = False
    pool.target.ask(2.0)
    pool.settle()
    assert pool.target.told == {
        "gib": 2.0,
        "target_gib": 2.0,
        "most_gib": 2.0,
        "error": "",
        "fixed": None,
    }


def test_what_ranks_tell_twice_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(num_ranks=2)
    pool.stuck = []
    pool.target.ask(2.0)
    pool.step()
    pool.resizing.hear({7: Resized(2), 0: Resized(3)})
    assert [record.getMessage() for record in caplog.records] == [
        "ranks tell of resize 7 of the pool, which is not under way"
    ]
    assert pool.allocator.capacity == 128
    pool.resizing.hear({0: Resized(1, "no room")})
    assert pool.allocator.capacity == 128
    pool.resizing.check_invariants()


@pytest.mark.parametrize("grows", [False, True])
def test_ranks_that_hang_are_not_waited_for(grows: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The engine may come to rest, and shut down. When they go on, so does what was asked for."""
    pool = Pool(num_ranks=2)
    pool.stuck = []
    pool.target.ask(2.0 if grows else 0.5)
    pool.step()
    [order] = pool.stuck
    size = 64 if grows else 32
    pool.now = 59.0
    pool.resizing.hear({order.number: Resized(1)})
    pool.now = 118.0
    assert pool.step() == []
    assert pool.resizing.is_moving, "one of them told something a minute ago"
    pool.now = 119.1
    for _ in range(3):
        assert pool.step() == []
        assert not pool.resizing.is_moving
    assert pool.allocator.capacity == size
    assert "have not said for 60 s" in str(pool.target.told["error"])
    assert [record.getMessage() for record in caplog.records] == [pool.target.told["error"]]
    pool.stuck = None
    pool.target.ask(0.25)
    pool.settle()
    assert pool.allocator.capacity == 16, "what is free goes meanwhile"
    assert pool.resizing._under_way.keys() == {order.number}
    pool.now = 200.0
    pool.step()
    assert pool.target.told["error"], "it is said again"
    pool.resizing.hear({order.number: Resized(1)})
    pool.settle()
    assert pool.target.told["error"] == ""
    assert pool.allocator.capacity == pool.has_memory.sum() == 16
    assert not pool.resizing._under_way


@pytest.mark.parametrize("unit_slots", [1, 8])
def test_no_step_does_more_than_its_part(unit_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_STEP_SLOTS", 16)
    monkeypatch.setattr(resizing, "_STEP_BITES", 4)
    pool = Pool(unit_slots, num_slots=512, most=512)
    for number in range(256):
        serve(pool.allocator, hash_chain([number, 1], 1))
    pool.target.ask(0.25)
    while pool.allocator.capacity > 128:
        num_evicted, capacity = pool.allocator.num_evicted, pool.allocator.capacity
        orders = pool.step()
        assert pool.resizing.is_moving or pool.allocator.capacity == 128
        assert pool.allocator.num_evicted - num_evicted <= 4 * 2
        assert capacity - pool.allocator.capacity <= 16
        assert all((order.stops - order.starts).sum() <= 16 for order in orders if order.takes)
    pool.settle()
    assert pool.has_memory.sum() == 128


@pytest.mark.parametrize("unit_slots", [1, 8])
def test_what_requests_have_pinned_stays_until_that_is_over(unit_slots: int) -> None:
    pool = Pool(unit_slots)
    pinned, other = hash_chain(list(range(24)), 1), hash_chain(list(range(100, 140)), 1)
    serve(pool.allocator, pinned, KeepHints(pinned_until=10.0))
    serve(pool.allocator, other)
    pool.step()
    with pytest.raises(OperatorError, match=r"0\.25 GiB is less than what requests have pinned; give 0\.375"):
        pool.target.ask(0.25)
    pool.target.ask(0.375)
    pool.settle()
    assert pool.allocator.resident_depth(pinned) == 24
    assert pool.allocator.capacity == 24
    pool.target.yield_memory(1 / 2)
    for _ in range(100):
        pool.step()
    assert pool.allocator.resident_depth(pinned) == 24
    pool.now = 11.0
    serve(pool.allocator, hash_chain([999], 1))
    pool.settle()
    for _ in range(64):
        pool.step()
    assert pool.allocator.capacity == pool.has_memory.sum() == 16


def test_what_only_the_gpu_has_is_no_reason_to_refuse_a_size() -> None:
    pool, chain = Pool(), hash_chain(list(range(24)), 1)
    assert pool.allocator.hollow.claim(chain, 24, KeepHints(pinned_until=10.0)) is not None
    pool.step()
    pool.target.ask(0.25)
    pool.settle()
    assert pool.allocator.capacity == 16 and pool.allocator.known_depth(chain, 24) == 24


def test_an_engine_that_makes_no_steps_does_not_say_when_pins_are_over() -> None:
    pool = Pool()
    serve(pool.allocator, hash_chain(list(range(24)), 1), KeepHints(pinned_until=5.0))
    pool.step()
    pool.now = 9.9
    with pytest.raises(OperatorError, match="what requests have pinned"):
        pool.target.ask(0.25)
    pool.now = 10.0
    pool.target.ask(0.25)
    serve(pool.allocator, hash_chain([999], 1))
    pool.settle()
    assert pool.allocator.capacity == 16


def test_leases_stay_in_units_that_go() -> None:
    pool = Pool(8)
    leased, other = hash_chain(list(range(24)), 1), hash_chain(list(range(100, 140)), 1)
    serve(pool.allocator, leased)
    lease = pool.allocator.leases.begin(leased, 24)
    serve(pool.allocator, other)
    pool.target.ask(0.25)
    pool.settle()
    assert pool.allocator.resident_depth(leased) == 24
    pool.allocator.leases.end(lease)
    for _ in range(64):
        pool.step()
    assert pool.allocator.capacity == pool.has_memory.sum() == 16


def test_a_large_unit_keeps_its_memory_while_a_load_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_PATIENCE_SECONDS", 0.0)
    pool = Pool(8)
    chain = hash_chain(list(range(40)), 1)
    serve(pool.allocator, chain)
    pin = pool.allocator.pin(chain, 0, 40)
    pool.target.ask(0.25)
    for _ in range(64):
        pool.step()
        pool.allocator.tidy()
    assert pool.allocator.capacity == 16
    assert pool.has_memory[pin.slots].all(), "the load reads them"
    pool.allocator.unpin(pin)
    pool.settle()
    assert pool.has_memory.sum() == 16


def test_a_large_unit_keeps_its_memory_while_a_store_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_PATIENCE_SECONDS", 0.0)
    pool = Pool(8)
    plan = pool.allocator.plan_store(hash_chain(list(range(40)), 1), 40)
    assert plan is not None
    pool.target.ask(0.25)
    for _ in range(64):
        pool.step()
    assert pool.has_memory[plan.all_slots].all(), "the store writes to them"
    pool.allocator.commit(plan)
    for _ in range(64):
        pool.step()
        pool.allocator.tidy()
    assert pool.allocator.capacity == pool.has_memory.sum() == 16


def test_stores_that_take_all_room_do_not_keep_large_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_STEP_BITES", 1)
    pool = Pool(16)
    for number in range(200):
        serve(pool.allocator, hash_chain([number, *range(3)], 1))
    pool.target.ask(0.25)
    for number in range(200):
        pool.now = number / 40  # until five seconds are over
        serve(pool.allocator, hash_chain([number, *range(3)], 1))
        pool.step()
    assert pool.allocator.capacity == 64, "there was never room for a unit"
    for number in range(200):
        pool.now = 5.0
        serve(pool.allocator, hash_chain([number, *range(3)], 1))
        pool.step()
    assert pool.allocator.capacity == 16


def test_units_that_are_empty_go_while_others_are_waited_for() -> None:
    """A load reads what is in half of the pool, and that lasts."""
    pool = Pool(8, num_slots=64, most=64)
    pin = serve_and_pin(pool, list(range(28)))
    pool.target.ask(0.25)
    pool.settle()
    used = pool.allocator.resizing.num_used_in(np.arange(0, 64, 8))
    assert (used > 0).sum() == 4, "three would do, and one is not full"
    assert pool.allocator.capacity == pool.has_memory.sum() == 32
    assert not pool.resizing.is_moving, "the engine may come to rest"
    pool.allocator.unpin(pin)
    pool.settle()
    assert pool.allocator.capacity == pool.has_memory.sum() == 16


def test_another_word_while_it_gets_smaller() -> None:
    for seed in range(20):
        pool = Pool(random.Random(seed).choice([1, 2, 4]))
        pool.fill(seed)
        rng = random.Random(seed)
        for _ in range(60):
            if rng.random() < 0.2:
                pool.target.ask(rng.choice([0.2, 0.5, 0.9, 1.0, 1.5, 2.0]))
            if rng.random() < 0.3:
                pool.fill(rng.randrange(5))
            pool.step()
        pool.target.ask(1.0)
        pool.settle()
        assert pool.allocator.capacity == 64
        assert pool.has_memory.sum() == 64


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        ("8", "give the pool's size"),
        (True, "give the pool's size"),
        (float("nan"), "give the pool's size"),
        (-1, "give the pool's size"),
        (3.0, "more than cpu_gib_max, 2"),
        (0.001, "less than the pool can have"),
    ],
)
def test_what_cannot_be_had_is_refused(gib: object, words: str) -> None:
    pool = Pool()
    with pytest.raises(OperatorError, match=words):
        pool.target.ask(gib)
    assert pool.step() == []


def test_growth_that_the_machine_has_no_memory_for_is_refused() -> None:
    target = PoolTarget(no_room)
    target.begin(PoolBounds(1.0, 4.0, 64, 256, 1, 1, 1 << 20), 64)
    with pytest.raises(OperatorError, match=r"3 GiB does not fit: .* 1\.00 are free; ask for less"):
        target.ask(3)
    target.ask(0.5)


def test_a_pool_that_keeps_its_size_says_why() -> None:
    with pytest.raises(OperatorError, match="yet to be made"):
        PoolTarget(no_room).ask(1)
    fixed = PoolTarget(no_room, "listen shows the pool to other engines")
    fixed.begin(PoolBounds(1.0, 1.0, 64, 64, 0, 1, 1), 64)
    with pytest.raises(OperatorError, match="listen shows the pool"):
        fixed.ask(1)
    assert not fixed.yield_memory(0.5)
    shared = PoolTarget(no_room)
    shared.begin(PoolBounds(1.0, 1.0, 64, 64, 0, 1, 1), 64)
    with pytest.raises(OperatorError, match="ranks share its memory"):
        shared.ask(0.5)


def test_it_shrinks_while_its_control_group_is_short_and_stays_small(tmp_path: Path) -> None:
    pool = Pool()
    group(tmp_path)
    watch = PressureWatch(pool.target.yield_memory, lambda: read_pressure(tmp_path))
    assert not watch.look()
    sizes = []
    group(tmp_path, used=4 << 30)
    while watch.look():
        pool.settle()
        sizes.append(pool.allocator.capacity)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (56, 16)
    group(tmp_path)
    assert not watch.look()
    pool.settle()
    assert pool.allocator.capacity == 16, "nobody has asked for more"
    pool.target.ask(1.0)
    pool.settle()
    assert pool.allocator.capacity == pool.has_memory.sum() == 64


def test_pressure_waits_for_what_is_given_up_already() -> None:
    """It is looked at again and again; the first look is not to count many times."""
    pool = Pool()
    pin = serve_and_pin(pool, list(range(60)))
    assert pool.target.yield_memory(1 / 8)
    assert not pool.target.yield_memory(1 / 8), "no step was made"
    pool.settle()
    assert pool.allocator.capacity == 60
    assert not pool.target.yield_memory(1 / 8), "a load keeps the rest"
    assert pool.target.told["target_gib"] == 56 / 64
    pool.allocator.unpin(pin)
    pool.settle()
    assert pool.allocator.capacity == 56
    assert pool.target.yield_memory(1 / 8)
    assert pool.target.told["target_gib"] == 49 / 64


def test_pressure_ends_a_growth() -> None:
    pool = Pool()
    pool.target.ask(2.0)
    assert pool.target.yield_memory(1 / 8)
    pool.settle()
    assert pool.allocator.capacity == 56


def test_pressure_leaves_a_quarter() -> None:
    pool = Pool()
    asked = 0
    while pool.target.yield_memory(1 / 8):
        asked += 1
        pool.settle()
    assert pool.allocator.capacity == 16
    assert 5 < asked < 20


def facts(num_slots: int, most_slots: int, unit_slots: int) -> WorkerFacts:
    fingerprint = Fingerprint("", "", 1, 16, "", "")
    return WorkerFacts(num_slots, 1, fingerprint, most_slots=most_slots, unit_slots=unit_slots)


def test_ranks_have_the_sizes_that_all_of_them_can_have() -> None:
    alike = [facts(96, 200, 1), facts(90, 180, 16)]
    assert PoolSize.of(alike, 2)[-2:] == (180, 16)
    assert PoolSize.of([facts(96, 200, 1), facts(90, 90, 0)], 2)[-2:] == (90, 0), "one keeps its size"
    assert PoolSize.of([facts(96, 200, 1), facts(16, 200, 16)], 2)[-2:] == (16, 0), "there is one unit"


def test_a_pool_that_is_not_to_grow_has_all_that_each_rank_has() -> None:
    size = PoolSize.of([facts(96, 96, 1), facts(90, 90, 16)], 2)
    assert (size.num_slots, size.most_slots, size.unit_slots) == (90, 90, 16)
    size = PoolSize.of([facts(96, 96, 16), facts(90, 96, 16)], 2)
    assert (size.num_slots, size.most_slots, size.unit_slots) == (90, 90, 16), "one of them may not grow"
    pool = Pool(size.unit_slots, num_slots=size.num_slots, most=size.most_slots)
    assert pool.allocator.capacity == 90
    for gib in (0.25, 1.0):
        pool.target.ask(gib)
        pool.settle()
    assert pool.allocator.capacity == pool.has_memory.sum() == 90


def test_what_no_rank_has_taken_is_not_open() -> None:
    pool = Pool(16, num_slots=90, most=180)
    assert pool.allocator.capacity == 80
    pool.target.ask(2.0)
    pool.settle()
    assert pool.allocator.capacity == pool.has_memory.sum() == 180
