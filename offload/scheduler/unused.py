"""How many of the GPU's blocks can be taken without a loss, as nothing has been in them."""

import numpy as np

from offload.messages import Ids
from offload.scheduler.engine import Engine


class Unused:
    """Free blocks that nothing has been in yet, or not since all were emptied.

    They are taken before all that something is in. But vLLM first gives out what was freed without a hash. As
    long as such a block is next, the count is as before, and too high by what was taken since.
    """

    def __init__(self, engine: Engine) -> None:
        """All are."""
        self._engine = engine
        self._num_unused = engine.num_blocks  # at most
        self._places: Ids = np.arange(engine.num_blocks)  # by id: in the order in which they are taken

    def count(self) -> int:
        """How many. Once something is lost with the next free block there are none. O(1)."""
        first = self._engine.next_unhashed
        num_behind = 0 if first is None else self._engine.num_blocks - int(self._places[first])
        self._num_unused = min(self._num_unused, num_behind)
        return self._num_unused

    def has_reset(self) -> None:
        """The engine may have emptied all blocks; then all that are free are unused. O(blocks)."""
        if self._engine.num_cached_blocks:
            return
        ids = self._engine.free_ids()
        self._num_unused = len(ids)
        self._places[ids] = np.arange(self._engine.num_blocks - len(ids), self._engine.num_blocks)

    def check_invariants(self) -> None:
        """It counts no more than all."""
        assert 0 <= self._num_unused <= self._engine.num_blocks, f"{self._num_unused} are unused"
