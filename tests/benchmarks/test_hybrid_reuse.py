"""The benchmark of documents asked again on hybrid models, small: its bars hold, and could be missed."""

import pytest

from benchmarks.common.shapes import SHAPES
from benchmarks.hybrid_reuse import __main__ as hybrid_reuse
from benchmarks.hybrid_reuse.asking import Asked, Bar
from tests.benchmarks.conftest import Run

SMALL = "--documents 2 --document-tokens 3000 --question-tokens 600 --siblings 2 --chunk 512 --engines"
POOLS = ("half full", "twice over")


@pytest.mark.parametrize("shape", SHAPES)
def test_bars(run: Run, shape: str) -> None:
    """Native computes whole documents, and ours the end of the last step, with pools of the same bytes."""
    chosen = ("--shapes", shape, "--pools", *POOLS, "--connectors", "native", "offload")
    ran = run(hybrid_reuse, *SMALL.split(), *chosen)
    ours = [row for row in ran.rows if row["connector"] == "offload"]
    assert [row["pool"] for row in ours] == [*POOLS]
    assert all(row["is_met"] for row in ours) and "(!)" not in ran.out
    [native] = [row for row in ran.rows if (row["connector"], row["pool"]) == ("native", "half full")]
    assert native["computed"] == [native["document_tokens"]] * 3
    half, over = ours
    block = SHAPES[shape][0].block_size
    assert half["near"] == max(512, block) and not half["missing"]
    assert half["most"] <= half["near"] and half["siblings"] <= half["near"]
    assert half["computed"][2] < block, "where the second ask left the first one, it has a checkpoint"
    assert over["bag_slots"] < half["bag_slots"], "the smallest pool is large enough for everything"
    assert half["bytes_with_bags"] == pytest.approx(1 + half["bag_slots"] / half["prefix_slots"], abs=1e-3)


def test_a_bar_is_missed_by_one_token() -> None:
    bar = Bar(near=1024, spacing=256)
    assert bar.is_met_by(Asked(0, 2, 1024, 0), is_half=True)
    assert not bar.is_met_by(Asked(0, 2, 1025, 0), is_half=True)
    assert not bar.is_met_by(Asked(0, 2, 1025, 16), is_half=True), "nothing may be missing then"
    assert bar.is_met_by(Asked(0, 2, 1296, 16), is_half=False)
    assert not bar.is_met_by(Asked(0, 2, 1297, 16), is_half=False)
