"""Where the bytes of a block lie on the GPU and in the pool, and the copies that follow from it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from offload.messages import Ids


class Region(NamedTuple):
    """One piece of every GPU block, at a fixed stride.

    Attributes:
        address: of the piece of block 0.
        block_stride: bytes from one block's piece to the next block's.
        piece_bytes: size of the piece.
    """

    address: int
    block_stride: int
    piece_bytes: int


class CopyBatch(NamedTuple):
    """Copies to make: ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]``; all ``int64[n]``."""

    sources: Ids
    targets: Ids
    sizes: Ids


class BlockLayout:
    """Addresses of blocks and slots.

    A slot holds all pieces of a block one after the other. With one region per block (the engine laid it out
    block-outermost) neighbouring blocks that go to neighbouring slots merge into one copy. Otherwise there is
    one copy per block and region, block by block. So a batch that stops half way has copied a known number of
    leading blocks.
    """

    def __init__(
        self, regions: Sequence[Region], pool_address: int, *, slots_per_registration: int | None = None
    ) -> None:
        """Describe a layout.

        Args:
            regions: the pieces of a block, in the order they take within a slot.
            pool_address: of slot 0.
            slots_per_registration: pinned memory is registered in pieces of that many slots, and no
                copy may span two; None when it is one piece.
        """
        sizes = np.array([region.piece_bytes for region in regions], dtype=np.int64)
        self.slot_bytes = int(sizes.sum())
        self._sizes = sizes
        self._gpu = np.array([region.address for region in regions], dtype=np.int64)
        self._strides = np.array([region.block_stride for region in regions], dtype=np.int64)
        self._pool = pool_address + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._fence = slots_per_registration
        self._mergeable = len(regions) == 1 and regions[0].block_stride == regions[0].piece_bytes

    @property
    def piece_sizes(self) -> list[int]:
        """Bytes of each piece of a block, before neighbours merge."""
        sizes: list[int] = self._sizes.tolist()
        return sizes

    def store(self, block_ids: Ids, slots: Ids) -> CopyBatch:
        """Copies that bring GPU blocks down into slots."""
        gpu, pool, sizes = self._pieces(block_ids, slots)
        return CopyBatch(gpu, pool, sizes)

    def load(self, slots: Ids, block_ids: Ids) -> CopyBatch:
        """Copies that bring slots up into GPU blocks."""
        gpu, pool, sizes = self._pieces(block_ids, slots)
        return CopyBatch(pool, gpu, sizes)

    def block_pieces(self, block_ids: Ids) -> tuple[Ids, list[int]]:
        """Addresses ``int64[n, regions]`` of these GPU blocks' pieces, and the pieces' sizes in bytes."""
        return self._gpu + block_ids[:, None] * self._strides, self.piece_sizes

    def slot_pieces(self, slots: Ids) -> tuple[Ids, list[int]]:
        """The same for slots, which are one piece each."""
        return self._pool[:1] + slots[:, None] * self.slot_bytes, [self.slot_bytes]

    def whole_blocks(self, batch: CopyBatch, num_copies: int) -> int:
        """How many leading blocks the first ``num_copies`` copies of a batch complete."""
        return int(batch.sizes[:num_copies].sum()) // self.slot_bytes

    def _pieces(self, block_ids: Ids, slots: Ids) -> tuple[Ids, Ids, Ids]:
        if not self._mergeable:
            gpu = self._gpu + block_ids[:, None] * self._strides
            pool = self._pool + slots[:, None] * self.slot_bytes
            return gpu.ravel(), pool.ravel(), np.tile(self._sizes, len(block_ids))
        breaks = (np.diff(block_ids) != 1) | (np.diff(slots) != 1)
        if self._fence is not None:
            breaks |= np.diff(slots // self._fence) != 0
        first = (
            np.flatnonzero(np.concatenate([[True], breaks])) if len(slots) else np.empty(0, dtype=np.int64)
        )
        lengths = np.diff(np.append(first, len(slots)))
        gpu = self._gpu[0] + block_ids[first] * self._strides[0]
        pool = self._pool[0] + slots[first] * self.slot_bytes
        return gpu, pool, lengths * self.slot_bytes
