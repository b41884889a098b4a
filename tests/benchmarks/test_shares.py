"""The benchmarks of what is stored, without a server: their products, and that blocks add up."""

import pytest

from benchmarks.served_share import __main__ as served_share
from benchmarks.stored_share import __main__ as stored_share
from benchmarks.stored_share.__main__ import Scene


def test_the_whole_product() -> None:
    scenes = list(stored_share._scenes(is_quick=False))
    assert len(set(scenes)) == len(scenes) == 4 * 2 * 3 * 6 * 3 * 2
    assert set(stored_share._scenes(is_quick=True)) <= set(scenes)
    served = list(served_share._scenes([1, 4, 8, 15], [1, 64], [1, 8]))
    assert len(set(served)) == len(served) == 2 * (4 * 3 + 1)
    assert {(scene.prompt_sixteenths, scene.at_once) for scene in served if scene.rested} == {
        *((length, 1) for length in (1, 4, 8, 15)),
        (1, 8),
    }


@pytest.mark.parametrize("length", [1, 15])
def test_all_is_stored_where_requests_come_after_the_copies(length: int) -> None:
    scene = Scene(length, 16, 1, at_once=1, copy_steps=4, is_waves=True)
    row = stored_share._row(scene, step_seconds=0.05)
    assert scene.comes_after_copies and row["share"] == 1.0 and not row["unstored"]


def test_what_is_not_stored_has_a_reason_and_what_is_waited_for_a_cost() -> None:
    scene = Scene(15, 16, 1, at_once=4, copy_steps=12, is_waves=False)
    row = stored_share._row(scene, step_seconds=0.05)
    full = scene.num_requests * (scene.prompt_tokens // 4)
    assert 0 < row["share"] < 1, "the test is blind"
    assert round(row["share"] * full) + sum(row["unstored"].values()) == full
    assert row["mean"] > row["mean_without"]
