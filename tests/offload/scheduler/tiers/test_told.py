"""What events tell of extents, where some end at checkpoints."""

from allocator import BagEvicted, BagStored, Evicted, Stored
from offload.scheduler.flow import ShortStored
from offload.scheduler.tiers.names import Path
from offload.scheduler.tiers.told import ToldExtents

PATH = Path([b"a", b"b", b"c", b"bag 0", b"bag 1"], stop=10, num_prefix=3, num_bag=6, end=b"end")
"""Extents of four positions: two whole ones and a short one, and a bag of two extents behind them."""


def test_a_checkpoint_is_told_with_the_last_extent_of_its_bag() -> None:
    told = ToldExtents(4)
    assert list(told.turned([Stored(PATH.names[:4], None, PATH)])) == [
        Stored([b"a", b"b"], None),
        ShortStored(2, b"c", b"b"),
    ]
    told.check_invariants()
    assert list(told.turned([Stored(PATH.names[4:], b"bag 0", PATH)])) == [BagStored(10, [b"end"])]
    told.check_invariants()
    assert list(told.turned([Evicted([b"bag 1", b"bag 0", b"c", b"b"])])) == [
        BagEvicted(b"end"),
        Evicted([b"c", b"b"]),
    ]
    told.check_invariants()
    assert list(told.turned([Stored([b"bag 0"], b"c", PATH)])) == []
