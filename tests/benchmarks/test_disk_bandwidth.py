"""The disk bandwidth benchmark runs, in small, with fio and without."""

import mmap
from pathlib import Path

import pytest

from benchmarks.disk_bandwidth import __main__ as disk_bandwidth
from benchmarks.disk_bandwidth.fio import fio_version
from benchmarks.disk_bandwidth.others import Files, Other, RocksDB, SQLite, reason_against_rocksdb
from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.timeout(300)


def tiny(path: Path) -> list[str]:
    return ["--path", str(path), "--extents", "1", "--mib", "8", "--pairs", "2", "--slot-kib", "256"]


def test_a_small_run_without_fio(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_bandwidth, "fio_version", lambda: None)
    monkeypatch.setattr(disk_bandwidth, "reason_against_rocksdb", lambda: "RocksDB: not measured")
    rows, meta, out, _ = run(disk_bandwidth, *tiny(tmp_path / "disk"))
    assert [(row["verb"], row["way"]) for row in rows] == [
        (verb, way)
        for verb in ("put", "get")
        for way in ("verified", "unverified", "bare", "bare, hot", "files", "sqlite")
    ]
    assert all(row["pairs"] == 2 and row["gb_per_s"] > 0 and row["share_of_fio"] is None for row in rows)
    assert any("not installed" in note for note in meta["notes"]) and "RocksDB: not measured" in meta["notes"]
    assert "CPU s per GB" in out
    assert not list((tmp_path / "disk").iterdir()), "it leaves nothing behind"


@pytest.mark.skipif(fio_version() is None, reason="fio is not installed")
def test_a_small_run_beside_fio(run: Run, tmp_path: Path) -> None:
    rows, _, _, _ = run(disk_bandwidth, *tiny(tmp_path / "disk"))
    assert {row["way"] for row in rows} >= {"verified", "unverified", "bare", "fio"}
    assert all(row["share_of_fio"] > 0 and row["cpu_s_per_gb"] >= 0 for row in rows)


@pytest.mark.parametrize("kind", [Files, SQLite, RocksDB])
def test_what_others_keep_is_what_was_put_last(kind: type[Other], tmp_path: Path) -> None:
    if kind is RocksDB and (reason := reason_against_rocksdb()) is not None:
        pytest.skip(reason)
    memory = mmap.mmap(-1, 6 * 4096)
    slots = [memoryview(memory)[at : at + 4096] for at in range(0, len(memory), 4096)]
    old, new, got = slots[:2], slots[2:4], slots[4:]
    for value, slot in enumerate(slots):
        slot[:] = bytes([value]) * 4096
    other = kind(tmp_path / "it", 2)
    for number in (7, 8):
        other.put(number, old)
    other.put(7, new)
    other.close()
    kind.forget_pages(tmp_path / "it")
    other = kind(tmp_path / "it", 2)
    for number, there in ((7, new), (8, old)):
        other.get(number, got)
        assert [bytes(each) for each in got] == [bytes(each) for each in there]
    other.close()
