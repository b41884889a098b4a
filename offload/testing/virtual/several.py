"""Several tiers below a virtual engine, in one order."""

from collections import Counter
from collections.abc import Mapping

from offload.testing.virtual.tier import VirtualTier
from offload.vllm.places import Place


class VirtualTiers:
    """What a run has to know of a tier, of all of them together.

    Attributes:
        tiers: by name, in the order in which they are asked.
    """

    def __init__(self, tiers: Mapping[str, VirtualTier]) -> None:
        """One at least."""
        self.tiers = tiers

    def __repr__(self) -> str:
        return f"VirtualTiers({self.tiers})"

    @property
    def num_lives(self) -> int:
        """Engines of a run that have them, one after the other."""
        return max(tier.num_lives for tier in self.tiers.values())

    @property
    def num_faults(self) -> int:
        """That were chosen so far, for any of them."""
        return sum(tier.num_faults for tier in self.tiers.values())

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is put below the pool of one engine; for the next one, ask again."""
        return tuple(place for tier in self.tiers.values() for place in tier.places)

    def note_corrupted(self, corrupted: Mapping[int, list[int]]) -> None:
        """Bytes that media make wrong are to be noted there, by the pool's address on a rank."""
        for tier in self.tiers.values():
            tier.note_corrupted(corrupted)

    @property
    def moved(self) -> Counter[str]:
        """Extents that are good, by tier and what was done to them for this engine."""
        return Counter(
            {
                f"{what} ({name})": count
                for name, tier in self.tiers.items()
                for what, count in tier.moved.items()
            }
        )
