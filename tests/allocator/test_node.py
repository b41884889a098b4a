"""Segments that lose positions: names, slots, and what it costs."""

import tracemalloc

import numpy as np
import pytest

from allocator.node import Node

NUM_POSITIONS = 100_000
WIDTH = 32


def make_node(num_positions: int, *, grown: bool) -> Node:
    """A node of so many positions; ``grown``: half of them were appended later."""
    names = [position.to_bytes(WIDTH) for position in range(num_positions)]
    slots = np.arange(num_positions).reshape(-1, 1)
    first = num_positions // 2 if grown else num_positions
    node = Node(1, None, 0, b"".join(names[:first]), slots[:first].copy())
    if grown:
        node.extend(b"".join(names[first:]), slots[first:])
    return node


@pytest.mark.parametrize("grown", [False, True], ids=["whole", "grown"])
def test_bite_by_bite_it_loses_its_last_positions(grown: bool) -> None:
    node = make_node(100, grown=grown)
    while len(node):
        before = len(node)
        size = max(0, before - 7)
        removed = node.truncate(size)
        assert list(removed.hashes) == [position.to_bytes(WIDTH) for position in range(size, before)]
        assert removed.slots[:, 0].tolist() == list(range(size, before))
        assert node.hashes == [position.to_bytes(WIDTH) for position in range(size)]
        assert node.slots[:, 0].tolist() == list(range(size))


@pytest.mark.parametrize("grown", [False, True], ids=["whole", "grown"])
def test_a_bite_of_a_long_segment_copies_what_goes_only(grown: bool) -> None:
    node = make_node(NUM_POSITIONS, grown=grown)
    node.truncate(NUM_POSITIONS - 100)
    tracemalloc.start()
    try:
        for _ in range(50):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            node.truncate(len(node) - 100)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 10 * 100 * WIDTH, f"a bite of 100 took {peak - before} bytes"
    finally:
        tracemalloc.stop()
