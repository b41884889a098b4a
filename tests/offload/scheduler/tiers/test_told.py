"""What events tell of extents, where some end at checkpoints."""

from allocator import BagEvicted, BagStored, Evicted, Stored
from offload.scheduler.flow import ShortStored
from offload.scheduler.spelling import Spelling
from offload.scheduler.tiers.names import Path
from offload.scheduler.tiers.told import ExtentsNote, ToldExtents, spelled

PATH = Path([b"a", b"b", b"c", b"bag 0", b"bag 1"], stop=10, num_prefix=3, num_bag=6, end=b"end")
"""Extents of four positions: two whole ones and a short one, and a bag of two extents behind them."""


def test_a_checkpoint_is_told_with_the_last_extent_of_its_bag() -> None:
    told = ToldExtents(4)
    assert list(told.turned([Stored(PATH.names[:4], None, ExtentsNote(PATH))])) == [
        Stored([b"a", b"b"], None),
        ShortStored(2, b"c", b"b"),
    ]
    told.check_invariants()
    assert list(told.turned([Stored(PATH.names[4:], b"bag 0", ExtentsNote(PATH))])) == [
        BagStored(10, [b"end"])
    ]
    told.check_invariants()
    assert list(told.turned([Evicted([b"bag 1", b"bag 0", b"c", b"b"])])) == [
        BagEvicted(b"end"),
        Evicted([b"c", b"b"]),
    ]
    told.check_invariants()
    assert list(told.turned([Stored([b"bag 0"], b"c", ExtentsNote(PATH))])) == []


def test_what_is_told_is_spelled() -> None:
    """By what was written: from the second extent on, then from the third."""
    told, spelling = ToldExtents(4), Spelling(range(40), 1)
    note = ExtentsNote(PATH, spelling.part(4, 10), 1)
    assert list(told.turned([Stored([b"b", b"c", b"bag 0"], b"a", note)])) == [
        Stored([b"b"], b"a", spelling.part(4, 8)),
        ShortStored(2, b"c", b"b", spelling.part(8, 10)),
    ]
    whole = ExtentsNote(Path([b"a", b"b", b"c"], 12, 3, 0, b"c"), spelling.part(0, 12), 0)
    news = [Stored([b"a"], None, whole), Stored([b"c"], b"b", whole), Evicted([b"a"]), Stored([b"x"], None)]
    assert list(spelled(news, 4)) == [
        Stored([b"a"], None, spelling.part(0, 4)),
        Stored([b"c"], b"b", spelling.part(8, 12)),
        Evicted([b"a"]),
        Stored([b"x"], None),
    ]
