"""The store benchmark runs, in small."""

import shutil
from importlib.util import find_spec

import pytest

from benchmarks.store_tier import __main__ as store_tier
from tests.benchmarks.conftest import Run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]


def test_a_small_run(run: Run) -> None:
    rows, _, out, _ = run(store_tier, "--rounds", "2", "--mib", "8", "--names", "64")
    mooncake = ["Mooncake", "Mooncake, one by one"]
    searches = ["search", "one by one", "search, Mooncake", "one by one, Mooncake"]
    if find_spec("mooncake") is None:
        mooncake, searches = [], searches[:2]
    assert [(row["what"], row["way"]) for row in rows] == [
        *((verb, way) for way in ["socket", "TCP", *mooncake] for verb in ("put", "get")),
        *(("64 names", way) for way in searches),
    ]
    assert all((row["gb_per_s"] or 0) > 0 or row["ms"] > 0 for row in rows)
    assert "CPU s per GB" in out


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert store_tier.main(["--server", "/nowhere/redis-server"]) == 1
    assert "not installed" in capsys.readouterr().out
