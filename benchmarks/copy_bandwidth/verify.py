"""Do the bytes arrive?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.copy_bandwidth.arena import Arena
from benchmarks.copy_bandwidth.devices import Device
from benchmarks.copy_bandwidth.moves import DIRECTIONS, Pattern, draw
from benchmarks.copy_bandwidth.ways import Way
from offload.messages import GPU_ROUTES, LOAD, STORE

__all__ = ["WrongBytesError", "verify"]

_MOST_BLOCKS = 32  # of fewer than 16 copies a kernel is not tried


class WrongBytesError(Exception):
    """A way of copying did not bring the bytes it was to bring; none of its times means anything."""


def verify(arena: Arena, device: Device, ways: Sequence[Way], rng: np.random.Generator) -> None:
    """Let every way copy a few blocks of random bytes in both directions at once, contiguous and scattered.

    Raises:
        WrongBytesError: a target differs from its source, or a source has changed.
    """
    num_blocks = min(_MOST_BLOCKS, arena.num_blocks // len(GPU_ROUTES))
    size = (num_blocks, arena.shape.num_pieces, arena.shape.piece_bytes)
    for way in ways:
        for pattern in Pattern:
            moves = draw(rng, pattern, DIRECTIONS["both"], num_blocks, arena.num_blocks)
            down, up = moves[STORE], moves[LOAD]
            stored, loaded = (torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for _ in range(2))
            arena.write_blocks(down.block_ids, stored)
            arena.write_slots(up.slots, loaded)
            arena.write_slots(down.slots, 0)
            arena.write_blocks(up.block_ids, 0)
            device.begin_turn()
            way.prepare(moves)()
            way.wait()
            for what, found, expected in (
                ("slots after a store", arena.read_slots(down.slots), stored),
                ("blocks after a load", arena.read_blocks(up.block_ids), loaded),
                ("blocks that were stored", arena.read_blocks(down.block_ids), stored),
                ("slots that were loaded", arena.read_slots(up.slots), loaded),
            ):
                wrong = (found != expected).flatten(1).any(1).nonzero().flatten().tolist()
                if wrong:
                    raise WrongBytesError(
                        f"{arena.shape.name}, {way.name}, {pattern}: wrong bytes in {len(wrong)} of "
                        f"{num_blocks} {what}, first in number {wrong[0]} of the transfer"
                    )
