"""Groups of layers whose KV is kept alike, as hybrid models have them, and models made of them by name.

All groups share one pool of equally large GPU blocks: a block belongs to one group at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

CELL_BYTES = 16
"""Bytes of one token position of one layer, or of its state: two words, see ``tags``."""

FULL, WINDOW, CHUNK, STATE = "full", "window", "chunk", "state"

_STATE_BLOCKS = 4
"""That a request holds at once: the state it writes, the one before, that of a junction, and a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of one kind.

    Attributes:
        kind: "full" attention; a sliding "window"; attention within a "chunk"; or a "state": Mamba, as vLLM
            keeps it in its mode "align".
        block_size: tokens that a rank holds of a block; of a state: tokens between two that are kept.
        reach: tokens of the window or chunk.
        num_layers: on each rank; 0: as many as the engine's settings say.
        has_checkpoints: the last step of a prompt also keeps the state at the last block boundary before its
            end (Mamba2).
    """

    kind: str = FULL
    block_size: int = 4
    reach: int = 0
    num_layers: int = 0
    has_checkpoints: bool = False

    def __post_init__(self) -> None:
        """Refuse what no group can be."""
        if self.kind not in (FULL, WINDOW, CHUNK, STATE):
            raise ValueError(f"kind={self.kind!r}: must be one of {FULL}, {WINDOW}, {CHUNK}, {STATE}")
        if (self.reach > 0) != (self.kind in (WINDOW, CHUNK)):
            raise ValueError(f"reach={self.reach} and kind={self.kind!r} do not go together")

    @property
    def page_bytes(self) -> int:
        """Bytes of a layer's part of a block, at least; vLLM makes blocks so large that a state fits in."""
        return CELL_BYTES * self.block_size

    @property
    def places(self) -> int:
        """Cells of a layer in a block."""
        return 1 if self.kind == STATE else self.block_size

    def first_read(self, start: int) -> int:
        """The first token position of which anything is read to compute from token ``start`` on."""
        match self.kind:
            case "window":
                return max(0, start - self.reach + 1)
            case "chunk":
                return start // self.reach * self.reach
            case "state":
                return max(0, start - 1)
            case _:
                return 0

    def blocks_for(self, num_tokens: int, dcp: int, in_flight: int) -> int:
        """Blocks that a request of so many tokens holds at most, with ``in_flight`` of them scheduled."""
        every = math.ceil(num_tokens / self.tokens_of_block(dcp))
        match self.kind:
            case "window":
                return min(every, math.ceil((self.reach - 1 + in_flight) / self.block_size) + 1)
            case "chunk":
                return min(every, math.ceil((self.reach + in_flight) / self.block_size) + 1)
            case "state":
                return min(every, _STATE_BLOCKS)
            case _:
                return every

    def tokens_of_block(self, dcp: int) -> int:
        """Tokens of a block on all ranks together; only full attention shares them out."""
        return self.block_size * (dcp if self.kind == FULL else 1)

    def spec(self, page_bytes: int) -> KVCacheSpec:
        """As vLLM says it, with pages of so many bytes."""
        if self.kind == STATE:
            return MambaSpec(
                block_size=self.block_size,
                shapes=((1,), (1,)),
                dtypes=(torch.int64, torch.int64),
                page_size_padded=page_bytes,
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=int(self.has_checkpoints),
                prefill_checkpoint_alignment=1 if self.has_checkpoints else None,
            )
        common = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": CELL_BYTES // 8,
            "dtype": torch.float32,
            "page_size_padded": page_bytes if page_bytes != self.page_bytes else None,
        }
        match self.kind:
            case "window":
                return SlidingWindowSpec(sliding_window=self.reach, **common)
            case "chunk":
                return ChunkedLocalAttentionSpec(attention_chunk_size=self.reach, **common)
            case _:
                return FullAttentionSpec(**common)


MODELS: Mapping[str, tuple[Group, ...]] = {
    "plain": (Group(),),
    "columns": (Group(block_size=8), Group(num_layers=1), Group()),
    "window": (Group(), Group(kind=WINDOW, reach=10)),
    "windows": (Group(kind=WINDOW, reach=9), Group(kind=WINDOW, reach=14)),
    "chunked": (Group(), Group(kind=CHUNK, reach=16), Group(kind=CHUNK, reach=16, num_layers=1)),
    "mamba": (Group(block_size=8), Group(kind=STATE, block_size=8), Group(kind=STATE, block_size=8)),
    "mamba2": (Group(block_size=8), Group(kind=STATE, block_size=8, has_checkpoints=True)),
    "states": (Group(kind=STATE, block_size=8),),
    "mixed": (
        Group(block_size=8),
        Group(kind=WINDOW, reach=10),
        Group(kind=WINDOW, reach=21, block_size=8, num_layers=1),
    ),
    "mamba_window": (Group(), Group(kind=WINDOW, reach=10), Group(kind=STATE)),
}
"""Groups of models by name, for ``VirtualSettings``. "windows" and "states" have no full attention."""
