"""The prefix tree beside a dict of single positions."""

from collections import Counter
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from allocator.node import Node, Pin, Place, Removed
from allocator.prefix_tree import PrefixTree
from tests.allocator.scenes import FORK, LONG, OTHER
from tests.models import PinModel, Position, TreeModel
from tests.strategies import chains, depths, thorough


class PrefixTreeMachine(RuleBasedStateMachine):
    """Slots are numbered as they come; nobody here gives them back."""

    seen: ClassVar[Counter[str]] = Counter()
    """How often each of the rarer situations came up, in all runs."""

    @initialize(columns=st.sampled_from([1, 2]), stride=st.sampled_from([1, 2, 3, 16]))
    def make(self, columns: int, stride: int) -> None:
        self.tree = PrefixTree(columns, stride)
        self.model = TreeModel()
        self.pins: list[tuple[Pin, PinModel]] = []
        self.slots = count()
        self.dead: list[dict[tuple[int, ...], Position]] = []

    # What changes the tree

    @rule(several=st.lists(chains(min_length=3), min_size=1, max_size=3))
    def append(self, several: list[list[bytes]]) -> None:
        for chain in several:
            place = self.tree.find(chain, len(chain))
            hashes = chain[place.depth :]
            if hashes:
                rows = [[next(self.slots) for _ in range(self.tree.columns)] for _ in hashes]
                slots = np.array(rows, dtype=np.int64)
                node = self.tree.append(self._end_segment_at(place), hashes, self.tree.packed(hashes), slots)
                assert node.end == len(chain)
                self.model.append(chain[: place.depth], hashes, rows)
                slots[:] = -1  # the tree keeps its own copy

    @precondition(lambda self: self._nodes_of_at_least(2))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """Changes nothing that can be seen: neither pinned nor filling positions move."""
        node = data.draw(st.sampled_from(self._nodes_of_at_least(2)))
        self._end_segment_at(Place(node, data.draw(st.integers(node.start + 1, node.end - 1))))

    @rule(chain=chains(min_length=3), share=st.floats(0, 1))
    def settle(self, chain: list[bytes], share: float) -> None:
        start, stop = len(self.model.resident(chain)), len(self.model.known(chain))
        stop = start + round(share * (stop - start))
        if start >= stop:
            return
        last = self._node_at(chain, stop - 1)
        assert last is not None
        assert chain[stop - 1] in last.hashes
        self.tree.settle(last, start, stop)
        for position in self.model.known(chain)[:stop]:
            position.resident = True

    @precondition(lambda self: self._unpinned_leaves())
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        leaf = data.draw(st.sampled_from(self._unpinned_leaves()))
        num_positions = data.draw(st.integers(1, len(leaf)))
        hashes = leaf.hashes[-num_positions:]
        removed = self.tree.trim(leaf, num_positions)
        assert list(removed.hashes) == hashes
        self._agree_on_removed([removed], [self.model.positions[each] for each in hashes])
        assert (leaf.parent is None) == (not leaf.hashes)

    @precondition(lambda self: any(map(self._may_join, self.tree.nodes())))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """Changes nothing that can be seen."""
        path = [
            data.draw(st.sampled_from([each for each in self._nodes_of_at_least(1) if self._may_join(each)]))
        ]
        while (parent := path[-1].parent) is not None and self._may_join(path[-1]):
            path.append(parent)
            self.seen["join of three or more"] += len(path) > 2
            if not data.draw(st.booleans()):
                break
        self.join_path(path)

    def join_path(self, path: list[Node]) -> None:
        num_positions, last, start = sum(map(len, path)), path[0], path[-1].start
        self.seen["join of a segment with children"] += bool(last.child)
        self.seen["join of a pinned segment"] += bool(last.pins)
        self.seen["join of a segment that is filling"] += last.resident < len(last)
        node = self.tree.join(path)
        self.seen["join into the first"] += node is path[-1]
        self.seen["join into the last"] += node is last
        assert (node.start, len(node)) == (start, num_positions)

    @precondition(lambda self: self.model.positions)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        self.cut_from(self._draw_path(data))

    def cut_from(self, path: list[Position]) -> None:
        """The last of ``path`` and what comes after it is unknown from now on."""
        chain = [position.prefix_hash for position in path]
        node = self._node_at(chain, len(chain) - 1)
        assert node is not None
        if node.start < len(chain) - 1:
            self._end_segment_at(Place(node, len(chain) - 1))
            node = self._node_at(chain, len(chain) - 1)
            assert node is not None
        self._kill(node, self.model.from_on(chain[-1]))

    def _kill(self, node: Node, gone: list[Position]) -> None:
        self.seen["cut above what was cut off"] += any(
            each.is_dead
            for below in (node, *self.tree._table.below(node))
            for each in self.tree.children(below)
        )
        self.tree.kill(node)
        self.dead.append({each.slots: each for each in gone})
        self.model.remove(gone)

    @precondition(lambda self: self.tree.has_dead)
    @rule(num_positions=st.integers(1, 4), num_bites=st.integers(1, 4))
    def take_away(self, num_positions: int, num_bites: int) -> None:
        """Each position that was cut off goes once, in the order of the cuts, and nothing else."""
        for _ in range(num_bites):
            node = self.tree.next_dead()
            if node is None:
                assert not any(self.dead)
                return
            num_cuts = self.tree.num_cuts
            assert not any(self.dead[:-num_cuts]), "a later cut is taken away before an earlier one"
            removed = self.tree.trim(node, num_positions)
            for prefix_hash, row in zip(removed.hashes, map(tuple, removed.slots.tolist()), strict=True):
                position = self.dead[-num_cuts].pop(row)
                assert position.prefix_hash == prefix_hash
                self.seen["taken away what is known again"] += prefix_hash in self.model.positions

    @precondition(lambda self: self.pins)
    @rule(really=st.booleans())
    def cut_all(self, really: bool) -> None:
        if really:
            self._kill(self.tree.root, list(self.model.positions.values()))
            assert not list(self.tree.nodes())

    @precondition(lambda self: self.model.positions)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pin_path(self._draw_path(data))

    def pin_path(self, path: list[Position]) -> None:
        chain = [position.prefix_hash for position in path]
        place = self.tree.find(chain, len(chain))
        pin = Pin(self._end_segment_at(place).node, self.tree.slots_of(place, 0))
        self.pins.append((pin, PinModel(path, set())))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        if pin.node is not None:
            pin.node.pins -= {pin}

    # What only asks

    @rule(chain=chains(), stop=depths(), start=depths())
    def ask(self, chain: list[bytes], stop: int, start: int) -> None:
        stop = min(stop, len(chain))
        place = self.tree.find(chain, stop)
        resident = self.tree.resident_part(place)
        assert place.depth == len(self.model.known(chain[:stop]))
        assert resident.depth == len(self.model.resident(chain[:stop]))
        for each in (place, resident):
            assert self.tree.slots_of(each, start).tolist() == self.model.rows(chain, start, each.depth)
        for position, prefix_hash in enumerate(chain):
            known = self.model.positions.get(prefix_hash)
            node = self._node_at(chain, position)
            assert (node is not None) == (known is not None)
            if node is not None and known is not None:
                assert node.hashes[position - node.start] == prefix_hash
                assert (position < node.start + node.resident) == known.resident

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        slots: dict[bytes, tuple[int, ...]] = {}
        for node in self.tree.nodes():
            slots.update(zip(node.hashes, map(tuple, node.slots.tolist()), strict=True))
            for prefix_hash, is_resident in zip(node.hashes, _flags(node), strict=True):
                assert self.model.positions[prefix_hash].resident == is_resident
        assert slots == {each.prefix_hash: each.slots for each in self.model.positions.values()}

    @invariant()
    def pins_hold_what_is_left(self) -> None:
        """A pinned segment ends where the pin's promise ends, and a dropped pin has none."""
        known = set(self.model.positions.values())
        for pin, model in self.pins:
            kept = [position for position in model.path if position in known]
            self.seen["pin lost a part"] += 0 < len(kept) < len(model.path)
            self.seen["pin lost all"] += not kept
            if self.tree.has_dead:
                continue  # it may keep more than it has to
            assert (pin.node is None) == (not kept)
            if pin.node is not None:
                assert pin in pin.node.pins
                assert pin.node.end == len(kept)
                assert pin.node.hashes[-1] == kept[-1].prefix_hash

    # Helpers

    def _node_at(self, chain: list[bytes], position: int) -> Node | None:
        """As a caller that remembers no more of the chain than it must."""
        start = max(0, position - 2)
        return self.tree.node_at(chain[start:], start, position, self.tree.lead(chain, start))

    def _end_segment_at(self, place: Place) -> Place:
        if place.depth == place.node.end:
            return place
        inside = place.depth - place.node.start
        self.seen["split of a pinned segment"] += bool(place.node.pins)
        self.seen["split before filling positions"] += inside == place.node.resident
        self.seen["split inside filling positions"] += place.node.resident < inside
        self.seen["split of a segment with children"] += bool(place.node.child)
        new = self.tree.split(place)
        self.seen["split off the head"] += new.end == place.depth
        self.seen["split off the tail"] += new.end > place.depth
        node = new if new.end == place.depth else place.node
        assert node.end == place.depth
        return Place(node, place.depth)

    def _may_join(self, node: Node) -> bool:
        """With its parent."""
        parent = node.parent
        return parent is not None and len(parent) > 0 and not parent.pins and self.tree.is_only_child(node)

    def _draw_path(self, data: st.DataObject) -> list[Position]:
        known = self.model.positions.values()
        in_order = sorted(known, key=lambda position: (len(position.path), position.prefix_hash))
        return data.draw(st.sampled_from(in_order)).path

    def _nodes_of_at_least(self, num_positions: int) -> list[Node]:
        """In an order that is the same in every run."""
        nodes = [node for node in self.tree.nodes() if len(node) >= num_positions]
        return sorted(nodes, key=lambda node: (node.start, node.hashes))

    def _unpinned_leaves(self) -> list[Node]:
        return [node for node in self._nodes_of_at_least(1) if not node.child and not node.pins]

    def _agree_on_removed(self, removed: list[Removed], gone: list[Position]) -> None:
        seen: dict[bytes, tuple[bool, tuple[int, ...]]] = {}
        for part in removed:
            flags = [position < part.resident for position in range(len(part.hashes))]
            rows = map(tuple, part.slots.tolist())
            seen.update(zip(part.hashes, zip(flags, rows, strict=True), strict=True))
        assert seen == {position.prefix_hash: (position.resident, position.slots) for position in gone}
        self.model.remove(gone)


