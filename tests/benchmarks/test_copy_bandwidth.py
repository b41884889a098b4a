"""Does the dry run of the copy benchmark move the right bytes, and judge its rows as it says?"""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import report
from benchmarks.copy_bandwidth import __main__ as copy_bandwidth
from benchmarks.copy_bandwidth.devices import CpuDevice
from benchmarks.copy_bandwidth.moves import DIRECTIONS, Pattern, draw
from benchmarks.copy_bandwidth.shapes import SHAPES
from benchmarks.copy_bandwidth.targets import TARGETS, judge
from benchmarks.copy_bandwidth.verify import WrongBytesError
from offload.messages import LOAD, STORE, Route
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.worker.copiers import Copier, CpuCopier
from offload.worker.layout import CopyBatch
from tests.benchmarks.conftest import Refusal, Run
from tests.offload.places import needs_gpu

KIB = 1 << 10
SMALL = ["deepseek-v2-lite", "deepseek-v2-lite-per-layer"]
TINY = ["--device", "cpu", "--rounds", "1", "--peak-mib", "1", "--shapes"]
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def nobody_looks_at_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load_note", list)


def test_rows_and_tables_of_the_dry_run(run: Run) -> None:
    ran = run(copy_bandwidth, *TINY, *SMALL, "--blocks", "64,1", "--torch-pieces", "60")
    rows = ran.rows
    assert [(row["shape"], row["blocks"], row["direction"], row["ids"], row["way"]) for row in rows] == [
        *(
            (shape, blocks, direction, ids, way)
            for shape in SMALL
            for blocks in (1, 64)
            for direction, ways in DIRECTIONS.items()
            for ids in ("contiguous", "scattered")
            for way in ("ours", "torch")
            if way == "ours" or SHAPES[shape].num_pieces * blocks * len(ways) <= 60
        ),
        *(("one buffer", 1, direction, "contiguous", "peak") for direction in DIRECTIONS),
    ]
    for row in rows:
        num_bytes = row["blocks"] * row["pieces"] * row["piece_bytes"] * len(DIRECTIONS[row["direction"]])
        assert row["seconds"] == row["host_seconds"] > 0
        assert row["way"] == "peak" or num_bytes / row["seconds"] / 1e9 == pytest.approx(
            row["gb_per_s"],
            rel=0.01,
            abs=0.0006,  # it is rounded
        )
        assert row["share_of_peak"] > 0 and row["submit_us_per_block"] > 0
        assert row["times_vllm"] is None
        assert row["way"] == "peak" or row["rounds"] == 1
    assert [row["share_of_peak"] for row in rows if row["way"] == "peak"][:2] == [1, 1]

    meta = ran.meta
    assert meta["notes"] == [CpuDevice.remark]
    assert meta["settings"]["device"] == "cpu" and meta["settings"]["blocks"] == [1, 64]
    rows_of_target = {each["target"]: each["rows"] for each in meta["targets"]}
    assert list(rows_of_target.values()) == [4, 0, 4, 0, 12]
    said = ran.out
    assert said.startswith(f"{CpuDevice.remark}\n") and said.count(CpuDevice.remark) == 2
    for title in ("copies", "ours, contiguous against scattered", "goals on a GPU"):
        assert f"\n{title}" in said


def test_sizes_are_those_of_the_models() -> None:
    assert {name: (shape.num_pieces, shape.piece_bytes) for name, shape in SHAPES.items()} == {
        "llama-8b": (1, 2048 * KIB),
        "llama-8b-per-layer": (32, 64 * KIB),
        "qwen-32b": (1, 4096 * KIB),
        "qwen-32b-per-layer": (64, 64 * KIB),
        "deepseek-v2-lite": (1, 27 * 18 * KIB),
        "deepseek-v2-lite-per-layer": (27, 18 * KIB),
    }


