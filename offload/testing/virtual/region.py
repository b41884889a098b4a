"""Memory that outlives virtual engines: the product's own regions, in files that only this process sees."""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offload.messages import TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.tier import TierLimits, make_siblings
from offload.testing.media.inline import InlineRunner
from offload.vllm.lasting_pool import FETCH, PROBE, sibling_lanes_of
from offload.vllm.places import Place

if TYPE_CHECKING:
    from offload.testing.virtual.engine import VirtualEngine

_MEMORY = Path("/dev/shm")


class VirtualRegion:
    """A path for pools, and what a test has to know of them from one engine to the next.

    Attributes:
        num_lives: engines of a run that have it, one after the other.
        num_beside: engines of a run that have it at the same time.
        num_corrupted: bytes that were wrong when an engine ended.
    """

    def __init__(self, num_lives: int = 1, num_beside: int = 1) -> None:
        self.num_lives = num_lives
        self.num_beside = num_beside
        self.num_corrupted = 0
        self.path = Path(tempfile.mkdtemp(prefix="virtual-region-", dir=_MEMORY))
        """Of the configuration."""
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._corrupted: dict[Path, list[int]] = {}  # by region: offsets of bytes that were made wrong
        self._seen: list[VirtualEngine] = []

    def __repr__(self) -> str:
        return f"VirtualRegion(num_lives={self.num_lives}, num_beside={self.num_beside})"

    @property
    def is_disturbed(self) -> bool:
        """Whether something was done to what any engine has there."""
        num_faults = sum(copier.num_faults for engine in self._seen for copier in engine.copiers)
        return self.num_corrupted + num_faults + sum(engine.counts["rot"] for engine in self._seen) > 0

    def begin(self, engine: "VirtualEngine") -> None:
        """An engine has adopted what is there."""
        for rank in engine.ranks:
            assert rank.side is not None and rank.side._lasting is not None
            offsets = self._corrupted.get(rank.side._lasting.home.path, [])
            rank.copier.corrupted.extend(rank.pool_address + offset for offset in offsets)
        for before in self._seen:
            engine.audit.remember(before.audit)
        self._seen.append(engine)

    def end(self, engine: "VirtualEngine") -> None:
        """It is killed: whatever it has under way, nobody owns its regions any more."""
        settings = engine.settings
        lasting = []
        for rank in engine.ranks:
            assert rank.side is not None and rank.side._lasting is not None
            self._corrupted.pop(rank.side._lasting.home.path, None)
        for rank in engine.ranks:
            assert rank.side is not None and rank.side._lasting is not None
            address, nbytes = rank.pool_address, settings.cpu_slots * rank.slot_bytes
            offsets = [at - address for at in rank.copier.corrupted if 0 <= at - address < nbytes]
            self._corrupted.setdefault(rank.side._lasting.home.path, []).extend(offsets)  # ranks may share it
            self.num_corrupted += len(offsets)
            lasting.append(rank.side._lasting)
        for rank in engine.ranks:
            rank.close()
        for each in lasting:
            each.close()

    def close(self) -> None:
        """Nobody needs what is there any more."""
        self._seen = []
        self._remove()


def sibling_place(
    columns: int = 1,
    *,
    extent_bytes: int = 1,
    limits: TierLimits = TierLimits(least_tokens=1),  # noqa: B008
) -> Place:
    """Pools of siblings below that of a virtual engine, where everything happens at once.

    Extents are of one position, if ``extent_bytes`` does not say otherwise.
    """

    def make_flows(common: Common, facts: Sequence[TierFacts]) -> Below:
        return make_siblings(FETCH, PROBE, common, facts, limits, extent_bytes)

    return Place(make_flows, partial(sibling_lanes_of, columns, make_runner=InlineRunner))