def _flags(node: Node) -> list[bool]:
    return [position < node.resident for position in range(len(node))]


def test_the_tree_does_what_its_model_does() -> None:
    run_state_machine_as_test(PrefixTreeMachine, settings=thorough(300))


SITUATIONS = {
    "cut above what was cut off",
    "join into the first",
    "join into the last",
    "join of a pinned segment",
    "join of a segment that is filling",
    "join of a segment with children",
    "join of three or more",
    "pin lost a part",
    "pin lost all",
    "split before filling positions",
    "split inside filling positions",
    "split of a pinned segment",
    "split of a segment with children",
    "split off the head",
    "split off the tail",
    "taken away what is known again",
}


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_rare_situations(columns: int, stride: int) -> None:
    """What the machine may or may not meet, met for certain."""
    machine = type("Machine", (PrefixTreeMachine,), {"seen": Counter()})()
    machine.make(columns, stride)

    def agree() -> None:
        machine.agrees()
        machine.pins_hold_what_is_left()

    def split(chain: list[bytes], *depths: int) -> None:
        for depth in depths:
            place = machine.tree.find(chain, depth)
            assert place.depth == depth
            machine._end_segment_at(place)
            agree()

    def join(chain: list[bytes], depth: int) -> None:
        """All from the node that ends there up to the start of its chain."""
        node = machine.tree.find(chain, depth).node
        path = machine.tree.path(node)
        machine.seen["join of three or more"] += len(path) > 2
        machine.join_path(path)
        agree()

    machine.append([LONG])
    machine.settle(LONG, share=0.5)
    split(LONG, 3, 5)  # before what is filling; inside it, nearer to the tail
    join(LONG, 6)
    split(LONG, 2)  # nearer to the head
    join(LONG, 6)
    split(LONG, 4)
    join(LONG, 6)
    split(LONG, 3)
    machine.append([FORK])
    split(LONG, 1)  # the other half has children
    join(LONG, 3)
    machine.append([OTHER])
    machine.settle(OTHER, share=1)
    machine.pin_path(machine.model.known(OTHER))
    split(OTHER, 3, 1)
    join(OTHER, 4)
    split(OTHER, 3, 1)
    for depth in (2, 1):
        machine.cut_from(machine.model.known(OTHER)[:depth])
        agree()
    machine.append([OTHER])
    agree()
    while machine.tree.has_dead:
        machine.take_away(num_positions=2, num_bites=1)
        agree()
    assert {situation for situation, times in machine.seen.items() if times} == SITUATIONS


def test_append_needs_the_end_of_a_segment() -> None:
    tree = PrefixTree()
    node = tree.append(Place(tree.root, 0), [b"a", b"b"], b"ab", np.array([[0], [1]], dtype=np.int64))
    with pytest.raises(AssertionError, match="split first"):
        tree.append(Place(node, 1), [b"c"], b"c", np.array([[2]], dtype=np.int64))
