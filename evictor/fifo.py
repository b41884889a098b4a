"""First stored, first out."""

from collections.abc import Hashable, Sequence

from evictor.policy import L
from evictor.ranked import RankedPolicy


class FifoPolicy(RankedPolicy[L]):
    """The leaf whose tail was stored first loses it; being used changes nothing.

    FIFO over single blocks (Belady, 1966, "A study of replacement algorithms for a virtual-storage
    computer") would take a prefix before what continues it. Deviation: here a prefix counts as stored with
    the last of its continuations, so it goes right after these and never before them. All else is first in,
    first out.
    """

    def used(self, path: Sequence[L], chain: Sequence[Hashable], depth: int) -> None:
        """A use changes nothing."""

    def stored(self, node: L, keys: Sequence[Hashable], next_key: Hashable | None) -> None:
        self._rank(node, (next(self._clock),))
