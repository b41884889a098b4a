"""Memory that outlives virtual engines: the product's own regions, in files that only this process sees."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.testing.virtual.engine import VirtualEngine

_MEMORY = Path("/dev/shm")


class VirtualRegion:
    """A path for pools, and what a test has to know of them from one engine to the next.

    Attributes:
        num_lives: engines of a run that have it, one after the other.
        num_corrupted: bytes that were wrong when an engine ended.
    """

    def __init__(self, num_lives: int = 1) -> None:
        self.num_lives = num_lives
        self.num_corrupted = 0
        self.path = Path(tempfile.mkdtemp(prefix="virtual-region-", dir=_MEMORY))
        """Of the configuration."""
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._corrupted: dict[int, list[int]] = {}  # by rank: offsets of bytes that were made wrong
        self._before: VirtualEngine | None = None

    def __repr__(self) -> str:
        return f"VirtualRegion(num_lives={self.num_lives})"

    def begin(self, engine: "VirtualEngine") -> None:
        """An engine has adopted what is there."""
        for index, rank in enumerate(engine.ranks):
            offsets = self._corrupted.get(index, [])
            rank.copier.corrupted.extend(rank.pool_address + offset for offset in offsets)
        if self._before is not None:
            engine.audit.remember(self._before.audit)
        self._before = engine

    def end(self, engine: "VirtualEngine") -> None:
        """It is killed: whatever it has under way, nobody owns its regions any more."""
        settings = engine.settings
        lasting = []
        for index, rank in enumerate(engine.ranks):
            assert rank.side is not None
            address, nbytes = rank.pool_address, settings.cpu_slots * rank.slot_bytes
            offsets = [at - address for at in rank.copier.corrupted if 0 <= at - address < nbytes]
            self._corrupted[index] = offsets
            self.num_corrupted += len(offsets)
            lasting.append(rank.side._lasting)
        for rank in engine.ranks:
            rank.close()
        for each in lasting:
            if each is not None:
                each.close()

    def close(self) -> None:
        """Nobody needs what is there any more."""
        self._before = None
        self._remove()
