"""The random workload on the real scheduler: every byte attended to is right, nobody waits for ever."""

import random
from dataclasses import replace

import pytest

from offload.scheduler import costs
from offload.testing.virtual import RunFailedError, VirtualEngine, VirtualSettings, draw_settings, run_seed
from offload.testing.virtual.history import WrongBytesError
from offload.worker import allowance, transfer
from tests.seeds import seeds_of_runs
from tests.virtual.driver import make_engine, step_until, table_of, tokens


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_random_runs(first: int) -> None:
    for seed in seeds_of_runs(first, first + 8):
        run_seed(seed, turns=200)


@pytest.mark.parametrize("first", [2000, 2010])
def test_random_runs_with_stores_held_back(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as loads are under way, or for ``HOLD_SECONDS``: what stores may take is nothing."""
    monkeypatch.setattr(allowance, "STORE_BYTES_PER_SECOND", 0)
    monkeypatch.setattr(allowance, "_BURST_BYTES", 0)
    held = []
    begin_stores = transfer.TransferEngine._begin_held

    def counted(engine: transfer.TransferEngine) -> None:
        begin_stores(engine)
        held.append(len(engine._held))

    monkeypatch.setattr(transfer.TransferEngine, "_begin_held", counted)
    for seed in seeds_of_runs(first, first + 10):
        run_seed(seed, turns=150)
    assert any(held)


@pytest.mark.parametrize("first", [3000, 3010])
def test_random_runs_with_a_runner_that_samples_late(first: int) -> None:
    for seed in seeds_of_runs(first, first + 10):
        settings = draw_settings(random.Random(seed))
        run_seed(seed, turns=150, settings=replace(settings, samples_late=True))


@pytest.mark.parametrize("first", [3200, 3210])
def test_random_runs_of_an_engine_that_computes_on_cpus(first: int) -> None:
    for seed in seeds_of_runs(first, first + 10):
        settings = draw_settings(random.Random(seed))
        run_seed(seed, turns=150, settings=replace(settings, shares_cores=True))


@pytest.mark.parametrize(
    ("told", "not_submitted"),
    [({}, [0, 0]), ({"samples_late": True}, [1, 0]), ({"shares_cores": True}, [1, 0])],
)
def test_stores_are_submitted_with_the_next_step_where_this_one_goes_on(
    told: dict[str, bool], not_submitted: list[int]
) -> None:
    engine = make_engine(**told)
    (rank,) = engine.ranks
    assert rank.side is not None
    request = engine.add(tokens(20), 1)  # one step; what is stored of it is submitted although nothing runs
    seen = []
    for _ in not_submitted:
        engine.step()
        seen.append(len(rank.side._behind))
    assert request.is_finished() and seen == not_submitted
    engine.drain()
    engine.audit.check_drained()
    assert engine.side is not None and engine.side.allocator.resident_depth(request.block_hashes) == 5
    engine.close()


def test_a_seed_reproduces_a_run() -> None:
    first, second = run_seed(17, turns=150), run_seed(17, turns=150)
    assert (first.steps, first.positions_checked, first.counts) == (
        second.steps,
        second.positions_checked,
        second.counts,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_engine_is_not_blind(num_ranks: int) -> None:
    """One flipped bit of one layer of one rank is seen when the next token attends to it."""
    engine = make_engine(num_ranks=num_ranks)
    request = engine.add(tokens(20), 8)
    step_until(engine, lambda: request.num_output_tokens == 2)
    engine.ranks[-1].cells[1, table_of(engine, request)[2], 3, 0] ^= 1
    with pytest.raises(WrongBytesError, match=r"positions \[11\].*layers \[1\]") as failure:
        engine.step()
    assert "history of GPU block" in str(failure.value)
    engine.close()


def test_a_failure_names_its_seed_step_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: VirtualEngine, aborts: object = ()) -> None:
        raise RuntimeError("something below")

    monkeypatch.setattr(VirtualEngine, "step", step)
    with pytest.raises(RunFailedError, match=r"seed 5, step 0, VirtualSettings.*\nRuntimeError: something"):
        run_seed(5, settings=VirtualSettings())


def test_a_step_knows_how_deep_its_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of one request alone, and with two requests in a step."""
    monkeypatch.setattr(costs, "_LEAST_TOKENS", 2)
    engine = make_engine()
    engine.add(tokens(4), 1)
    step_until(engine, engine.is_idle)
    assert engine.side is not None
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(
        engine.side.costs.prefill, "begin", lambda num, depth: seen.append((num, depth())) or 0
    )
    most = engine.settings.chunk
    engine.add(tokens(2 * most + 6, 1000), 1)
    engine.step()
    engine.step()
    engine.add(tokens(4, 9000), 1)
    engine.step()
    assert seen[:3] == [(most, most / 2), (most, most * 1.5), (10, (6 * (2 * most + 3) + 4 * 2) / 10)]


def test_a_step_that_mostly_writes_answers_has_no_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_TOKENS", 2)
    engine = make_engine()
    answers = [engine.add(tokens(4, first), 9) for first in (0, 1000, 2000)]
    step_until(engine, lambda: all(answer.num_output_tokens > 1 for answer in answers))
    seen: list[tuple[int, float | None]] = []
    monkeypatch.setattr(
        engine.side.costs.prefill, "begin", lambda num, depth: seen.append((num, depth())) or 0
    )
    engine.step()
    engine.add(tokens(2, 3000), 1)
    engine.step()
    engine.add(tokens(4, 4000), 1)
    engine.step()
    assert [num for num, _ in seen] == [3, 5, 7]
    assert seen[0][1] is None and seen[1][1] is None and seen[2][1] is not None
