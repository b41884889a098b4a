"""Each check_invariants sees the damage it is there for."""

from collections.abc import Callable

import pytest

from allocator import CpuOffloadingBlockAllocator
from allocator.node import Node, Place
from allocator.slot_pool import SlotState
from tests.allocator.scenes import FORK, LONG, OTHER

Damage = Callable[[CpuOffloadingBlockAllocator], None]
DAMAGES: list[tuple[Damage, str]] = []


def seen_as(message: str) -> Callable[[Damage], Damage]:
    """Add a way to damage an allocator, and what check_invariants says then."""

    def add(damage: Damage) -> Damage:
        DAMAGES.append((damage, message))
        return damage

    return add


# Each takes an allocator that holds LONG as [0..3) and [3..6), FORK's [3..5) filling, OTHER pinned, 5 free.


@seen_as("free list holds slots that have an owner")
def slot_free_and_resident(allocator: CpuOffloadingBlockAllocator) -> None:
    pool = allocator._pool
    pool._stack[pool.num_free - 1] = allocator.lookup(LONG).slots[0, 0]


@seen_as("in the free list twice")
def slot_free_twice(allocator: CpuOffloadingBlockAllocator) -> None:
    pool = allocator._pool
    pool._stack[pool.num_free - 2] = pool._stack[pool.num_free - 1]


