"""What must hold between tree, pool, pins and plans. For tests: O(pool)."""

from collections.abc import Collection

import numpy as np

from allocator.in_flight import PlansInFlight
from allocator.node import Pin, Place
from allocator.prefix_tree import PrefixTree
from allocator.slot_pool import SlotPool, SlotState, flat


def check_slots(tree: PrefixTree, pool: SlotPool, plans: PlansInFlight) -> None:
    """Every slot is free or has one owner, and is counted under the state that this owner says."""
    nodes = list(tree.nodes())
    resident = [flat(node.slots[: node.resident]) for node in (*nodes, *tree.dead_nodes())]
    filling = [flat(node.slots[node.resident :]) for node in nodes]
    orphaned = plans.orphaned_slots()
    owned = np.concatenate([*resident, *filling, orphaned, pool.leaving()])
    assert len(np.unique(owned)) == len(owned), "a slot has two owners"
    assert len(owned) + pool.num_free == pool.capacity, f"{len(owned)} owned, {pool.num_free} free"
    assert not np.isin(pool.free(), owned).any(), "the free list holds slots that have an owner"
    num_resident, num_filling = pool.num_in(SlotState.RESIDENT), pool.num_in(SlotState.FILLING)
    assert sum(map(len, resident)) == num_resident, f"{num_resident} slots resident"
    assert sum(map(len, [*filling, orphaned])) == num_filling, f"{num_filling} slots filling"
    assert len(plans.wanted_slots()) == sum(map(len, filling)), "filling positions and plans differ"


def check_pins(pins: Collection[Pin], tree: PrefixTree, pool: SlotPool) -> None:
    """No pinned slot is free; a pin's slots are those of its positions, which stay, or they are leaving."""
    hanging = {pin for node in (*tree.nodes(), *tree.dead_nodes()) for pin in node.pins}
    assert hanging == {pin for pin in pins if pin.node is not None}, "a pin hangs on the wrong node"
    free = pool.free()
    for pin in pins:
        taken = np.intersect1d(flat(pin.slots), free)
        assert not len(taken), f"slots {taken} are pinned and free"
        node, num_there = pin.node, 0
        if node is not None and node.end > pin.start:
            there = tree.slots_of(Place(node, node.end), pin.start)
            num_there = len(there)
            assert np.array_equal(pin.slots[:num_there], there), (
                f"a pin of {node!r} has slots of other positions"
            )
        gone = flat(pin.slots[num_there:])
        assert len(pool.leaving(gone)) == len(gone), f"a pin lost slots {gone}, and not all are leaving"
        assert pin.kept == num_there, f"a pin has kept {num_there} of its positions, not {pin.kept}"
