"""A garbage collection has nothing to look at, however much the pool holds; and nothing leaks for that."""

import gc
import weakref

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain
from allocator.node import Node
from allocator.prefix_tree import PrefixTree
from evictor import LruPolicy
from evictor.untracked import untrack


class _Thing:
    """Something that the collector looks at."""


def _fill(allocator: CpuOffloadingBlockAllocator, first: int, num_chains: int) -> None:
    """Chains of four blocks, each beginning with one of a few others."""
    for index in range(first, first + num_chains):
        chain = hash_chain([index % 7, index, index, index], 1)
        allocator.touch(chain)
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
        allocator.unpin(allocator.pin(chain, 0, len(chain)))


def test_nodes_and_index_are_not_looked_at() -> None:
    tree = CpuOffloadingBlockAllocator(20_000, policy=LruPolicy())._tree
    assert not gc.is_tracked(tree.root)
    assert not any(map(gc.is_tracked, (tree._index._ids, tree._table._nodes, tree._table._free_ids)))


def test_what_is_looked_at_does_not_grow_with_the_tree() -> None:
    allocator = CpuOffloadingBlockAllocator(20_000, policy=_Nothing())
    _fill(allocator, 0, 100)
    gc.collect()
    before = len(gc.get_objects())
    _fill(allocator, 100, 1000)
    gc.collect()
    assert len(list(allocator._tree.nodes())) > 1000
    assert len(gc.get_objects()) <= before + 50
    tree = allocator._tree
    assert not any(map(gc.is_tracked, (tree._index._ids, tree._table._nodes, tree._table._free_ids))), (
        "growing tracked them again"
    )


def test_a_tree_that_is_dropped_leaves_no_node() -> None:
    """Also those that a policy's state refers to, and those that were cut off and not yet taken away."""
    allocator = CpuOffloadingBlockAllocator(2_000)
    _fill(allocator, 0, 50)
    allocator._work_left = 0
    allocator.reset()
    _fill(allocator, 0, 50)
    things = []
    for node in (*allocator._tree.nodes(), *allocator._tree.dead_nodes()):
        thing = _Thing()
        things.append(weakref.ref(thing))
        thing.node = node  # type: ignore[attr-defined]
        node.rank = thing
    del node, thing, allocator
    gc.collect()
    assert len(things) > 100
    assert [thing() for thing in things if thing() is not None] == []


def test_an_untracked_object_is_freed_with_its_last_reference() -> None:
    thing, held = _Thing(), _Thing()
    thing.held = held  # type: ignore[attr-defined]
    is_there = weakref.ref(held)
    untrack(thing)
    assert not gc.is_tracked(thing)
    del held
    gc.collect()
    assert is_there() is not None
    del thing
    assert is_there() is None


@pytest.mark.parametrize("num_times", [1, 2])
def test_untracking_twice_is_untracking(num_times: int) -> None:
    things: list[object] = [[], {}, PrefixTree().root, _Thing()]
    for thing in things:
        for _ in range(num_times):
            untrack(thing)
        assert not gc.is_tracked(thing)
    assert isinstance(things[2], Node)


class _Nothing(LruPolicy[Node]):
    """Keeps nothing of any node: what is seen then is the tree's."""

    def used(self, *args: object) -> None: ...
    def stored(self, *args: object) -> None: ...
    def inherit(self, *args: object) -> None: ...
    def may_join(self, *args: object) -> bool:
        return False

    def enter(self, *args: object) -> None: ...
    def leave(self, *args: object) -> None: ...
    def forget(self, *args: object) -> None: ...
