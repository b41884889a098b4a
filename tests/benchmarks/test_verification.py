"""The verification benchmark runs, in small, and writes what it prints."""

import json
from pathlib import Path

import pytest

from benchmarks.verification import __main__ as verification

pytestmark = pytest.mark.timeout(120)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    tiny = ["--blocks", "4", "--mib", "1", "--seconds", "0.01", "--bandwidths", "25"]
    assert verification.main([*tiny, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    checksums = [row for row in rows if row["kind"] == "checksum"]
    assert checksums
    assert all(row["gb_per_s"] > 0 for row in checksums)
    assert len(rows) > len(checksums)
    assert "share of restore time" in capsys.readouterr().out
