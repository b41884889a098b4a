"""Events, replayed in order, always tell what is resident, also while cuts are taken away bit by bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from allocator import CpuOffloadingBlockAllocator, Pin, Stored, StorePlan, hash_chain


class Listener:
    """Replays the events of ``allocator``."""

    def __init__(self, allocator: CpuOffloadingBlockAllocator) -> None:
        self._allocator = allocator
        self.resident: set[bytes] = set()

    def listen(self) -> None:
        for event in self._allocator.take_events():
            hashes = set(event.hashes)
            assert len(hashes) == len(event.hashes), "an event names a block twice"
            if isinstance(event, Stored):
                assert not hashes & self.resident, "what is there was stored"
                self.resident |= hashes
            else:
                assert hashes <= self.resident, "what is not there was evicted"
                self.resident -= hashes


def resident_hashes(allocator: CpuOffloadingBlockAllocator) -> set[bytes]:
    return {each for node in allocator._tree.nodes() for each in list(node.hashes)[: node.resident]}


def draw_chain(rng: random.Random) -> list[bytes]:
    """Of four documents with places where some leave them."""
    tokens = [rng.randrange(4)]
    for position in range(1, rng.randrange(2, 24)):
        tokens.append(10 + rng.randrange(2) if position in (4, 9, 15) else 20 + position)
    return hash_chain(tokens, block_size=1)


@pytest.mark.parametrize("seed", range(40))
def test_events_tell_what_is_resident(seed: int) -> None:
    rng = random.Random(seed)
    allocator = CpuOffloadingBlockAllocator(rng.choice([8, 30, 100]), record_events=True)
    allocator._step_work = allocator._work_left = rng.choice([1, 300, 2000])
    listener = Listener(allocator)
    plans: list[StorePlan] = []
    pins: list[Pin] = []

    def taken(those: list[Any]) -> Any:
        return those.pop(rng.randrange(len(those)))

    def plan() -> None:
        chain = draw_chain(rng)
        made = allocator.plan_store(chain, len(chain), rng.choice([None, 1, 3]))
        if made is not None:
            plans.append(made)

    def pin() -> None:
        chain = draw_chain(rng)
        depth = allocator.resident_depth(chain)
        if depth:
            pins.append(allocator.pin(chain, rng.randrange(depth), depth))

    def drop() -> None:
        chain = draw_chain(rng)
        allocator.drop(chain, rng.randrange(len(chain)))

    calls: dict[Callable[[], object], int] = {
        plan: 35,
        lambda: plans and allocator.commit(taken(plans)): 25,
        lambda: plans and allocator.abort(taken(plans)): 5,
        drop: 7,
        lambda: allocator.reset(): 2,
        lambda: allocator.forget(draw_chain(rng)[0]): 2,
        lambda: allocator.evict(rng.randrange(1, 5)): 2,
        pin: 6,
        lambda: pins and allocator.unpin(taken(pins)): 6,
        lambda: allocator.touch(draw_chain(rng)): 5,
        lambda: allocator.tidy(): 5,
        listener.listen: 40,
    }
    for call in rng.choices(list(calls), list(calls.values()), k=200):
        call()
    for made in plans:
        allocator.commit(made)
    for each in pins:
        allocator.unpin(each)
    for _ in range(10_000):
        if not (allocator.is_listing or allocator._tree.has_dead):
            break
        allocator.tidy()
    listener.listen()
    assert listener.resident == resident_hashes(allocator)
    allocator.check_invariants()


def test_without_events_nothing_is_listed() -> None:
    allocator = CpuOffloadingBlockAllocator(100)
    allocator._step_work = allocator._work_left = 1
    for first in range(10):
        chain = hash_chain([first, *range(20, 29)], block_size=1)
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
    allocator.reset()
    assert allocator._tree.has_dead and not allocator.is_listing
