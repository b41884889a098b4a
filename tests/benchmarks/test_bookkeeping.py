"""The benchmarks of our own bookkeeping run, in small, and write what they print."""

import pytest

from benchmarks.gc_pause import __main__ as gc_pause
from benchmarks.resizing import __main__ as resizing
from benchmarks.splits import __main__ as splits
from benchmarks.storms import __main__ as storms
from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.timeout(120)


def test_pauses_of_collections(run: Run) -> None:
    ran = run(gc_pause, "--slots", "2000", "--chains", "8", "--policies", "hazard")
    [row] = ran.rows
    assert row["nodes"] > 100
    assert row["bytes_per_slot"] > 0
    assert "pause ms" in ran.out


def test_resizing(run: Run) -> None:
    ran = run(resizing, "--slots", "20000", "--chains", "8")
    assert [(row["unit_slots"], row["to"]) for row in ran.rows] == [
        *((1, "half"), (1, "whole")),
        *((2048, "half"), (2048, "whole")),
    ]
    assert all(row["steps"] > 1 and row["longest_ms"] >= row["median_ms"] > 0 for row in ran.rows)
    assert "longest ms" in ran.out


def test_splits(run: Run) -> None:
    ran = run(splits, "--blocks", "256")
    segments = [(row["policy"], row["segments"]) for row in ran.rows]
    for policy in ("hazard", "lru"):
        assert [count for name, count in segments if name == policy] == [1, 64, 1]
    assert "they are gone" in ran.out


def test_storms_writes_its_rows(run: Run) -> None:
    rows = {row["storm"]: row for row in run(storms, "--slots", "2000", "--chains", "4").rows}
    assert rows["unpin, at once"]["steps"] == 1
    assert rows["unpin, carried over"]["steps"] > 1, "500 pins ended in one step"
