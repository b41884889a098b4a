"""The benchmark of batches that arrived in part: what it loses, what it counts, and a real engine once."""

import pytest

from benchmarks.long_document_qa.arguments import make_settings
from benchmarks.long_document_qa.settings import Settings
from benchmarks.partial_arrival import __main__ as partial_arrival
from benchmarks.partial_arrival.__main__ import BATCH_DEFAULTS, SCENES, draw_batch, row_of
from benchmarks.partial_arrival.engine import Answered
from offload.testing.engines.environment import ENVIRONMENT
from tests.benchmarks.conftest import Refusal, Run

SMALL = {"hidden-size": 64, "heads": 2, "kv-heads": 1, "layers": 2, "block-size": 32, "document-tokens": 128}


def settings() -> Settings:
    return make_settings({**BATCH_DEFAULTS, "device": "cpu"})


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("lost", [0, 1, 8])
def test_so_many_lack_so_much(scene: str, lost: int) -> None:
    batch = draw_batch(settings(), 8, scene, lost, 0)
    assert sum(batch.is_lost) == lost
    blocks = [number // 128 for number in batch.num_arrived]
    left = {"whole": 0, "tail": 21}[scene]
    assert blocks == [left if is_lost else 28 for is_lost in batch.is_lost]
    assert batch.num_missing == 8 + 128 * (28 - left) * lost
    assert [len(each) for each in batch.arrived] == [number for number in batch.num_arrived if number]


def test_prompts_of_rounds_differ() -> None:
    drawn = [draw_batch(settings(), 4, scene, 2, number) for scene in SCENES for number in range(2)]
    firsts = {prompt[:32].tobytes() for batch in drawn for prompt in batch.prompts}
    assert len(firsts) == 4 * 4


def test_a_row_tells_lost_ones_from_those_that_arrived() -> None:
    batch = draw_batch(settings(), 2, "whole", 1, 0)
    answers = {True: Answered(2.0, 3.0, 3585), False: Answered(0.5, 1.0, 1)}
    row = row_of("whole", 1, "missing only", [(batch, [answers[each] for each in batch.is_lost])])
    assert (row["lost_first_p50"], row["arrived_first_p50"], row["arrived_last_p95"]) == (2.0, 0.5, 1.0)
    assert row["tokens_computed"] == row["tokens_missing"] == 3586


def test_more_than_the_batch_cannot_be_lost(refusal: Refusal) -> None:
    assert "must be at most batch=2" in refusal(partial_arrival, "--batch", "2", "--lost", "3")


@pytest.mark.engine
def test_a_real_engine_computes_what_is_missing_and_nothing_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    options = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    ran = run(partial_arrival, "--batch", "3", "--lost", "0,1", "--rounds", "2", *options)
    computed = {(row["scene"], row["lost"], row["mode"]): row["tokens_computed"] for row in ran.rows}
    assert computed == {
        ("whole", 0, "missing only"): 3,
        ("whole", 1, "missing only"): 3 + 128,
        ("whole", 1, "all or nothing"): 3 * 129,
        ("tail", 1, "missing only"): 3 + 32,
        ("tail", 1, "all or nothing"): 3 * 129,
    }
    assert all(row["tokens_computed"] == row["tokens_missing"] for row in ran.rows if "only" in row["mode"])
