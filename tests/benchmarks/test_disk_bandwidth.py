"""The disk bandwidth benchmark runs, in small, with fio and without."""

from pathlib import Path

import pytest

from benchmarks.disk_bandwidth import __main__ as disk_bandwidth
from benchmarks.disk_bandwidth.fio import fio_version
from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.timeout(300)


def tiny(path: Path) -> list[str]:
    return ["--path", str(path), "--extents", "1", "--mib", "8", "--pairs", "2", "--slot-kib", "256"]


def test_a_small_run_without_fio(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_bandwidth, "fio_version", lambda: None)
    rows, meta, out, _ = run(disk_bandwidth, *tiny(tmp_path / "disk"))
    assert [(row["verb"], row["way"]) for row in rows] == [
        (verb, way) for verb in ("put", "get") for way in ("verified", "unverified", "bare")
    ]
    assert all(row["pairs"] == 2 and row["gb_per_s"] > 0 and row["share_of_fio"] is None for row in rows)
    assert any("not installed" in note for note in meta["notes"])
    assert "CPU s per GB" in out
    assert not list((tmp_path / "disk").iterdir()), "it leaves nothing behind"


@pytest.mark.skipif(fio_version() is None, reason="fio is not installed")
def test_a_small_run_beside_fio(run: Run, tmp_path: Path) -> None:
    rows, _, _, _ = run(disk_bandwidth, *tiny(tmp_path / "disk"))
    assert {row["way"] for row in rows} == {"verified", "unverified", "bare", "fio"}
    assert all(row["share_of_fio"] > 0 and row["cpu_s_per_gb"] >= 0 for row in rows)