class Misplacing(CpuCopier):
    """Brings the right bytes to each other's places, in one direction."""

    wrong = STORE

    def submit(self, job_id: int, direction: Route, batch: CopyBatch) -> None:
        if direction is self.wrong:
            batch = batch._replace(targets=batch.targets[::-1].copy())
        super().submit(job_id, direction, batch)


class MisplacingLoads(Misplacing):
    wrong = LOAD


class Smearing(CpuCopier):
    """Brings the right bytes and spoils the source."""

    def submit(self, job_id: int, direction: Route, batch: CopyBatch) -> None:
        super().submit(job_id, direction, batch)
        self.drain()
        ctypes.memset(int(batch.sources[-1]), 0, int(batch.sizes[-1]))


@pytest.mark.parametrize(
    ("make", "which"),
    [
        (lambda: FaultyCopier(CpuCopier(), lambda *_: Fault.WRONG_BYTES), "slots after a store"),
        (lambda: FaultyCopier(CpuCopier(), lambda *_: Fault.END_SHORT), "slots after a store"),
        (Misplacing, "slots after a store"),
        (MisplacingLoads, "blocks after a load"),
        (Smearing, "blocks that were stored"),
    ],
    ids=["wrong bytes", "half of them", "stores misplaced", "loads misplaced", "sources spoilt"],
)
def test_wrong_bytes_end_it(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Copier], which: str) -> None:
    monkeypatch.setattr(CpuDevice, "make_copier", lambda *_: make())
    with pytest.raises(WrongBytesError, match=rf"{SMALL[1]}, ours, .*: wrong bytes in \d+ of 8 {which}"):
        copy_bandwidth.main([*TINY, SMALL[1], "--blocks", "8"])


def test_what_was_measured_is_told_when_a_copy_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    faults = iter([Fault.NONE] * 30)
    monkeypatch.setattr(
        CpuDevice,
        "make_copier",
        lambda *_: FaultyCopier(CpuCopier(), lambda *_: next(faults, Fault.FAIL)),
    )
    with pytest.raises(RuntimeError, match="a copy failed"):
        copy_bandwidth.main([*TINY, *SMALL, "--blocks", "1", "--json", str(out)])
    written = json.loads(out.read_text())
    assert {row["shape"] for row in written["rows"]} == set(SMALL)
    assert written["meta"]["notes"][-1].startswith("ended early: RuntimeError: a copy failed")
    assert "ended early" in capsys.readouterr().out


