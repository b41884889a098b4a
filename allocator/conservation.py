"""What must hold between tree, pool and plans. For tests: O(pool)."""

from collections.abc import Collection

import numpy as np

from allocator.bags import BagState
from allocator.in_flight import PlansInFlight
from allocator.node import Node
from allocator.prefix_tree import PrefixTree
from allocator.slot_pool import SlotPool, Slots, SlotState, flat


def check_conserved(tree: PrefixTree, pool: SlotPool, plans: PlansInFlight) -> None:
    """Every slot has one owner, and leaves end where somebody can go on."""
    check_slots(tree, pool, plans)
    check_leaves(tree)


def check_slots(tree: PrefixTree, pool: SlotPool, plans: PlansInFlight) -> None:
    """Every slot is free or has one owner, and is counted under the state that this owner says."""
    nodes = list(tree.nodes())
    resident = [flat(node.slots[: node.resident]) for node in (*nodes, *tree.dead_nodes())]
    filling = [flat(node.slots[node.resident :]) for node in nodes] + _bags(nodes, BagState.FILLING)
    filling += [flat(plan.slots) for plan in plans.wanted() if plan.claim is not None]
    bagged = _bags([*nodes, *tree.dead_nodes()], BagState.COMPLETE)
    orphaned = plans.orphaned_slots()
    owned = np.concatenate([*resident, *bagged, *filling, orphaned, pool.leaving()])
    assert len(np.unique(owned)) == len(owned), "a slot has two owners"
    num_withdrawn = pool.num_in(SlotState.WITHDRAWN)
    assert len(owned) + pool.num_free + num_withdrawn == pool.capacity, (
        f"{len(owned)} owned, {pool.num_free} free, {num_withdrawn} withdrawn: not {pool.capacity} in all"
    )
    assert not np.isin(pool.free(), owned).any(), "the free list holds slots that have an owner"
    num_resident, num_filling = pool.num_in(SlotState.RESIDENT), pool.num_in(SlotState.FILLING)
    assert sum(map(len, resident)) == num_resident, f"{num_resident} slots resident"
    assert sum(map(len, [*filling, orphaned])) == num_filling, f"{num_filling} slots filling"
    num_bagged = pool.num_in(SlotState.BAGGED)
    assert sum(map(len, bagged)) == num_bagged, f"{num_bagged} slots bagged"
    assert len(plans.wanted_slots()) == sum(map(len, filling)), "filling positions and plans differ"


def check_leaves(tree: PrefixTree) -> None:
    """What is behind the last checkpoint of a leaf is on its way, or read, or there is more to come.

    Unless something was cut off that is yet to be taken away: that is first.
    """
    if tree.has_checkpoints and not tree.has_dead:
        loose = [node for node in tree.nodes() if node.is_loose]
        assert not loose, f"{loose} do not end at a checkpoint"


def _bags(nodes: Collection[Node], state: BagState) -> list[Slots]:
    return [each.slots for node in nodes for each in node.bags or () if each.state is state]
