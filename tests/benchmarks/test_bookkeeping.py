"""The benchmarks of our own bookkeeping run, in small, and write what they print."""

import json
from pathlib import Path

import pytest

from benchmarks.gc_pause import __main__ as gc_pause
from benchmarks.splits import __main__ as splits
from benchmarks.storms import __main__ as storms

pytestmark = pytest.mark.timeout(120)


def test_pauses_of_collections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert (
        gc_pause.main(["--slots", "2000", "--chains", "8", "--policies", "hazard", "--json", str(out)]) == 0
    )
    [row] = json.loads(out.read_text())["rows"]
    assert row["nodes"] > 100
    assert row["bytes_per_slot"] > 0
    assert "pause ms" in capsys.readouterr().out


def test_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert splits.main(["--blocks", "256", "--json", str(out)]) == 0
    segments = [(row["policy"], row["segments"]) for row in json.loads(out.read_text())["rows"]]
    for policy in ("hazard", "lru"):
        assert [count for name, count in segments if name == policy] == [1, 64, 1]
    assert "they are gone" in capsys.readouterr().out


def test_storms_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "storms.json"
    assert storms.main(["--slots", "2000", "--chains", "4", "--json", str(out)]) == 0
    rows = {row["storm"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["unpin, at once"]["steps"] == 1
    assert rows["unpin, carried over"]["steps"] > 1, "500 pins ended in one step"