def test_rows_are_written_after_every_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver that crashes takes the process with it."""
    written: list[list[str]] = []
    monkeypatch.setattr(
        report, "write_json", lambda path, meta, rows: written.append([row["shape"] for row in rows])
    )
    copy_bandwidth.main([*TINY, *SMALL, "--blocks", "1", "--json", str(tmp_path / "rows.json")])
    assert [set(shapes) for shapes in written[:2]] == [{SMALL[0]}, set(SMALL)]
    assert set(written[-1]) == {*SMALL, "one buffer"}


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_is_drawn_twice(pattern: Pattern, direction: str) -> None:
    rng = np.random.default_rng(1)
    runs = 0
    for _ in range(50):
        moves = draw(rng, pattern, DIRECTIONS[direction], 10, 40)
        assert list(moves) == DIRECTIONS[direction]
        for number in range(2):
            columns = [pairs[number] for pairs in moves.values()]
            everything = np.concatenate(columns)
            assert everything.dtype == np.int64 and len(everything) == 10 * len(moves)
            assert len(set(everything.tolist())) == len(everything)
            assert everything.min() >= 0 and everything.max() < 40
            runs += sum(bool((np.diff(column) == 1).all()) for column in columns)
    assert runs == (100 * len(DIRECTIONS[direction]) if pattern is Pattern.CONTIGUOUS else 0)


def a_row(**changed: Any) -> Row:
    good = {
        "shape": "a shape",
        "pieces": 1,
        "piece_bytes": 2048 * KIB,
        "blocks": 64,
        "ids": "scattered",
        "direction": "down",
        "way": "ours",
        "share_of_peak": 0.95,
        "times_vllm": 1.0,
        "submit_us_per_block": 1.0,
    }
    return good | changed


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"share_of_peak": 0.949}, ["one piece"]),
        ({"share_of_peak": 0.949, "direction": "up"}, ["one piece"]),
        ({"share_of_peak": 0.1, "blocks": 63}, []),
        ({"share_of_peak": 0.1, "way": "torch"}, []),
        ({"share_of_peak": 0.85, "pieces": 32, "piece_bytes": 64 * KIB}, []),
        ({"share_of_peak": 0.849, "pieces": 32, "piece_bytes": 64 * KIB}, ["pieces of 64 KiB"]),
        ({"share_of_peak": 0.1, "pieces": 27, "piece_bytes": 18 * KIB}, []),
        ({"share_of_peak": 0.80, "direction": "both"}, []),
        ({"share_of_peak": 0.799, "direction": "both"}, ["both at once"]),
        ({"times_vllm": 0.999, "blocks": 1}, ["vLLM"]),
        ({"times_vllm": None}, []),
        ({"submit_us_per_block": 1.01}, ["submission"]),
        ({"submit_us_per_block": 60.0, "blocks": 8}, []),
    ],
)
def test_targets(changed: Row, missed: list[str]) -> None:
    row = a_row(**changed)
    verdicts = judge([row, a_row(way="vllm", share_of_peak=0.0)])
    assert [each.target for each in verdicts] == list(TARGETS)
    assert [each.target.name for each in verdicts if each.missed] == missed
    assert all(each.missed in ([], [row]) for each in verdicts)


def test_a_target_without_rows_is_not_measured() -> None:
    assert {each.answer for each in judge([])} == {"not measured"}
    answers = {each.target.name: each.answer for each in judge([a_row(), a_row(share_of_peak=0.5)])}
    assert answers == {
        "one piece": "missed",
        "pieces of 64 KiB": "not measured",
        "both at once": "not measured",
        "vLLM": "holds",
        "submission": "holds",
    }


def test_more_blocks_than_fit_are_fewer(run: Run) -> None:
    # 21 blocks of 486 KiB, so 10 each way
    ran = run(copy_bandwidth, *TINY, SMALL[0], "--gib", "0.01", "--blocks", "2,12,100")
    assert sorted({row["blocks"] for row in ran.rows if row["way"] == "ours"}) == [2, 8]
    note = f"{SMALL[0]}, 12, 100 blocks each way: more than fits in 0.01 GiB, 8 instead"
    assert note in ran.meta["notes"]
    assert ran.out.count(note) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--blocks", "0"], "--blocks: '0': must be a whole number, at least 1"),
        (["--blocks", "1,x"], "--blocks: 'x': must be"),
        (["--blocks", ""], "--blocks: '': must be"),
        (["--rounds", "-1"], "--rounds"),
        (["--gib", "0"], "--gib: '0': must be a number above 0"),
        (["--gib", "nan"], "--gib: 'nan': must be"),
        (["--peak-mib", "1.5"], "--peak-mib: '1.5': must be"),
        (["--shapes", "llama"], "--shapes: invalid choice: 'llama'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--gib", "0.0005", *TINY, *SMALL], "--blocks, --gib: nothing to measure"),
    ],
)
def test_bad_arguments(arguments: list[str], complaint: str, refusal: Refusal) -> None:
    assert complaint in refusal(copy_bandwidth, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(refusal: Refusal) -> None:
    assert "torch finds no CUDA device here" in refusal(copy_bandwidth, "--device", "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_bring_the_right_bytes_on_a_gpu(shape: str, run: Run) -> None:
    arguments = ["--device", "cuda", "--rounds", "1", "--peak-mib", "8", "--shapes", shape]
    ran = run(copy_bandwidth, *arguments, "--blocks", "1,16")
    assert {row["way"] for row in ran.rows} == {"ours", "vllm", "torch", "peak"}
