"""The smallest pool, the longest chain, the longest history. Counted, never timed."""

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain
from allocator.departures import MOST_DEPARTURES, Cause
from allocator.node import Node, Place
from allocator.prefix_tree import PrefixTree
from evictor import LruPolicy
from tests.allocator.pair import LruPair
from tests.allocator.scenes import LONG, OTHER

LENGTH = 65_536
DOCUMENT = hash_chain(range(LENGTH), 1)


class CountingChain(Sequence[bytes]):
    """A chain that counts how often a single hash is asked for."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = hashes
        self.num_probes = 0

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, key: Any) -> Any:
        self.num_probes += isinstance(key, int)
        return self.hashes[key]


class CountingPolicy:
    """LRU that counts the calls it gets."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._lru: LruPolicy[Any] = LruPolicy()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._lru, name)


def test_a_pool_of_one_slot() -> None:
    pair = LruPair(1)
    for chain in (LONG, OTHER, LONG):
        pair.store(chain)
        pair.check()
        assert pair.allocator.resident_depth(chain) == 1
        assert pair.plan_store(chain) is None, "its own first position is no room for its second"
    pin = pair.pin(LONG, 0, 1)
    assert pair.plan_store(OTHER) is None
    pair.unpin(pin)
    pair.check()


def test_a_chain_longer_than_the_pool_is_kept_from_its_start() -> None:
    pair = LruPair(4)
    pair.store(OTHER)
    pair.store(LONG)
    pair.check()
    assert pair.allocator.resident_depth(LONG) == 4
    assert pair.allocator.num_evicted == 4


@pytest.mark.parametrize(("capacity", "freed"), [(1023, 1), (1024, 2), (4096, 5)])
def test_a_large_pool_evicts_a_thousandth_more(capacity: int, freed: int) -> None:
    allocator = CpuOffloadingBlockAllocator(capacity)
    plan = allocator.plan_store(hash_chain(range(capacity), 1), capacity)
    assert plan is not None
    allocator.commit(plan)
    assert allocator.evict(1) == allocator.num_free == freed
    allocator.check_invariants()


def test_a_slot_that_fits_no_position_stays_free() -> None:
    pair = LruPair(7, columns=2)
    pair.store(LONG)
    pair.check()
    assert pair.allocator.num_free == 1
    assert pair.allocator.resident_depth(LONG) == 3


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4097, LENGTH // 2, LENGTH - 2, LENGTH - 1, LENGTH])
def test_a_long_chain_costs_few_probes_and_policy_calls(depth: int) -> None:
    policy = CountingPolicy()
    allocator = CpuOffloadingBlockAllocator(LENGTH, policy=policy)
    if depth:
        plan = allocator.plan_store(DOCUMENT, depth)
        assert plan is not None
        allocator.commit(plan)
    chain = CountingChain(DOCUMENT)
    assert allocator.lookup(chain).depth == depth
    assert chain.num_probes <= 20
    allocator.touch(chain)
    assert chain.num_probes <= 40
    if depth:
        allocator.unpin(allocator.pin(DOCUMENT, 0, depth))
        assert allocator.evict(depth) == depth
        assert policy.calls["choose"] == policy.calls["evicted"] == 1
        assert policy.calls.total() <= 20


def test_a_chain_that_is_only_extended_stays_one_segment() -> None:
    tree = PrefixTree()
    node = tree.root
    for start in range(0, LENGTH, 4096):
        slots = np.arange(start, start + 4096, dtype=np.int64).reshape(-1, 1)
        hashes = DOCUMENT[start : start + 4096]
        node = tree.append(Place(node, start), hashes, tree.packed(hashes), slots)
    assert list(tree.nodes()) == [node]
    assert tree.slots_of(Place(node, LENGTH), 0).reshape(-1).tolist() == list(range(LENGTH))
    tree.check_invariants()


@pytest.mark.parametrize("order", ["from the head", "from the tail", "random", "halving"])
def test_splits_repoint_few_positions(order: str) -> None:
    """The smaller side moves: at most n/2 * log2(n) of n positions until every segment is a single one."""
    size = 1024
    depths = {
        "from the head": list(range(1, size)),
        "from the tail": list(range(size - 1, 0, -1)),
        "random": random.Random(0).sample(range(1, size), size - 1),
        "halving": sorted(range(1, size), key=lambda depth: -(depth & -depth)),
    }[order]
    tree = PrefixTree()
    hashes = DOCUMENT[:size]
    node = tree.append(Place(tree.root, 0), hashes, tree.packed(hashes), np.zeros((size, 1), dtype=np.int64))
    moved = 0
    for depth in depths:
        node = tree.find(DOCUMENT, depth).node
        moved += len(tree.split(Place(node, depth)))
    assert len(list(tree.nodes())) == size
    assert moved <= size // 2 * 10
    tree.check_invariants()


def test_a_long_history_leaves_nothing_behind() -> None:
    capacity = 64
    gc.collect()
    nodes_of_others = _num_nodes()
    rng = random.Random(0)
    allocator = CpuOffloadingBlockAllocator(capacity)

    def churn(rounds: int) -> None:
        for _ in range(rounds):
            chain = hash_chain([rng.randrange(6) for _ in range(rng.randrange(1, 24))], 1)
            allocator.note_full("request", chain, len(chain))
            for run in allocator.uncached():
                plan = allocator.plan_store(run.chain, run.stop, limit=rng.randrange(1, 24))
                if plan is not None:
                    (allocator.abort if rng.random() < 0.2 else allocator.commit)(plan)
            allocator.touch(chain)
            depth = allocator.resident_depth(chain)
            if depth:
                pin = allocator.pin(chain, 0, rng.randrange(depth) + 1)
                if rng.random() < 0.1:
                    allocator.drop(chain, 0)
                allocator.unpin(pin)
            if rng.random() < 0.01:
                allocator.reset()

    churn(500)
    tracemalloc.start()
    try:
        for number in range(MOST_DEPARTURES):  # so many are remembered, and no more
            allocator.departures.note(number.to_bytes(32), Cause.EVICTED)
        before, _ = tracemalloc.get_traced_memory()
        churn(3000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    allocator.check_invariants()
    assert _num_nodes() <= nodes_of_others + capacity + 1, "nodes of evicted positions are referred to"
    assert after - before < 100_000, "33 bytes a round would be too many"


def _num_nodes() -> int:
    return sum(type(each) is Node for each in gc.get_objects())
