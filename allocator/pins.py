"""Promises to loads: which slots stay what they are until a load has read them."""

from collections.abc import Iterator, Sequence

import numpy as np

from allocator.bags import BagState
from allocator.errors import ChainError, StalePlanError
from allocator.node import NO_PINS, Node, Pin, Place
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.room import Room
from allocator.slot_pool import SlotPool, flat
from evictor import EvictionPolicy


class Pins:
    """Makes and ends pins, and knows those that have not ended."""

    def __init__(
        self, tree: PrefixTree, ranking: Ranking, pool: SlotPool, policy: EvictionPolicy[Node], room: Room
    ) -> None:
        """Nothing is promised."""
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._policy = policy
        self._room = room
        self._pins: set[Pin] = set()

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def make(self, chain: Sequence[bytes], start: int, stop: int) -> Pin:
        """See ``CpuOffloadingBlockAllocator.pin``."""
        place = self._tree.slotted_part(self._tree.find(chain, stop), start)
        if place.depth != stop or not 0 <= start < stop:
            raise ChainError(
                f"cannot pin positions {start} to {stop}: {place.depth} are resident; look the chain up first"
            )
        checkpoint = self._tree.last_checkpoint(place, stop - 1) if self._tree.has_checkpoints else None
        if checkpoint is None and self._tree.has_checkpoints:
            raise ChainError(f"cannot pin positions {start} to {stop}: there is no checkpoint at {stop}")
        node = self._ranking.node_ending_at(place)
        pin = Pin(node, self._tree.slots_of(place, start), checkpoint)
        self._pins.add(pin)
        self._policy.leave(node)
        if self._ranking.loose:
            self._room.trim_loose()
        return pin

    def end(self, pin: Pin) -> None:
        """See ``CpuOffloadingBlockAllocator.unpin``."""
        if pin not in self._pins:
            raise StalePlanError("this pin was ended before, or belongs to another allocator")
        self._pins.remove(pin)
        if pin.node is not None:
            pin.node.pins = pin.node.pins - {pin} or NO_PINS
            self._ranking.refresh(pin.node)
        if pin.kept < len(pin.slots):
            self._pool.end_read(flat(pin.slots[pin.kept :]))
        if pin.checkpoint is not None and pin.checkpoint.state is BagState.GONE:
            self._pool.end_read(pin.checkpoint.slots)
        if self._ranking.loose:
            self._room.trim_loose()

    def check_invariants(self) -> None:
        """No pinned slot is free; a pin's slots are those of its positions, which stay, or they are leaving.

        The slots of its bag likewise.
        """
        tree = self._tree
        hanging = {pin for node in (*tree.nodes(), *tree.dead_nodes()) for pin in node.pins if len(pin.slots)}
        assert hanging == {pin for pin in self if pin.node is not None}, "a pin hangs on the wrong node"
        for pin in self:
            self._check_slots(pin)
            self._check_bag(pin)

    # Private

    def _check_slots(self, pin: Pin) -> None:
        taken = np.intersect1d(flat(pin.slots), self._pool.free())
        assert not len(taken), f"slots {taken} are pinned and free"
        node, num_there = pin.node, 0
        if node is not None and node.end > pin.start:
            there = self._tree.slots_of(Place(node, node.end), pin.start)
            num_there = len(there)
            assert np.array_equal(pin.slots[:num_there], there), (
                f"a pin of {node!r} has slots of other positions"
            )
        gone = flat(pin.slots[num_there:])
        are_leaving = len(self._pool.leaving(gone)) == len(gone)
        assert are_leaving, f"a pin lost slots {gone}, and not all are leaving"
        assert pin.kept == num_there, f"a pin has kept {num_there} of its positions, not {pin.kept}"

    def _check_bag(self, pin: Pin) -> None:
        checkpoint, node = pin.checkpoint, pin.node
        if checkpoint is None:
            return
        slots = checkpoint.slots
        taken = np.intersect1d(slots, self._pool.free())
        assert not len(taken), f"slots {taken} of a pinned bag are free"
        if checkpoint.state is BagState.GONE:
            are_leaving = len(self._pool.leaving(slots)) == len(slots)
            assert are_leaving, f"a pin lost the bag {slots}, and not all of it is leaving"
            return
        hangs = node is not None and node.bags is not None and node.bags.at(node.end) is checkpoint
        assert hangs, f"{checkpoint!r} is pinned at the end of {node!r}, and does not hang there"
