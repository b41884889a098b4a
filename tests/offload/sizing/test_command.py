"""The command ``kv-offload size``."""

import json
import sys
from pathlib import Path

import pytest

from offload.cli import main
from offload.settings import GIB

TOKEN = str(GIB // 512)
"""Bytes per token with which a block takes a GiB."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Nine documents of one block each, and of each two questions, one after the other."""
    lines = [
        {"timestamp": number, "input_length": 700, "output_length": 5, "hash_ids": [number // 2]}
        for number in range(18)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_prints_a_table_and_an_answer(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--trace", str(trace), "--model-config", TOKEN, "--policy", "lru"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "requests   18, 12,600 prompt tokens, 18 full blocks of 512, 9 different",
        "KV         2,097,152 bytes per token",
        "policy     lru",
        "",
        "GiB  blocks  of all  hit rate  points per GiB more",
        "---  ------  ------  --------  -------------------",
        "1.0       1   11.1%     50.0%                   50",
        "2.0       2   22.2%     50.0%                    0",
        "4.0       4   44.4%     50.0%                    0",
        "7.0       7   77.8%     50.0%                    0",
        "9.0       9  100.0%     50.0%                    0",
        "",
        "Sizes are rounded down to whole blocks; the last row is a pool without limit.",
        "A pool without limit (9.0 GiB) would find 50.0% of the blocks. 1.0 GiB find 50.0%, the smallest of "
        "these sizes with at least 90% of that.",
    ]


def test_a_hybrid_model_is_told_where_requests_go_on(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for window, is_told in ((None, False), (64, True)):
        config = {
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 128,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
        assert main(["size", "--trace", str(trace), "--model-config", str(tmp_path)]) == 0
        assert ("go on at checkpoints only" in capsys.readouterr().out) == is_told


def test_sizes_json_and_plot(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    png, rows = tmp_path / "plot.png", tmp_path / "rows.json"
    options = [
        "--model-config",
        str(tmp_path),
        "--gib",
        "0.001,0.004",
        "--plot",
        str(png),
        "--json",
        str(rows),
    ]
    assert main(["size", "--trace", str(trace), "--policy", "lru", *options]) == 0
    printed = capsys.readouterr().out
    assert (
        "KV         2,048 bytes per token (2 layers, 4 KV heads of 2 x 64 elements, 2 bytes each)" in printed
    )
    assert png.read_bytes().startswith(b"\x89PNG")
    written = json.loads(rows.read_text())
    assert [row["capacity_blocks"] for row in written["rows"]] == [1, 4, 9]
    assert written["rows"][0] == {
        "capacity_blocks": 1,
        "capacity_fraction": 1 / 9,
        "gib": 2**20 / GIB,
        "hit_rate": 0.5,
        "points_per_gib": 50 * 1024,
    }
    assert written["meta"] == {
        "trace": "trace.jsonl",
        "block_tokens": 512,
        "policy": "lru",
        "bytes_per_token": 2048,
        "requests": 18,
        "prompt_tokens": 12600,
        "prompt_blocks": 18,
        "distinct_blocks": 9,
    }


@pytest.mark.parametrize(
    ("ids", "sizes", "answer"),
    [
        ([1, 2, 3], "1", "No prompt begins with a block of an earlier one: a pool of any size"),
        ([1, 2, 1, 2], "1", "; none of the smaller sizes finds 90% of that."),
    ],
)
def test_other_answers(
    ids: list[int], sizes: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [each]} for each in ids]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["size", "--trace", str(path), "--model-config", TOKEN, "--gib", sizes]) == 0
    assert answer in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--trace", "/nowhere/t.jsonl"], "--trace /nowhere/t.jsonl: No such file or directory; record one"),
        (["--trace", __file__], "line 1: "),
        (["--model-config", "/nowhere"], "--model-config /nowhere/config.json: No such file"),
        (["--model-config", "0"], "--model-config 0 bytes of KV per token; give a positive number"),
        (["--gib", "8;16"], "--gib '8;16': give sizes in GiB, positive numbers with commas between"),
        (["--gib", "8,"], "--gib '8,': give sizes in GiB"),
        (["--gib", "0"], "--gib '0': give sizes in GiB"),
        (["--gib=-1"], "--gib '-1': give sizes in GiB"),
        (["--gib", "8,nan"], "--gib '8,nan': give sizes in GiB"),
        (["--gib", "inf"], "--gib 'inf': give sizes in GiB"),
        (["--gib", "1e400"], "--gib '1e400': give sizes in GiB"),
        (["--gib", "0.5"], "a pool of 0.5 GiB holds no block"),
        (["--trace", "/dev/null"], "/dev/null: has no requests; record some with record_trace"),
        (["--json", "/nowhere/rows.json"], "--json /nowhere/rows.json: there is no directory /nowhere"),
        (["--plot", "/"], "--plot /: it is a directory; name a file"),
        (["--json", "/dev/full"], "--json /dev/full: No space left on device; name a file"),
    ],
)
def test_bad_input_is_refused(
    options: list[str], reason: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", "--trace", str(trace), "--model-config", TOKEN, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("refused: ")
    assert reason in error


def test_a_plot_without_matplotlib_is_refused(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["size", "--trace", str(trace), "--model-config", TOKEN]
    assert main([*arguments, "--plot", str(trace.parent / "plot.png")]) == 1
    output = capsys.readouterr()
    assert "pip install matplotlib" in output.err
    assert not output.out  # before the replay, not after it
    assert main(arguments) == 0


@pytest.mark.parametrize(
    "options", [[], ["--trace", "t"], ["--trace", "t", "--model-config", "1", "--policy", "best"]], ids=str
)
def test_wrong_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["size", *options])
    assert ended.value.code == 2
