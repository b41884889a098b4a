"""Do users meet the link and the GPU that they are given, and does each mode do what it says?"""

import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine_replay import ReplayEngine, ReplaySettings, TimeModel
from benchmarks.engine_replay.engine import own_hash
from benchmarks.never_slower import __main__ as never_slower
from benchmarks.never_slower.replay import NEVER, Machine, replay
from benchmarks.never_slower.users import BLOCK, KINDS
from offload.testing.copiers.paced import VirtualClock
from tests.benchmarks.conftest import Refusal, Run

CELL = ("--workloads", "documents", "--prefills", "10000", "--seeds", "1", "--requests", "40")


def test_a_fast_link_pays_and_a_slow_one_does_not(run: Run) -> None:
    ran = run(never_slower, *CELL, "--links", "0.1,50")
    rows = {(row["link_gb_per_second"], row["mode"]): row for row in ran.rows}
    assert rows[50, "always"]["tokens_per_second"] > 2 * rows[50, "never"]["tokens_per_second"]
    assert rows[0.1, "always"]["tokens_per_second"] < 0.5 * rows[0.1, "never"]["tokens_per_second"]
    assert rows[0.1, "never"] == rows[50, "never"] | {
        "link_gb_per_second": 0.1,
        "against": "never",
        "throughput_ratio": 1.0,
        "p99_ratio": 1.0,
    }
    assert rows[50, "always"]["against"] == "always" and rows[50, "always"]["loaded_share"] > 0.5
    assert rows[50, "never"]["loaded_share"] == 0


@pytest.mark.parametrize("name", ["shared prefix", "agents"])
def test_a_replay_is_the_same_every_time(name: str) -> None:
    machine = Machine(25e9, 5_000.0)
    first, second = (replay("always", KINDS[name], machine, 60, seed=3) for _ in range(2))
    assert first == second
    assert len(first.ttft) > 0 and min(first.ttft) > 0 and first.seconds > 0


@pytest.mark.parametrize("name", KINDS)
def test_prompts_fit_and_hashes_are_those_of_their_blocks(name: str) -> None:
    kind = KINDS[name]
    for turn in islice(kind.turns(random.Random(1), 0), 60):
        assert len(turn.hashes) == turn.num_prompt // BLOCK
        assert turn.num_prompt + turn.num_output <= kind.longest <= kind.gpu_tokens
    again = [turn.hashes for turn in islice(kind.turns(random.Random(1), 0), 5)]
    assert again == [turn.hashes for turn in islice(kind.turns(random.Random(1), 0), 5)]


def test_without_reuse_an_engine_computes_as_fast_as_it_can() -> None:
    outcome = replay(NEVER, KINDS["no reuse"], Machine(1e9, 10_000.0), 60, seed=0)
    assert outcome.loaded == 0
    assert 0.8 * 10_000 < outcome.tokens / outcome.seconds < 10_000


def test_what_is_deep_takes_longer() -> None:
    def output(*begun: tuple[str, int, int]) -> Any:
        cached = SimpleNamespace(
            req_ids=[each[0] for each in begun], num_computed_tokens=[each[1] for each in begun]
        )
        tokens = {req_id: own for req_id, _, own in begun}
        return SimpleNamespace(
            total_num_scheduled_tokens=sum(tokens.values()),
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
        )

    model = TimeModel(step_seconds=1.0, tokens_per_second=10.0)
    assert model.seconds(output(("a", 1000, 20))) == 3.0
    deep = TimeModel(step_seconds=1.0, tokens_per_second=10.0, double_at=100)
    assert deep.seconds(output(("a", 90, 20))) == 5.0
    assert deep.seconds(output(("a", 90, 20), ("b", 0, 10))) == pytest.approx(6.05)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_users", [1, 4])
def test_an_engine_measures_its_own_speed(overlapped: bool, num_users: int) -> None:
    """Prompts of one step each, one at a time or several, with pauses or without."""
    clock, model = VirtualClock(), TimeModel(step_seconds=0.0, tokens_per_second=10_000.0)
    engine = ReplayEngine(
        ReplaySettings(
            connector="offload",
            gpu_blocks=1001,
            cpu_blocks=1000,
            chunk=1024,
            watch=False,
            time=model,
            clock=clock,
            overlapped=overlapped,
        )
    )
    try:
        for turn in range(10):
            for user in range(num_users):
                engine.add(f"{turn} {user}", [own_hash(f"{turn} {user}", n) for n in range(64)], 1024, 2)
            while not engine.is_idle():
                engine.step()
            clock.now += turn % 2
        told = engine.connector._scheduler.costs.prefill.seconds(0, 1024)
        assert told == pytest.approx(1024 / 10_000, rel=0.01)
    finally:
        engine.close()


def test_refusals(refusal: Refusal) -> None:
    assert "must be numbers above 0" in refusal(never_slower, "--links", "0.5,fast")
    assert "must be numbers above 0" in refusal(never_slower, "--prefills", "0")
    assert "'chat': must be one of" in refusal(never_slower, "--workloads", "chat")
