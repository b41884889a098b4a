"""The demo as `make demo` runs it, with short documents: two engines side by side, a table, a plot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there a demo has large engines"),
]

_SECONDS = 550  # on a busy machine


def test_demo(tmp_path: Path) -> None:
    """Three documents where the GPU cache holds two: asked again, ours come from the pool, all of them."""
    rows_file, plot = tmp_path / "demo.json", tmp_path / "demo.png"
    sizes = (
        "--documents 3 --document-tokens 512 --gpu-documents 2 --order tile --concurrency 1 --restore always"
    )
    command = (
        f"{sys.executable} -m benchmarks.long_document_qa --demo {sizes} --json {rows_file} --plot {plot}"
    )
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting 2 engines (prefix, offload) ..." in done.stderr
    first = done.stdout.index("3 documents asked again (pass 2): ")
    assert first < done.stdout.index("documents  pass  mode"), "the comparison comes before the table"
    rows = json.loads(rows_file.read_text())["rows"]
    assert [(row["mode"], row["pass"], row["requests"]) for row in rows] == [
        (mode, number, 3) for mode in ("prefix", "offload") for number in (1, 2)
    ]
    assert [rows[index]["cached_gpu_tokens"] + rows[index]["cached_cpu_tokens"] for index in (0, 2)] == [0, 0]
    assert rows[1]["cached_gpu_tokens"] < 3 * 512
    assert rows[3]["cached_gpu_tokens"] + rows[3]["cached_cpu_tokens"] == 3 * 512
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.log"))