@seen_as("owned, 4 free")
def slot_lost(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._pool.take(1)


@seen_as("not 17 in all")
def slot_counted_twice(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._pool._count[SlotState.RESIDENT] += 1


@seen_as("a slot has two owners")
def slot_of_two_positions(allocator: CpuOffloadingBlockAllocator) -> None:
    node = _node_at(allocator, LONG[0])
    node.slots[0] = node.slots[1]


@seen_as("leases hang in the tree")
def lease_forgotten(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator.leases.begin(LONG, 6)
    allocator.leases._leases.clear()


@seen_as("leases keep")
def lease_not_counted(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator.leases.begin(LONG, 6)
    allocator._ranking.covered._counts.popitem()


@seen_as("leased nodes have")
def leased_slots_miscounted(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator.leases.begin(LONG, 6)
    allocator._ranking.covered._weights[_node_at(allocator, LONG[5])] -= 1


@seen_as("slots are counted as leased")
def leased_sum_wrong(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._ranking.covered.num_slots += 1


@seen_as("index says <Node")
def index_points_elsewhere(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._tree._index._ids[LONG[0]] = _node_at(allocator, LONG[5]).id


@seen_as("13 in the index")
def index_keeps_a_position(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._tree._index._ids[b"gone"] = _node_at(allocator, LONG[5]).id


@seen_as("index says None")
def position_not_in_index(allocator: CpuOffloadingBlockAllocator) -> None:
    del allocator._tree._index._ids[LONG[4]]


@seen_as("not its parent's child")
def child_of_nobody(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[5]).parent = _node_at(allocator, OTHER[0])


@seen_as("hangs below")
def gap_in_a_chain(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[5]).start += 1


@seen_as("is empty")
def empty_segment(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[5]).truncate(0)


@seen_as("are not linked, or are gone")
def node_that_nobody_links(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._tree._table._nodes.append(_node_at(allocator, LONG[5]))


@seen_as("are free, not")
def free_id_lost(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._tree._table._nodes.append(None)


@seen_as("comes after")
def siblings_out_of_order(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, FORK[4]).previous += 1
    _node_at(allocator, LONG[5]).previous += 1


@seen_as("bytes of hashes")
def hash_too_short(allocator: CpuOffloadingBlockAllocator) -> None:
    node = _node_at(allocator, LONG[5])
    node._data = node._data[:-1]


@seen_as("is resident below filling")
def resident_behind_filling(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[0]).resident -= 1


@seen_as("has its border outside")
def resident_beyond_the_end(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[5]).resident += 1


@seen_as("10 slots resident")
def filling_taken_for_resident(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, FORK[4]).resident = 2


@seen_as("a pin of <Node .* says it hangs on")
def pin_on_another_node(allocator: CpuOffloadingBlockAllocator) -> None:
    (pin,) = allocator._pins
    pin.node = _node_at(allocator, LONG[5])


@seen_as("a pin hangs on the wrong node")
def pin_forgotten(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._pins._pins.clear()


@seen_as("are pinned and free")
def pinned_slot_free(allocator: CpuOffloadingBlockAllocator) -> None:
    node = _node_at(allocator, OTHER[0])
    (pin,) = allocator._pins
    pin.node, node.pins = None, frozenset()
    slots = allocator._tree.trim(node, 4).slots.reshape(-1)
    allocator._policy.forget(node)
    allocator._pool.move(slots, SlotState.RESIDENT, SlotState.FREE)


@seen_as("and not all are leaving")
def pin_without_its_end(allocator: CpuOffloadingBlockAllocator) -> None:
    """What a split does that leaves pins at the head."""
    node = _node_at(allocator, OTHER[0])
    (pin,) = allocator._pins
    node.pins = frozenset()
    tail = allocator._tree.split(Place(node, 3))
    allocator._policy.inherit(tail, node)
    node.pins = frozenset([pin])


@seen_as("has kept 4 of its positions, not 3")
def pin_that_lost_nothing(allocator: CpuOffloadingBlockAllocator) -> None:
    (pin,) = allocator._pins
    pin.kept -= 1


@seen_as("are leaving, .* are read")
def slot_read_that_does_not_leave(allocator: CpuOffloadingBlockAllocator) -> None:
    (pin,) = allocator._pins
    allocator._pool.read(pin.slots[:1, 0])


@seen_as("has slots of other positions")
def pin_of_other_slots(allocator: CpuOffloadingBlockAllocator) -> None:
    (pin,) = allocator._pins
    pin.slots[:] = pin.slots[::-1].copy()


@seen_as("filling positions and plans differ")
def plan_forgotten(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._stores.plans._copying.clear()


@seen_as("is filed under")
def plan_under_another_id(allocator: CpuOffloadingBlockAllocator) -> None:
    copying = allocator._stores.plans._copying
    copying[99] = copying.pop(next(iter(copying)))


@seen_as("are in several states")
def plan_in_two_states(allocator: CpuOffloadingBlockAllocator) -> None:
    plans = allocator._stores.plans
    plans._orphans.update(plans._copying)


@seen_as("1 cuts are yet to be listed, 0 to be taken away")
def cut_that_never_was(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._log.begin_cut()


@seen_as("policy offers <Node")
def pinned_candidate(allocator: CpuOffloadingBlockAllocator) -> None:
    allocator._policy.leave(_node_at(allocator, LONG[5]))
    allocator._policy.enter(_node_at(allocator, OTHER[0]))


@seen_as("is filed under")
def candidate_filed_wrongly(allocator: CpuOffloadingBlockAllocator) -> None:
    _node_at(allocator, LONG[5]).rank.rank = (100,)


@seen_as("6 full blocks of 3")
def full_blocks_without_hashes(allocator: CpuOffloadingBlockAllocator) -> None:
    chain = list(LONG)
    allocator.note_full("request", chain, 6)
    del chain[3:]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_is_seen(damage: Damage, message: str) -> None:
    allocator = CpuOffloadingBlockAllocator(17, record_events=True)
    allocator._tree._index.stride = 1
    for chain in (LONG, OTHER):
        plan = allocator.plan_store(chain, len(chain))
        assert plan is not None
        allocator.commit(plan)
    allocator.plan_store(FORK, len(FORK))
    allocator.pin(OTHER, 0, 4)
    allocator.check_invariants()
    damage(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check_invariants()


def _node_at(allocator: CpuOffloadingBlockAllocator, prefix_hash: bytes) -> Node:
    return allocator._tree._table.node(allocator._tree._index._ids[prefix_hash])
