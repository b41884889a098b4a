"""Finds the restore that brings a block, by prefix hash."""

from collections.abc import Collection, Sequence

from offload.scheduler.restore import Restore

STRIDE = 16
"""Chain positions between two marks of a restore."""


class RestoreIndex:
    """Restores in flight, by prefix hashes of blocks they bring.

    A restore is marked at its first block and at every position that ``STRIDE`` divides. So adding one costs
    little beside its copy. A question takes ``STRIDE`` lookups at most, however many restores there are.
    Restores seldom bring the same block, because one waits for the other. Where they do, the marks they share
    are those of the later one.
    """

    def __init__(self) -> None:
        self._by_mark: dict[bytes, Restore] = {}

    def add(self, restore: Restore) -> None:
        """Find ``restore`` from now on. O(blocks / STRIDE)."""
        self._by_mark.update(dict.fromkeys(_marks(restore), restore))

    def remove(self, restore: Restore) -> None:
        """Find it no longer; nothing if it is not here. O(blocks / STRIDE)."""
        for mark in _marks(restore):
            if self._by_mark.get(mark) is restore:
                del self._by_mark[mark]

    def find(self, chain: Sequence[bytes], position: int) -> Restore | None:
        """The restore that brings the block of ``chain`` at ``position``; None if none does. O(STRIDE)."""
        by_mark = self._by_mark
        if not by_mark or position >= len(chain):
            return None
        restore = by_mark.get(chain[position])
        if restore is not None:  # a mark is the hash of a block that it brings
            return restore
        for at in range(position - 1, position - position % STRIDE - 1, -1):
            restore = by_mark.get(chain[at])
            if restore is not None and restore.brings(chain, position):
                return restore
        return None

    def check_invariants(self, restores: Collection[Restore]) -> None:
        """Every mark is of one of these restores."""
        for mark, restore in self._by_mark.items():
            assert any(restore is each for each in restores), f"a mark of {restore}, which has ended"
            assert mark in _marks(restore), f"{mark!r} is no mark of {restore}"


def _marks(restore: Restore) -> list[bytes]:
    chain, first = restore.chain, restore.first
    return [chain[first], *chain[first + -first % STRIDE :: STRIDE]]
