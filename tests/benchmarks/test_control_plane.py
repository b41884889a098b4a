"""The benchmark of the scheduler's side, tiny: that it runs, and what its rows are made of."""

import pytest

from benchmarks.control_plane import __main__ as control_plane
from benchmarks.control_plane import figures, kinds
from tests.benchmarks.conftest import Refusal, Run

PHASES = {"lookup", "plan", "complete", "finish", "other", "total"}
COLUMNS = {"connector", "tokens", "state", "phase", "us_per_block", "ms", "resident_blocks"}
CONNECTORS = ("offload", *control_plane.PEERS)
TINY = "--tokens 2048,4096 --runs 1 --resident 4096 --decode-steps 4 --churn 8192"


def test_rows(run: Run) -> None:
    """A warm run that did not restore everything, or a cold one that did not compute it, would fail."""
    rows, meta, _, _ = run(control_plane, *TINY.split())
    assert all(row.keys() >= COLUMNS for row in rows)
    resident = {"cold": (0, 4096), "warm": (0, 4096), "evicting": (4096 + 128 + 256,)}
    found = {
        tuple(row[name] for name in ("connector", "tokens", "state", "phase", "resident_blocks"))
        for row in rows
    }
    assert found >= {
        (connector, tokens, state, phase, blocks)
        for connector in CONNECTORS
        for tokens in (2048, 4096)
        for state in resident
        for blocks in resident[state]
        for phase in PHASES
    }
    for row in rows:
        if row["phase"] == "total":
            assert row["us_per_block"] == pytest.approx(row["ms"] * 1000 / (row["tokens"] / 16), rel=0.01)
    decode = [row for row in rows if (row["state"], row["phase"]) == ("decode", "step")]
    assert [row["connector"] for row in decode] == list(CONNECTORS)
    assert all(0 < row["us_median"] <= row["us_p99"] <= row["us_max"] for row in decode)
    memory = [(row["connector"], row["churned_blocks"]) for row in rows if row["state"] == "memory"]
    assert memory == [*(("offload", churned) for churned in range(0, 8193, 2048)), ("native-lru", 0)]
    assert len(meta["ratios"]) == len(control_plane.PEERS) * 2 * 5
    assert all(row["ratio"] >= 0 for row in meta["lookup_growth"]), "of times too short to tell"


def test_bars() -> None:
    """A ratio has a target where one is set, and a mark if it is below."""
    runs = {"offload": 10, "native-lru": 70, "simple": 20}
    rows = [
        row
        for connector, spent in runs.items()
        for row in figures.phase_rows(connector, 32768, "warm", 0, [{"plan": spent * 1_000_000}])
    ]
    ratios = figures.ratios(rows)
    assert [(row["ratio"], row["at_least"]) for row in ratios] == [(7.0, 8), (2.0, None)]
    assert "7.0 (!)" in figures.format_ratios(ratios)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 100", "100: must be a multiple of 16"),
        ("--tokens many", "'many': must be a whole number"),
        ("--peers best", "'best': must be one of native-lru, native-arc, simple"),
        ("--runs 0", "'0': must be a whole number, at least 1"),
    ],
)
def test_bad_values(arguments: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(control_plane, *arguments.split())


def test_kinds(run: Run) -> None:
    """Ours restores on models with states what native does, where vLLM keeps them wherever a chunk ends."""
    tiny = "--kind mamba --tokens 4096 --chunk 1024 --runs 1 --decode-steps 4"
    rows, meta, out, _ = run(control_plane, *tiny.split())
    states = {(row["shape"], row["state"]) for row in rows}
    assert states == {
        *(("small states", state) for state in ("cold", "warm", "decode")),
        *(("qwen3-next", state) for state in ("cold", "warm")),
    }
    computed = {
        row["connector"]: row["computed_tokens"]
        for row in rows
        if (row["shape"], row["state"]) == ("small states", "warm")
    }
    assert computed == {"offload": 800, "native": 800, "plain": 800, "ends only": 4096 + 800}
    assert len(meta["kinds"]) == 2 * 5 + 3
    assert all(row["ratio_of"] in out for row in meta["kinds"])


def test_bars_of_kinds() -> None:
    """The median of what ran side by side is what has to meet them."""
    about = {"kind": "window", "shape": "gpt-oss", "tokens": 16, "state": "warm"}
    spent = {"offload": [10, 20, 30], "plain": [6, 8, 10], "native": [100, 100, 600]}
    rows = [
        {**about, "connector": connector, "run": run, "total": time}
        for connector, times in spent.items()
        for run, time in enumerate(times)
    ]
    found = {row["ratio_of"]: (row["ratio"], row["is_met"]) for row in kinds.ratios(rows)}
    assert found == {"ours / plain": (2.5, False), "native / ours": (10.0, True)}
