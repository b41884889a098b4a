"""What the pool has for a request, and which slots go into which of its blocks."""

import logging

import numpy as np

from offload.messages import Ids
from offload.scheduler import amounts
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.groups import GpuBlocks

logger = logging.getLogger(__name__)


class Hits:
    """Looks into the pool for requests. It has no state of its own."""

    def __init__(self, common: Common) -> None:
        self._allocator = common.allocator
        self._engine = common.engine
        self._groups = common.engine.groups
        self._block_size = common.block_size

    def num_tokens(self, request: Request, num_local: int, most: int | None, coming: int = 0) -> int:
        """Tokens that can be restored behind the ``num_local`` leading tokens that the GPU has, perhaps 0.

        Args:
            request: who asks.
            num_local: leading tokens that the GPU has.
            most: that the request allows; None: it does not say.
            coming: leading positions that are resident or on their way; 0: only what is resident counts.
        """
        if self._groups.has_bags:
            return self._tokens_to_checkpoint(request, num_local, most, coming)
        drafts, size, columns = self._engine.drafts, self._block_size, self._groups.columns
        chain = self._engine.chain(request)
        depth = amounts.restorable_blocks(
            coming or self._allocator.usable_depth(chain, len(chain), num_local // size),
            self._engine.num_blocks // columns,
            drafts.num_volatile_blocks,
            drafts.step_blocks(size),
        )
        return amounts.loadable_tokens(depth, num_local, request.num_tokens, size, most)

    def retain_known(self, request: Request, beyond: int) -> None:
        """Have the GPU stop, and keep a checkpoint, where the request leaves what the pool knows.

        Nobody can go on there yet, as no other chain ended there. If that is not behind position ``beyond``,
        it has a checkpoint already. O(log n).
        """
        last = (request.num_tokens - 1) // self._block_size
        known = self._allocator.known_depth(self._engine.chain(request), last)
        if known > beyond:
            self._engine.retain(request, known * self._block_size)

    def pairs(self, held: Ids, bag: Ids | None, request_id: str, positions: range) -> tuple[Ids, Ids, bool]:
        """Which slot goes into which block: those of these positions, then what the request lacks of the bag.

        Args:
            held: slots of the positions, ``int64[positions, columns]``.
            bag: slots of the bag behind them, ``int64[num_bag]``; None without one.
            request_id: who has the blocks.
            positions: of the chain.

        Returns:
            Slots, blocks, and whether every block that the request computes with gets a slot. If not, none of
            them may be used.
        """
        tables = self._engine.tables(request_id)
        slots, fits = [held.reshape(-1)], True
        block_ids = [self._engine.ids(self._groups.prefix(tables, positions))]
        if bag is None:
            return slots[0], block_ids[0], fits
        for table, num_holes, entries in self._groups.missing(tables, positions.start, positions.stop):
            holes, blocks = table[:num_holes], table[num_holes:]
            ids = self._engine.ids(blocks)
            if len(ids) != len(entries) or not ids.all() or not self._are_holes(holes):
                logger.error("a restore fails: table %s, %d holes, entries %s", table, num_holes, entries)
                fits = False
            else:
                block_ids.append(ids)
                slots.append(bag[entries.start : entries.stop])
        return np.concatenate(slots), np.concatenate(block_ids), fits

    def _are_holes(self, blocks: GpuBlocks) -> bool:
        """Whether there is no block among these. There may be as many as positions, so it loops in C."""
        return not blocks or (
            not self._engine.ids(blocks[:1]).any() and blocks.count(blocks[0]) == len(blocks)
        )

    def _tokens_to_checkpoint(
        self, request: Request, num_local: int, most: int | None, coming: int = 0
    ) -> int:
        """As ``num_tokens``, up to a checkpoint. Where there is none, one is made if others come this way.

        One token at least is left to compute: what windows and states need at the end of a prompt is gone
        when its last token is computed once more.
        """
        groups, size, chain = self._groups, self._block_size, self._engine.chain(request)
        first, limit = num_local // size, (request.num_tokens - 1) // size
        num_step_blocks = self._engine.drafts.step_blocks(size)
        room = self._engine.num_blocks - 1 - num_step_blocks - groups.bag_slots
        limit = min(limit, room // groups.columns if groups.columns else limit)
        if most is not None:
            limit = min(limit, first + most // size)
        depth = 0
        if limit > first and room >= 0:
            depth = coming if first < coming <= limit else 0
            depth = depth or self._allocator.usable_depth(chain, limit, first)
        if not depth:
            self.retain_known(request, first)
            return 0
        return depth * size - num_local
